"""Decode steps on a CPU that are moved on from the step before attend to what steps built anew would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixkv.attention import Backend
from radixkv.cache import PrefixCache
from radixkv.host_plan import HostDecodePlan
from radixkv.kernels import reference, torch_ops
from radixkv.pool import BlockPool
from radixkv.testing import assert_attention_close
from tests.models import prompt

BLOCK, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 16


def poisoned_cache(dtype: torch.dtype = torch.float32) -> PrefixCache:
    """Every slot that no row has written is NaN, so that one that is read by mistake shows."""
    pool = BlockPool(160, num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK, dtype=dtype, device="cpu")
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(float("nan"))
    return PrefixCache(pool, Backend("torch", num_heads=HEADS, pool=pool))


def feed(step: Any, num_tokens: int, dtype: torch.dtype) -> None:
    step.begin()
    step.store(0, *(torch.randn(1, KV_HEADS, num_tokens, HEAD_DIM, dtype=dtype) for _ in range(2)))


def open_rows(cache: PrefixCache, lengths: list[int], shared: int, dtype: torch.dtype = torch.float32) -> Any:
    document = prompt(shared, seed=1)
    keys = [torch.cat([document, prompt(length, seed=10 + i)]).numpy().astype("<i4").tobytes() for i, length in enumerate(lengths)]
    batch = cache.admit(keys, [1] * len(keys))
    with cache.prompt_step(batch) as step:
        feed(step, step.plan.num_tokens, dtype)  # type: ignore[union-attr]
    return batch


def decode(cache: PrefixCache, batch: Any, rows: list[int], window: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """One step of some rows, whose attention is compared with the reference; returns its plan."""
    query = torch.randn(len(rows), HEADS, HEAD_DIM, dtype=dtype)
    with cache.decode_step(batch, rows, [5] * len(rows)) as step:
        feed(step, len(rows), dtype)
        work, pools = step.plan.work(window), (cache.pool.keys[0], cache.pool.values[0])
        options: dict[str, Any] = {"scale": 0.3, "sliding_window": window}
        out, lse = torch_ops.decode_attention(query, *pools, step.plan.block_table, step.plan.seq_lens, plan=work, **options)
    sequences = [batch.sequences[row] for row in rows]
    table = torch.full((len(rows), max(len(row.blocks) for row in sequences)), -1, dtype=torch.int32)
    for i, row in enumerate(sequences):
        table[i, : len(row.blocks)] = torch.tensor(row.blocks)
    lens = torch.tensor([row.num_tokens for row in sequences], dtype=torch.int32)
    keys, values = (pool.double() for pool in pools)
    expected, exact_lse = reference.decode_attention(query.double(), keys, values, table, lens, **options)
    # In half precision the work asks for the rounding of scaled_dot_product_attention, whose LSE nobody reads.
    assert_attention_close(out, lse if dtype == torch.float32 else exact_lse, expected, exact_lse, dtype)
    return step.plan


@pytest.mark.parametrize(
    ("lengths", "shared"),
    [
        ([3, 3, 3], 0),
        ([1, 15, 16, 17, 31, 9], 0),
        ([2, 40, 90, 5], 20),
        ([5, 9, 14, 30, 33, 2, 2, 7], 600),
        ([7, 300, 8], 0),
    ],
    ids=["equal lengths", "around block borders", "a shared block", "a long shared run", "far apart"],
)
def test_thirty_five_steps(lengths, shared):
    """Every row begins two blocks, at different steps; the plan is made once."""
    cache = poisoned_cache()
    batch = open_rows(cache, lengths, shared)
    torch.manual_seed(3)
    rows = list(range(len(lengths)))
    plans = {id(decode(cache, batch, rows)) for _ in range(35)}
    assert len(plans) == 1 and isinstance(batch.carried[HostDecodePlan], HostDecodePlan)
    cache.discard(batch)
    cache.check()


def test_items_that_have_grown_too_large_are_cut_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of one block attend together; at twice the size they do no longer."""
    size = 4 * KV_HEADS * BLOCK * HEAD_DIM * 4
    for module in ("torch_items", "torch_ops"):
        monkeypatch.setattr(f"radixkv.kernels.{module}.GATHER_BYTES", size)
    cache = poisoned_cache()
    batch = open_rows(cache, [3, 4, 5, 6], 0)
    counts = []
    for _ in range(40):
        plan = decode(cache, batch, [0, 1, 2, 3])
        (items,) = plan.work(None).scratch["torch_items"].values()
        counts.append(len(items))
    assert counts[0] == 1 and counts[-1] > 1
    cache.discard(batch)


def test_a_sliding_window():
    cache = poisoned_cache()
    batch = open_rows(cache, [3, 30, 17], 5)
    for _ in range(20):
        decode(cache, batch, [0, 1, 2], window=18)
    cache.discard(batch)


def test_half_precision():
    cache = poisoned_cache(torch.float16)
    batch = open_rows(cache, [3, 30, 17, 9], 5, torch.float16)
    for _ in range(20):
        decode(cache, batch, [0, 1, 2, 3], dtype=torch.float16)
    cache.discard(batch)


def test_rows_that_come_go_or_change_are_not_gone_on_from():
    cache = poisoned_cache()
    batch, other = open_rows(cache, [3, 30, 17], 5), open_rows(cache, [8, 21], 5)
    for _ in range(3):
        decode(cache, batch, [0, 1, 2])
    for _ in range(3):
        decode(cache, batch, [0, 2])
    cache.truncate(batch, [100, 20, 100])
    for _ in range(3):
        decode(cache, batch, [0, 1, 2])
    cache.join(batch, other)
    for _ in range(3):
        decode(cache, batch, [0, 1, 2, 3, 4])
    cache.publish(batch, 1)
    for _ in range(20):
        decode(cache, batch, [0, 1, 2, 3, 4])
    cache.store(cache.part(batch, [0, 3]))
    for _ in range(3):
        decode(cache, batch, [0, 1, 2])
    with pytest.raises(KeyboardInterrupt), cache.decode_step(batch, [0, 1, 2], [5, 5, 5]) as step:
        step.begin()
        raise KeyboardInterrupt
    for _ in range(3):
        decode(cache, batch, [0, 1, 2])
    cache.check()
    cache.discard(batch)
    cache.check()
