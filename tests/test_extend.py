"""The wide split kernel against float64 on hand-made items: each partial is attention over one range of keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv.kernels import extend
from radixkv.kernels.configs import extend_config
from radixkv.kernels.work import SplitItems, Work
from radixkv.testing import PagedBatch, assert_attention_close, paged_batch, untouched_pool

HEAD_DIMS = [64, 80, 96, 128, 256]
HALF = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]
OPEN = 1 << 20


@dataclass(frozen=True)
class Range:
    """Tokens, rows of query, that attend to the keys first .. end of a sequence."""

    seq: int
    tokens: list[int]
    first: int
    end: int


def ends_of(batch: PagedBatch) -> Tensor:
    """Return how many keys each token sees, int32 `[num_tokens]`."""
    borders = batch.cu_query_lens.tolist()
    ends: list[int] = []
    for seq, seq_len in enumerate(batch.seq_lens.tolist()):
        new = borders[seq + 1] - borders[seq]
        ends += range(seq_len - new + 1, seq_len + 1)
    return torch.tensor(ends, dtype=torch.int32, device=batch.query.device)


def wide_work(batch: PagedBatch, ranges: list[Range], most_rows: int | None = None) -> Work:
    """Return the work of some ranges, cut into items of at most most_rows rows, over partials in another order than entries."""
    num_heads, head_dim = batch.query.shape[1:]
    group = num_heads // batch.k_pool.shape[1]
    config = extend_config(head_dim, batch.query.dtype, batch.k_pool.shape[2])
    most_rows = config.tile_rows if most_rows is None else most_rows
    tokens: list[int] = []
    items: list[list[int]] = []
    for part in ranges:
        first_row, end_row = len(tokens) * group, (len(tokens) + len(part.tokens)) * group
        rows = range(first_row, end_row, most_rows)
        items += [[row, min(most_rows, end_row - row), part.seq, part.first, part.end] for row in rows]
        tokens += part.tokens
    # Past the live items there is garbage.
    table = torch.tensor([*items, [1 << 30] * 5, [-7] * 5], dtype=torch.int32)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1)) + 1
    device = batch.query.device
    return Work(
        [],
        [],
        [],
        wide=SplitItems(table.to(device), torch.tensor([len(items)], dtype=torch.int32, device=device)),
        entry_tokens=torch.tensor(tokens, dtype=torch.int32, device=device),
        entry_partials=order.int().to(device),
        ends=ends_of(batch),
        num_partials=len(tokens) + 2,
    )


def run(batch: PagedBatch, work: Work, sliding_window: int | None = None, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """Run the kernel into partials that are NaN before, and return those of the entries, in the entries' order."""
    assert work.ends is not None and work.entry_partials is not None
    part_out = torch.full((work.num_partials, *batch.query.shape[1:]), float("nan"), device=batch.query.device)
    part_lse = torch.full(part_out.shape[:2], float("nan"), device=batch.query.device)
    args = (work, batch.query, batch.k_pool, batch.v_pool, batch.block_table, work.ends, part_out, part_lse)
    extend.launch_wide(*args, scale=batch.scale, sliding_window=sliding_window, softcap=softcap)
    partials = work.entry_partials.long()
    untouched = torch.ones(work.num_partials, dtype=torch.bool, device=part_out.device)
    untouched[partials] = False
    assert bool(part_out[untouched].isnan().all()) and bool(part_lse[untouched].isnan().all())
    return part_out[partials], part_lse[partials]


def wanted(batch: PagedBatch, ranges: list[Range], sliding_window: int | None, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Attend in float64, token by token."""
    ends = ends_of(batch).tolist()
    block_size, group = batch.k_pool.shape[2], batch.query.shape[1] // batch.k_pool.shape[1]
    outs, lses = [], []
    for part, token in [(one, token) for one in ranges for token in one.tokens]:
        first = part.first if sliding_window is None else max(part.first, ends[token] - sliding_window)
        keys = torch.arange(first, max(first, min(part.end, ends[token])), device=batch.query.device)
        blocks = batch.block_table[part.seq].long()[keys // block_size]
        key = batch.k_pool[blocks, :, keys % block_size].double().repeat_interleave(group, 1)
        value = batch.v_pool[blocks, :, keys % block_size].double().repeat_interleave(group, 1)
        scores = torch.einsum("hd,khd->hk", batch.query[token].double(), key) * batch.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        lse = torch.logsumexp(scores, 1)
        weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[:, None])
        outs.append(torch.einsum("hk,khd->hd", weights, value))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def assert_matches(batch: PagedBatch, ranges: list[Range], sliding_window: int | None = None, softcap: float | None = None) -> None:
    """Compare every partial with float64. Partials are fp32, whatever the inputs; weights are rounded to the dtype of V."""
    out, lse = run(batch, wide_work(batch, ranges), sliding_window, softcap)
    assert_attention_close(out, lse, *wanted(batch, ranges, sliding_window, softcap), batch.query.dtype)


def shared_batch(seq_lens: list[int], shared: int, **options: Any) -> PagedBatch:
    """Return decode rows whose first `shared` tokens, whole blocks, are one and the same; the blocks so freed are NaN."""
    batch = paged_batch([1] * len(seq_lens), [seq_len - 1 for seq_len in seq_lens], **options)
    num_shared = shared // batch.k_pool.shape[2]
    freed = batch.block_table[1:, :num_shared].flatten().long()
    batch.k_pool[freed], batch.v_pool[freed] = float("nan"), float("nan")
    batch.block_table[1:, :num_shared] = batch.block_table[0, :num_shared]
    return batch


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda head_dim: f"d{head_dim}")
@pytest.mark.parametrize("group", [1, 5, 7, 16], ids=lambda group: f"group{group}")
def test_short_extension_over_a_long_prefix(group: int, head_dim: int) -> None:
    """Three new tokens; a range of whole tiles, one that begins at a branch point, and the open one with the causal end of each row."""
    batch = paged_batch([2, 3], [9, 170], num_heads=2 * group, head_dim=head_dim)
    assert_matches(batch, [Range(1, [2, 3, 4], 0, 128), Range(1, [2, 3, 4], 128, 144), Range(1, [2, 3, 4], 144, OPEN)])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("group", "head_dim"), [(7, 64), (3, 80), (5, 96), (6, 128), (2, 256)])
def test_half_precision(group: int, head_dim: int, dtype: torch.dtype) -> None:
    batch = paged_batch([4], [170], num_heads=2 * group, head_dim=head_dim, dtype=dtype)
    assert_matches(batch, [Range(0, [0, 1, 2, 3], 16, 144), Range(0, [0, 1, 2, 3], 144, OPEN)])


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="fp32"), *HALF])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes_below_and_above_a_tile(block_size: int, dtype: torch.dtype) -> None:
    """Ranges begin and end at every kind of place in a tile, and in one tile."""
    batch = paged_batch([3], [290], block_size=block_size, dtype=dtype)
    borders = [0, 128, 128 + block_size, 128 + 2 * block_size, OPEN] if block_size < 128 else [0, 64, 128, 256, OPEN]
    assert_matches(batch, [Range(0, [0, 1, 2], first, end) for first, end in zip(borders[:-1], borders[1:], strict=True)])


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")])
@pytest.mark.parametrize("group", [1, 7, 40])
def test_a_range_shared_by_many_decode_rows(group: int, dtype: torch.dtype) -> None:
    """Rows of different sequences and lengths in one item; items begin and end inside a token; private rests beside."""
    lens = [112, 130, 113, 170, 120, 112, 199]
    batch = shared_batch(lens, 112, num_heads=group, num_kv_heads=1, dtype=dtype)
    ranges = [Range(3, list(range(7)), 0, 112), *(Range(seq, [seq], 112, OPEN) for seq in range(7))]
    assert_matches(batch, ranges)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 64, 100])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="fp32"), pytest.param(torch.float16, id="fp16")])
def test_window(window: int, dtype: torch.dtype) -> None:
    """Keys outside every row's window are NaN; the first range is outside for all rows and gives (0, -inf), or for some.

    Ranges begin and end inside tiles.
    """
    batch = paged_batch([5], [210], sliding_window=window, dtype=dtype)
    tokens = [0, 1, 2, 3, 4]
    assert_matches(batch, [Range(0, tokens, 0, 112), Range(0, tokens, 112, 144), Range(0, tokens, 144, OPEN)], sliding_window=window)


@pytest.mark.parametrize(("softcap", "window"), [(2.0, None), (50.0, None), (2.0, 40)])
def test_softcap(softcap: float, window: int | None) -> None:
    batch = paged_batch([3], [100], sliding_window=window)
    assert_matches(batch, [Range(0, [0, 1, 2], 0, 64), Range(0, [0, 1, 2], 64, OPEN)], sliding_window=window, softcap=softcap)


def test_empty_rows_and_ranges_leave_the_others_alone() -> None:
    """A sequence of no keys, a range that lies beyond it, and a range that only the later tokens reach."""
    batch = paged_batch([1, 40], [-1, 30])
    tokens = list(range(1, 41))
    assert_matches(batch, [Range(0, [0], 0, OPEN), Range(1, [0, 1], 0, 16), Range(1, tokens, 48, OPEN), Range(1, [1], 64, 128)])


def test_rows_depend_neither_on_item_mates_nor_on_blocks_nor_on_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = shared_batch([130, 140, 135, 200], 128, num_heads=10, num_kv_heads=2, dtype=torch.bfloat16)
    ranges = [Range(0, [0, 1, 2, 3], 0, 128), *(Range(seq, [seq], 128, OPEN) for seq in range(4))]
    out, lse = run(batch, wide_work(batch, ranges))
    last = batch.k_pool.shape[0] - 1
    moved = replace(
        batch,
        k_pool=batch.k_pool.flip(0).contiguous(),
        v_pool=batch.v_pool.flip(0).contiguous(),
        block_table=torch.where(batch.block_table < 0, -1, last - batch.block_table),
    )
    alone = [Range(2, [token], 0, 128) for token in range(4)] + ranges[1:]
    monkeypatch.setattr(extend, "program_slots", lambda kernel, tensor, ctas: 3)
    for other, parts, most_rows in ((batch, ranges, 7), (moved, ranges, None), (batch, alone, None), (batch, alone, 1)):
        other_out, other_lse = run(other, wide_work(other, parts, most_rows))
        assert torch.equal(other_out, out) and torch.equal(other_lse, lse)


def test_lengths_advance_on_the_device() -> None:
    """One item list serves as its rows grow: the last range is open."""
    batch = paged_batch([2], [150])
    ranges = [Range(0, [0, 1], 0, 128), Range(0, [0, 1], 128, OPEN)]
    work = wide_work(batch, ranges)
    assert work.ends is not None
    shorter = replace(batch, seq_lens=batch.seq_lens - 20)
    work.ends.sub_(20)
    assert_attention_close(*run(batch, work), *wanted(shorter, ranges, None, None), torch.float32)


def test_query_may_be_a_transposed_view() -> None:
    batch = paged_batch([3], [100])
    view = replace(batch, query=batch.query.transpose(0, 1).contiguous().transpose(0, 1))
    work = wide_work(batch, [Range(0, [0, 1, 2], 0, OPEN)])
    assert all(torch.equal(one, other) for one, other in zip(run(view, work), run(batch, work), strict=True))


def test_addresses_beyond_int32_are_met() -> None:
    """block * stride wrapped in int32 on a large pool. The pool is virtual memory: only its last blocks are ever touched."""
    small = paged_batch([3], [80], num_heads=2, num_kv_heads=1, dtype=torch.float16)
    num_blocks, live = 2**31 // (16 * 64) + 8, small.k_pool.shape[0]
    pools = untouched_pool(num_blocks), untouched_pool(num_blocks)
    pools[0][-live:], pools[1][-live:] = small.k_pool, small.v_pool
    table = torch.where(small.block_table < 0, -1, small.block_table + num_blocks - live)
    large = replace(small, k_pool=pools[0], v_pool=pools[1], block_table=table)
    work = wide_work(small, [Range(0, [0, 1, 2], 0, OPEN)])
    assert all(torch.equal(one, other) for one, other in zip(run(large, work), run(small, work), strict=True))


def test_no_items_is_fine() -> None:
    batch = paged_batch([1], [5])
    work = wide_work(batch, [Range(0, [0], 0, OPEN)])
    assert work.wide is not None and work.ends is not None
    work.wide.count.zero_()
    device = batch.query.device
    part_out, part_lse = torch.full((3, 4, 64), float("nan"), device=device), torch.full((3, 4), float("nan"), device=device)
    for some in (work, replace(work, wide=None)):
        args = (some, batch.query, batch.k_pool, batch.v_pool, batch.block_table, work.ends, part_out, part_lse)
        extend.launch_wide(*args, scale=1.0, sliding_window=None, softcap=None)
    assert bool(part_out.isnan().all()) and bool(part_lse.isnan().all())
