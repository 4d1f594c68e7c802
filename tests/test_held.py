"""What a single sequence keeps on a CPU between decode steps is what the pool holds, and is given up where it must be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from radixkv.attention import Backend
from radixkv.cache import PrefixCache
from radixkv.kernels import reference, torch_held
from radixkv.kernels.torch_held import gather_held
from radixkv.pool import BlockPool
from radixkv.testing import OUT_TOLERANCE, PagedBatch, attention_error, paged_batch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 2, 64


def one_sequence(total: int, dtype: torch.dtype, seed: int) -> PagedBatch:
    return paged_batch([1], [total - 1], num_heads=HEADS, num_kv_heads=KV_HEADS, dtype=dtype, device="cpu", seed=seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_appended_keys_are_attended_and_stored(dtype: torch.dtype) -> None:
    full = one_sequence(60, dtype, seed=32)
    blocks = full.block_table[0][full.block_table[0] >= 0].tolist()
    k_pool, v_pool = full.k_pool.clone(), full.v_pool.clone()
    held = gather_held(k_pool, v_pool, blocks, 49)  # 3 whole blocks and one token of the fourth
    generator = torch.Generator().manual_seed(5)
    for position in range(49, 60):
        key, value = (torch.randn(1, KV_HEADS, 1, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
        held.append(key, value, torch.tensor([position]), torch.tensor([position % 16]))
        assert torch.equal(k_pool[blocks[-1], :, position % 16], key[0, :, 0])
        assert torch.equal(v_pool[blocks[-1], :, position % 16], value[0, :, 0])
        batch = replace(full, k_pool=k_pool, v_pool=v_pool, seq_lens=torch.tensor([position + 1], dtype=torch.int32))
        out = held.attend(full.query.transpose(0, 1)[None], full.scale)
        expected, _ = reference.decode_attention(*batch.double().decode_args(), scale=full.scale)
        assert attention_error(out[0].transpose(0, 1), expected) <= OUT_TOLERANCE[dtype]


def random_cache(num_blocks: int = 16) -> PrefixCache:
    pool = BlockPool(
        num_blocks,
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return PrefixCache(pool, Backend("torch", num_heads=HEADS, pool=pool))


def run_steps(cache: PrefixCache, num_prompt: int, num_new: int, **options: Any) -> Any:
    """Feed random K, V and queries through a prompt and decode steps; check each output against all K and V fed so far."""
    generator = torch.Generator().manual_seed(7)

    def rows(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, HEAD_DIM, generator=generator)

    fed: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(LAYERS)]

    def feed(step: Any, tokens: int) -> None:
        for layer in range(LAYERS):
            query, key, value = rows(HEADS, tokens), rows(KV_HEADS, tokens), rows(KV_HEADS, tokens)
            step.store(layer, key, value)
            fed[layer].append((key, value))
            out = step.attend(layer, query, scale=0.125, **options)
            keys, values = (torch.cat(parts, 2).double().repeat_interleave(HEADS // KV_HEADS, 1) for parts in zip(*fed[layer], strict=True))
            total = keys.shape[2]
            positions = torch.arange(total - tokens, total)[:, None]
            seen = torch.arange(total)[None] <= positions
            if options["sliding_window"]:
                seen &= torch.arange(total)[None] > positions - options["sliding_window"]
            scores = query.double() @ keys.transpose(2, 3) * 0.125
            expected = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ values
            assert (out.transpose(1, 2) - expected).abs().max() < 1e-5

    batch = cache.admit([torch.arange(num_prompt, dtype=torch.int32).numpy().tobytes()], [1])
    with cache.prompt_step(batch) as step:
        feed(step, num_prompt)
    for token in range(num_new):
        with cache.decode_step(batch, [0], [token]) as step:
            feed(step, 1)
    return batch


def test_decode_over_block_borders_gathers_once_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers = []

    def gather(*arguments: Any) -> torch_held.Held:
        gathers.append(arguments)
        return gather_held(*arguments)

    monkeypatch.setattr("radixkv.step.gather_held", gather)
    batch = run_steps(random_cache(), 20, 40, sliding_window=None, softcap=None)  # 20 tokens end in the second block, 60 in the fourth
    assert len(gathers) == 2 * LAYERS and len(batch.carried) == LAYERS


def test_a_sliding_window_is_never_served_from_what_is_kept() -> None:
    batch = run_steps(random_cache(), 20, 20, sliding_window=18, softcap=None)
    assert all(held.num_keys <= 40 for held in batch.carried.values())


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence too long to be kept twice is gathered anew every step."""
    monkeypatch.setattr(torch_held, "HELD_BYTES", 30 * KV_HEADS * HEAD_DIM * 4)
    monkeypatch.setattr("radixkv.step.gather_held", None)
    batch = run_steps(random_cache(), 40, 10, sliding_window=None, softcap=None)
    assert not batch.carried


def test_an_interrupted_layer_is_not_appended_to_twice() -> None:
    """A step that failed after some layers stored its token is followed by one that stores it again in all."""
    cache = random_cache()
    batch = run_steps(cache, 20, 3, sliding_window=None, softcap=None)
    key = torch.randn(1, KV_HEADS, 1, HEAD_DIM)
    with pytest.raises(KeyboardInterrupt), cache.decode_step(batch, [0], [3]) as step:
        step.store(0, key, key)
        raise KeyboardInterrupt
    assert batch.sequences[0].num_stored == 23
    cache.store(batch)
    cache.check()
