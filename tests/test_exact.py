"""patch_model(..., exact=True): attention is the same to the bit alone and in a batch, cached and computed, whole and in pieces.

What is compared is attention given equal q, k and v: the model's matrix products change bits with the batch, so the tests feed the step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radixkv
from radixkv.attention import Backend
from radixkv.cache import PrefixCache
from radixkv.pool import BlockPool
from tests.models import prompt, tiny_qwen2

HEADS, KV_HEADS, HEAD_DIM = 3, 1, 64
VOCABULARY = 4000
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Tables:
    """q, k and v of a token are functions of its id and position, so that equal prefixes have equal K/V whoever computes them."""

    def __init__(self, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(1)
        self.rows = [torch.randn(VOCABULARY, heads, HEAD_DIM, generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def of(self, ids: list[int]) -> list[torch.Tensor]:
        """`[1, heads, T, head_dim]` of q, k and v."""
        return [rows[torch.tensor(ids)].transpose(0, 1)[None] for rows in self.rows]


def make_cache(dtype: torch.dtype, *, exact: bool, num_blocks: int = 160, block_size: int = 16) -> PrefixCache:
    pool = BlockPool(
        num_blocks, num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=block_size, dtype=dtype, device=torch.device("cpu")
    )
    return PrefixCache(pool, Backend("triton", num_heads=HEADS, pool=pool, exact=exact))


def generate(cache: PrefixCache, tables: Tables, prompts: list[list[int]], new: list[list[int]]) -> list[torch.Tensor]:
    """Run the prompts as one batch and append new[row][i] at step i; per row the outputs of its last prompt token and of its new ones."""
    batch = cache.admit([torch.tensor(row, dtype=torch.int32).numpy().tobytes() for row in prompts], [1] * len(prompts))
    outputs: list[list[torch.Tensor]] = [[] for _ in prompts]

    def attend(step: Any, ids: list[int]) -> torch.Tensor:
        step.begin()
        query, key, value = tables.of(ids)
        step.store(0, key, value)
        return step.attend(0, query, scale=HEAD_DIM**-0.5, sliding_window=None, softcap=None)[0]

    with cache.prompt_step(batch) as step:
        plan: Any = step.plan
        out = attend(step, plan.token_ids.tolist())
        ends = [*plan.starts[1:], plan.num_tokens]
    for row, end in enumerate(ends):
        outputs[row].append(out[end - 1])
    for tokens in zip(*new, strict=True):
        with cache.decode_step(batch, list(range(len(prompts))), list(tokens)) as step:
            out = attend(step, list(tokens))
        for row in range(len(prompts)):
            outputs[row].append(out[row].clone())
    cache.store(batch)
    cache.check()
    return [torch.stack(rows) for rows in outputs]


def ids(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


DOCUMENT = ids(290, 10)  # more than one chunk of 256
PROMPTS = [DOCUMENT + ids(5, 11), DOCUMENT[:270] + ids(20, 12), ids(40, 13), DOCUMENT + ids(9, 14)]
NEW = [ids(2, 20 + row) for row in range(len(PROMPTS))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_alone_and_in_a_batch_that_shares(dtype: torch.dtype) -> None:
    tables = Tables(dtype)
    together = generate(make_cache(dtype, exact=True), tables, PROMPTS, NEW)
    for row in range(len(PROMPTS)):
        alone = generate(make_cache(dtype, exact=True), tables, PROMPTS[row : row + 1], NEW[row : row + 1])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cached_prefix_is_the_same_as_a_computed_one(dtype: torch.dtype) -> None:
    tables = Tables(dtype)
    cold = generate(make_cache(dtype, exact=True), tables, PROMPTS[:1], NEW[:1])
    cache = make_cache(dtype, exact=True)
    generate(cache, tables, [DOCUMENT[:123]], [[]])  # in pieces: chunked prefill
    generate(cache, tables, [DOCUMENT[:277]], [[]])
    assert torch.equal(generate(cache, tables, PROMPTS[:1], NEW[:1])[0], cold[0])
    assert cache.stats().cached_tokens == 123 + 277


def test_physical_order_does_not_matter() -> None:
    """Blocks taken from a pool that has been used before come in any order."""
    tables = Tables(torch.float32)
    for exact in (True, False):
        first = generate(make_cache(torch.float32, exact=exact), tables, PROMPTS, NEW)
        cache = make_cache(torch.float32, exact=exact)
        held = [cache.allocate(7) for _ in range(8)]
        for blocks in held[::-2]:
            cache.pool.release(blocks)
        batch = generate(cache_without_check(cache), tables, PROMPTS, NEW)
        assert all(map(torch.equal, first, batch))


def cache_without_check(cache: PrefixCache) -> PrefixCache:
    """Blocks that the test itself holds are nobody's to `check`."""
    cache.check = lambda: None  # type: ignore[method-assign]
    return cache


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 3e-4), (torch.bfloat16, 2.5e-3)], ids=str)
def test_the_default_plan_agrees_to_rounding(dtype: torch.dtype, bound: float) -> None:
    """Outputs are compared after the cast, so half a unit of the dtype is added to what may differ before it."""
    tables = Tables(dtype)
    exact = generate(make_cache(dtype, exact=True), tables, PROMPTS, NEW)
    default = generate(make_cache(dtype, exact=False), tables, PROMPTS, NEW)
    for got, wanted in zip(default, exact, strict=True):
        error = (got.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)
        assert error.max() <= bound + torch.finfo(dtype).eps


def test_exact_generation_of_a_model() -> None:
    model, stock = tiny_qwen2(seed=3, num_layers=2), tiny_qwen2(seed=3, num_layers=2)
    radixkv.patch_model(model, num_blocks=64, block_size=16, backend="triton", exact=True)
    rows = prompt(30, seed=1)[None]
    for _ in range(2):
        assert torch.equal(model.generate(rows, max_new_tokens=5, do_sample=False), stock.generate(rows, max_new_tokens=5, do_sample=False))


def test_exact_without_triton_is_refused() -> None:
    model = tiny_qwen2(seed=3, num_layers=1)
    with pytest.raises(ValueError, match="exact=True needs the Triton kernels, and the backend is 'torch'"):
        radixkv.patch_model(model, num_blocks=8, backend="torch", exact=True)
    assert not hasattr(model, "radixkv")
