"""decode_attention in Triton against the float64 reference on the same rounded inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from radixkv.kernels import decode, merge, reference, tiles
from radixkv.kernels.work import SplitItems, Work
from radixkv.testing import PagedBatch, assert_attention_close, paged_batch, untouched_pool

HEAD_DIMS = [64, 80, 96, 128, 256]
FP32 = pytest.param(torch.float32, id="fp32")
HALF = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]
# Every group and every head_dim once.
GROUP_AND_HEAD_DIM = [(1, 64), (3, 80), (5, 96), (6, 128), (7, 256), (8, 64)]


def decode_batch(seq_lens: list[int], **options: Any) -> PagedBatch:
    """Return sequences of the given lengths, 0 included, each with one query."""
    return paged_batch([1] * len(seq_lens), [seq_len - 1 for seq_len in seq_lens], **options)


def split_work(batch: PagedBatch, ranges: list[tuple[list[int], int, int]], spare: int = 0) -> Work:
    """Return the work of a hand-made list of narrow items.

    Args:
        batch: its sequences are the tokens.
        ranges: of each item the sequences that share it, the first key and the end key. Those of one sequence are in order of position.
        spare: items, entries and merges beyond the live ones, all of them garbage.
    """
    lens = batch.seq_lens.tolist()
    owned: list[list[int]] = [[] for _ in lens]
    partials = iter(range(10**6))
    entries = [(seq, item) for item, (seqs, _, _) in enumerate(ranges) for seq in seqs]
    for seq, item in entries:
        owned[seq].append(item)
    partial_of = {(seq, item): next(partials) for seq, items in enumerate(owned) for item in items}
    first_entries = [0]
    for seqs, _, _ in ranges:
        first_entries.append(first_entries[-1] + len(seqs))
    items = [[first_entries[i], len(seqs), seqs[-1], first, end] for i, (seqs, first, end) in enumerate(ranges)]
    borders = [0]
    for owned_items in owned:
        borders.append(borders[-1] + len(owned_items))

    def put(values: list[Any], garbage: Any) -> torch.Tensor:
        return torch.tensor(values + [garbage] * spare, dtype=torch.int32, device=batch.query.device)

    return Work(
        [1] * len(lens),
        lens,
        [],
        narrow=SplitItems(put(items, [10**8] * 5).reshape(-1, 5), put([len(items)], 0)[:1]),
        entry_tokens=put([seq for seq, _ in entries], -(10**8)),
        entry_partials=put([partial_of[entry] for entry in entries], -(10**8)),
        merge_tokens=put(list(range(len(lens))), 0)[: len(lens)],
        merge_ranges=put(borders, 0)[: len(borders)],
        merge_count=put([len(lens)], 0)[:1],
        num_partials=len(entries),
    )


def chunked(batch: PagedBatch, chunk: int) -> Work:
    """Return work whose ranges are short, so that a short sequence has several; the last one of each is open."""
    lens = batch.seq_lens.tolist()
    return split_work(batch, [([seq], first, first + chunk) for seq, seq_len in enumerate(lens) for first in range(0, seq_len, chunk)])


def sharing_batch(shared: list[int], own: list[int], **options: Any) -> PagedBatch:
    """Return sequences n of shared[n] + own[n] tokens; the blocks of the shared ones are those of sequence 0, or of as many as it has."""
    batch = decode_batch([common + rest for common, rest in zip(shared, own, strict=True)], **options)
    table = batch.block_table.clone()
    for seq, common in enumerate(shared):
        table[seq, : common // batch.k_pool.shape[2]] = table[0, : common // batch.k_pool.shape[2]]
    dead = torch.ones(batch.k_pool.shape[0], dtype=torch.bool, device=table.device)
    dead[table[table >= 0].long()] = False
    pools = batch.k_pool.clone(), batch.v_pool.clone()
    for pool in pools:
        pool[dead] = float("nan")
    return replace(batch, k_pool=pools[0], v_pool=pools[1], block_table=table)


def run(batch: PagedBatch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel into outputs that are NaN before."""
    out = torch.full_like(batch.query, float("nan"), memory_format=torch.contiguous_format)
    lse = torch.full(batch.query.shape[:2], float("nan"), device=batch.query.device)
    return decode.decode_attention(*batch.decode_args(), scale=batch.scale, out=out, lse=lse, **options)


def assert_matches_reference(batch: PagedBatch, plan: Work | None = None, **options: Any) -> None:
    """Compare the kernel with the float64 reference."""
    wanted = reference.decode_attention(*batch.double().decode_args(), scale=batch.scale, **options)
    assert_attention_close(*run(batch, plan=plan, **options), *wanted, batch.query.dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda head_dim: f"d{head_dim}")
@pytest.mark.parametrize("group", [1, 7, 8], ids=lambda group: f"group{group}")
def test_groups_at_every_head_dim(group: int, head_dim: int) -> None:
    assert_matches_reference(decode_batch([34, 1, 16], num_heads=2 * group, head_dim=head_dim))


@pytest.mark.parametrize("dtype", [FP32, *HALF])
@pytest.mark.parametrize("group", range(1, 17), ids=lambda group: f"group{group}")
def test_every_group_shares_a_range(group: int, dtype: torch.dtype) -> None:
    """As many sequences as an item holds share a range, another one the next; each has keys of its own. Every head_dim in turn."""
    head_dim = HEAD_DIMS[group % 5]
    together = max(1, (4 if dtype == torch.float32 else 16) // group)
    shared = [32] * (together + 1)
    batch = sharing_batch(shared, [3 + seq for seq in range(len(shared))], num_heads=group, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    ranges = [(list(range(together)), 0, 32), ([together], 0, 32), *(([seq], 32, 64) for seq in range(len(shared)))]
    assert_matches_reference(batch, split_work(batch, ranges))


@pytest.mark.parametrize("group", [16, 17, 40], ids=lambda group: f"group{group}")
def test_groups_of_more_than_one_program(group: int) -> None:
    assert_matches_reference(decode_batch([20, 3], num_heads=group, num_kv_heads=1, dtype=torch.float16))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("group", "head_dim"), GROUP_AND_HEAD_DIM, ids=lambda value: str(value))
def test_half_precision(group: int, head_dim: int, dtype: torch.dtype) -> None:
    """Less than a tile of keys, a whole tile and a part, and exactly one tile."""
    assert_matches_reference(decode_batch([5, 80, 64], num_heads=2 * group, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", [FP32, *HALF])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes_below_and_above_a_tile(block_size: int, dtype: torch.dtype) -> None:
    assert_matches_reference(decode_batch([77, block_size], block_size=block_size, dtype=dtype))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [
        pytest.param(14, 2, 64, id="qwen2.5-0.5b"),
        pytest.param(28, 4, 128, id="qwen2.5-7b"),
        pytest.param(12, 2, 128, id="deepseek-r1-distill-qwen-1.5b"),
        pytest.param(9, 3, 64, id="smollm2-135m"),
    ],
)
def test_head_shapes_of_real_models(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    assert_matches_reference(
        decode_batch([34, 10], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("dtype", [FP32, *HALF])
def test_several_chunks_are_merged(dtype: torch.dtype) -> None:
    batch = decode_batch([200, 64, 0, 65, 3], dtype=dtype)
    assert_matches_reference(batch, chunked(batch, 64))


def test_the_launchers_own_chunks() -> None:
    assert_matches_reference(decode_batch([257, 40], num_heads=2, num_kv_heads=1, dtype=torch.float16))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 70])
def test_window_at_a_page_border(window: int) -> None:
    """Keys outside the window are NaN; chunks before the window are empty partials."""
    batch = decode_batch([48, 1, 97, 16], sliding_window=window)
    assert_matches_reference(batch, chunked(batch, 32), sliding_window=window)


@pytest.mark.parametrize("block_size", [16, 64])
def test_blocks_before_the_window_may_be_gone(block_size: int) -> None:
    """Their entries are -1; one range lies wholly before the window, and ends in the tile in which the window begins."""
    batch = decode_batch([400, 410], block_size=block_size, sliding_window=70)
    batch.block_table[:, : (400 - 70) // block_size] = -1
    ranges = [([seq], first, end) for seq in range(2) for first, end in ((0, 272), (272, 320), (320, 448))]
    assert_matches_reference(batch, split_work(batch, ranges), sliding_window=70)


@pytest.mark.parametrize(
    ("softcap", "window"),
    [pytest.param(2.0, None, id="strong"), pytest.param(50.0, None, id="weak"), pytest.param(2.0, 9, id="with_window")],
)
def test_softcap(softcap: float, window: int | None) -> None:
    assert_matches_reference(decode_batch([35, 2], sliding_window=window), softcap=softcap, sliding_window=window)


@pytest.mark.parametrize("dtype", HALF)
def test_huge_key_bias_does_not_overflow(dtype: torch.dtype) -> None:
    """Qwen2 has key biases of up to 900: scores of 1e4 and above, more than fp16 can hold or tell apart."""
    batch = decode_batch([34, 3], dtype=dtype, key_bias=1e3)
    # A query along the bias: a score of 512,000 before it is scaled.
    batch.query[0, 0] = batch.key[0, 0].sign() * 8
    assert_matches_reference(batch)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_empty_sequences_leave_the_others_alone(place: int) -> None:
    """A sequence of length 0 elsewhere gave NaN that spread."""
    batch = decode_batch([23, 40])
    out, lse = run(batch)
    rows = [0, 1]
    rows.insert(place, 0)
    lens = batch.seq_lens[rows].clone()
    lens[place] = 0
    table = batch.block_table[rows].clone()
    table[place] = -1
    with_empty = replace(batch, query=batch.query[rows], block_table=table, seq_lens=lens)
    got_out, got_lse = run(with_empty)
    others = [row for row in range(3) if row != place]
    assert torch.equal(got_out[others], out) and torch.equal(got_lse[others], lse)
    assert bool((got_out[place] == 0).all()) and bool((got_lse[place] == float("-inf")).all())


def test_only_empty_sequences() -> None:
    assert_matches_reference(decode_batch([0, 0]))


def test_result_depends_neither_on_batch_mates_nor_on_physical_blocks() -> None:
    batch = decode_batch([23, 100, 5])
    out, lse = run(batch, plan=chunked(batch, 32))
    order = torch.arange(batch.k_pool.shape[0]).flip(0).to(batch.k_pool.device)
    table = torch.where(batch.block_table < 0, -1, batch.k_pool.shape[0] - 1 - batch.block_table)
    alone = replace(
        batch,
        query=batch.query[1:2],
        k_pool=batch.k_pool[order].contiguous(),
        v_pool=batch.v_pool[order].contiguous(),
        block_table=table[1:2],
        seq_lens=batch.seq_lens[1:2],
    )
    alone_out, alone_lse = run(alone, plan=chunked(alone, 32))
    assert torch.equal(alone_out, out[1:2]) and torch.equal(alone_lse, lse[1:2])


def test_lengths_are_read_on_the_device() -> None:
    """Work made for long sequences serves shorter ones, as a replayed graph needs; their dead ranges are empty partials."""
    batch = decode_batch([20, 33, 0])
    longer = replace(batch, seq_lens=torch.full_like(batch.seq_lens, 100))
    assert_matches_reference(batch, chunked(longer, 32))


def test_an_open_end_takes_in_what_is_stored_later() -> None:
    """The last range ends where the work must be rebuilt, not where the sequence ends today."""
    batch = decode_batch([40, 70])
    work = split_work(batch, [([0], 0, 96), ([1], 0, 64), ([1], 64, 160)])
    assert_matches_reference(replace(batch, seq_lens=batch.seq_lens - 7), work)
    assert_matches_reference(batch, work)


@pytest.mark.parametrize("dtype", [FP32, *HALF])
@pytest.mark.parametrize("block_size", [16, 64])
def test_ranges_begin_and_end_at_branch_points(block_size: int, dtype: torch.dtype) -> None:
    """A branch lies at any multiple of a block, in the middle of a tile."""
    batch = decode_batch([150, 83], block_size=block_size, dtype=dtype)
    cuts = [([0], 0, 16), ([0], 16, 80), ([0], 80, 96), ([0], 96, 200), ([1], 0, 48), ([1], 48, 96)]
    assert_matches_reference(batch, split_work(batch, cuts))


@pytest.mark.parametrize("window", [None, 1, 30, 70])
@pytest.mark.parametrize("dtype", [FP32, *HALF])
def test_sequences_of_a_tree_share_items(dtype: torch.dtype, window: int | None) -> None:
    """Two levels: all share 48 keys, three of them 80; the third ends there, the last has no part in it. Dead slots are NaN."""
    batch = sharing_batch([80, 80, 80, 48, 0], [40, 7, 0, 21, 5], num_heads=6, dtype=dtype)
    ranges = [([0, 1], 0, 48), ([2, 3], 0, 48), ([2, 0], 48, 80), ([1], 48, 80), ([0], 80, 128), ([1], 80, 96), ([3], 48, 80), ([4], 0, 64)]
    entries = 1 if dtype == torch.float32 else 5
    if entries == 1:
        ranges = [([seq], first, end) for seqs, first, end in ranges for seq in seqs]
    assert_matches_reference(batch, split_work(batch, ranges), sliding_window=window)


@pytest.mark.parametrize("window", [None, 20, 50])
def test_a_shared_item_is_bit_equal_to_separate_ones(window: int | None) -> None:
    """A row's partial depends on nothing but the row, the range and its keys: not on the rows beside it, nor on where they end."""
    batch = sharing_batch([96, 96, 80, 64], [50, 1, 30, 0], dtype=torch.bfloat16)
    own = [([0], 64, 160), ([1], 64, 128), ([2], 64, 128)]
    together = split_work(batch, [([0, 1, 2, 3], 0, 64), *own])
    apart = split_work(batch, [*(([seq], 0, 64) for seq in range(4)), *own])
    # Ends of 70, 64, 20 and none at all in one item: lengths may have shrunk since the work was built.
    for seq_lens in ([146, 97, 110, 64], [70, 64, 20, 0]):
        batch.seq_lens.copy_(torch.tensor(seq_lens))
        results = [run(batch, plan=plan, sliding_window=window) for plan in (together, apart)]
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_what_lies_past_the_live_items_is_not_looked_at() -> None:
    batch = decode_batch([40, 3])
    assert_matches_reference(batch, split_work(batch, [([0], 0, 32), ([0], 32, 64), ([1], 0, 32)], spare=5))


@pytest.mark.parametrize("slots", [1, 3, 1000])
def test_the_grid_leaves_no_trace(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = decode_batch([70, 0, 33, 5], dtype=torch.float16)
    out, lse = run(batch, plan=chunked(batch, 32))
    monkeypatch.setattr(decode, "program_slots", lambda *_: slots)
    got_out, got_lse = run(batch, plan=chunked(batch, 32))
    assert torch.equal(got_out, out) and torch.equal(got_lse, lse)


def test_a_layer_neither_allocates_nor_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With plan, out and lse given no operation of torch runs, so none can allocate, copy or wait, and a graph can be captured."""
    batch = decode_batch([40, 3])
    plan, (out, lse) = chunked(batch, 32), run(batch)
    run(batch, plan=plan)
    launched: list[str] = []
    for module, kernel in ((decode, "_decode_kernel"), (merge, "_merge_kernel")):
        monkeypatch.setattr(module, kernel, _Launch(kernel, launched))

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was called")

    with Refuse():
        decode.decode_attention(*batch.decode_args(), scale=batch.scale, plan=plan, out=out, lse=lse)
    assert launched == ["_decode_kernel", "_merge_kernel"]


class _Launch:
    """Stands for a kernel and notes that it was launched."""

    def __init__(self, name: str, launched: list[str]):
        self.name, self.launched = name, launched

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: self.launched.append(self.name)


def test_query_may_be_a_transposed_view() -> None:
    batch = decode_batch([23, 18])
    view = replace(batch, query=batch.query.transpose(0, 1).contiguous().transpose(0, 1))
    assert not view.query.is_contiguous()
    assert all(torch.equal(one, other) for one, other in zip(run(view), run(batch), strict=True))


def test_addresses_beyond_int32_are_met() -> None:
    """block * stride wrapped in int32 on a large pool. The pool is virtual memory: only its last blocks are ever touched."""
    small = decode_batch([70], num_heads=2, num_kv_heads=1, dtype=torch.float16)
    num_blocks, live = 2**31 // (16 * 64) + 12, small.k_pool.shape[0]
    pools = untouched_pool(num_blocks), untouched_pool(num_blocks)
    pools[0][-live:], pools[1][-live:] = small.k_pool, small.v_pool
    table = torch.where(small.block_table < 0, -1, small.block_table + num_blocks - live)
    large = replace(small, k_pool=pools[0], v_pool=pools[1], block_table=table)
    assert all(torch.equal(one, other) for one, other in zip(run(large), run(small), strict=True))


def test_a_plan_of_another_phase_or_batch_is_refused() -> None:
    batch = decode_batch([20, 3])
    with pytest.raises(ValueError, match="decode_attention: plan must hold items of a decode step, got none"):
        run(batch, plan=Work([1, 1], [20, 3], []))
    with pytest.raises(ValueError, match=r"decode_attention: plan.merge_tokens must be int32 \[2\], got int32 \[1\]"):
        run(batch, plan=chunked(decode_batch([20]), 32))


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "is_interpreted", lambda kernel: False)
    with pytest.raises(ValueError, match='decode_attention: Triton kernels must get GPU tensors, got cpu: use backend "torch"'):
        run(decode_batch([20], device="cpu"))
