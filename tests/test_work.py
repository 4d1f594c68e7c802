"""Work lists: what is in them, that both ways to build one agree, mixed steps, fixed capacities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.bench.forests import Tree, forest
from radixkv.kernels import reference
from radixkv.kernels.items import Layout
from radixkv.kernels.work import Capacity, Work, build_work, work_from_tensors
from radixkv.testing import assert_attention_close, paged_batch
from tests.item_lists import attend_lists, forest_batch

# A small device, and partials that are few bytes beside K/V, so that short sequences are cut and shared.
LAYOUT = Layout(
    group=2,
    num_kv_heads=2,
    head_dim=64,
    itemsize=4,
    block_size=16,
    narrow_entries=8,
    wide_rows=32,
    tile_kv=64,
    tile_q=2,
    chunk=256,
    narrow_slots=24,
    wide_slots=24,
)


def build(query_lens: list[int], seq_lens: list[int], phases: Any, table: Any = None, **options: Any) -> Work:
    """Return the Triton work of a step."""
    table = [[] for _ in seq_lens] if table is None else table
    return build_work(table, query_lens, seq_lens, phases=phases, backend="triton", layout=LAYOUT, device="cpu", **options)


def tensors(work: Work) -> dict[str, list[int]]:
    """Return the tensors of a work as lists, by name."""
    found = {name: value for name, value in vars(work).items() if isinstance(value, torch.Tensor)}
    for name, split in (("narrow", work.narrow), ("wide", work.wide)):
        if split is not None:
            found[name], found[f"{name}_count"] = split.items, split.count
    return {name: value.tolist() for name, value in found.items()}


def test_prefill_tiles_come_heaviest_first_and_none_is_empty() -> None:
    work = build([5, 0, 3], [25, 9, 103], "prefill")
    assert work.prefill_tiles is not None
    # Keys seen by the tiles: sequence 2 up to 103, sequence 0 up to 25.
    assert work.prefill_tiles.tolist() == [[2, 2], [2, 0], [0, 4], [0, 2], [0, 0]]
    assert work.tile_q == 2 and work.narrow is None and work.wide is None and work.ends is None


def test_the_exact_plan_cuts_at_absolute_multiples() -> None:
    work = build([1] * 4, [0, 256, 257, 700], "decode", exact=True)
    assert work.narrow is not None and work.wide is None and work.merge_ranges is not None
    assert sorted(item[2:] for item in work.narrow.items.tolist()) == [
        [1, 0, 256], [2, 0, 256], [2, 256, 512], [3, 0, 256], [3, 256, 512], [3, 512, 768],
    ]  # fmt: skip
    assert work.merge_ranges.tolist() == [0, 0, 1, 3, 6]
    assert work.rebuild_at == [1, 257, 513, 769]


def test_the_tensors_of_a_work_are_one_buffer_of_int32() -> None:
    work = build([1] * 3, [300, 0, 700], "decode")
    assert work.storage is not None and work.storage.dtype == torch.int32
    begin, end = work.storage.data_ptr(), work.storage.data_ptr() + 4 * work.storage.numel()
    for tensor in (work.entry_tokens, work.entry_partials, work.merge_tokens, work.merge_ranges, work.merge_count):
        assert tensor is not None and begin <= tensor.data_ptr() < end and (tensor.data_ptr() - begin) % 16 == 0


@pytest.mark.parametrize("seq_lens", [[], [0], [0, 0]], ids=["no_sequences", "one_empty", "all_empty"])
def test_empty_work_keeps_its_shapes(seq_lens: list[int]) -> None:
    ones, rows = [1] * len(seq_lens), np.zeros((len(seq_lens), 0), np.int32)
    for exact in (False, True):
        decode = build(ones, seq_lens, "decode", rows, exact=exact)
        assert decode.merge_ranges is not None and decode.narrow is None and decode.wide is None
        assert decode.merge_ranges.tolist() == [0] * (len(seq_lens) + 1)
        prefill = build(seq_lens, seq_lens, "prefill", rows, exact=exact)
        assert prefill.prefill_tiles is not None and prefill.prefill_tiles.shape == (0, 2)


def test_lists_and_arrays_of_block_ids_give_the_same() -> None:
    table, lens = forest([(700, [(300, None)] * 5)], 16)
    rows = [row[: -(-length // 16)].tolist() for row, length in zip(table, lens.tolist(), strict=True)]
    ones = [1] * len(lens)
    listed, array = build(ones, lens.tolist(), "decode", rows), build(ones, lens.tolist(), "decode", table)
    assert tensors(listed) == tensors(array)
    assert listed.wide is not None or int(listed.narrow.items[:, 1].max()) > 1  # type: ignore[union-attr]


def test_what_lies_past_the_end_of_a_block_table_is_not_looked_at() -> None:
    table, lens = forest([(700, [(300, None)] * 5), (40, None)], 16)
    junk = table.copy()
    for row, length in zip(junk, lens.tolist(), strict=True):
        row[-(-length // 16) :] = 7
    ones = [1] * len(lens)
    assert tensors(build(ones, lens.tolist(), "decode", table)) == tensors(build(ones, lens.tolist(), "decode", junk))


@pytest.mark.parametrize("new", [1, 5, 9])
def test_a_split_extension_gives_what_the_reference_gives(new: int) -> None:
    table, lens = forest([(3000, None), (90, None), (2500, None)], 16)
    query_lens = [new, 3, 0]
    order = np.argsort(-lens)
    table, lens = table[order], lens[order]
    batch = forest_batch(table, lens, LAYOUT, query_lens=query_lens)
    work = build(query_lens, lens.tolist(), "prefill", table)
    assert work.wide is not None and work.prefill_tiles is not None
    split = set(work.wide.items[:, 2].tolist())
    assert split and not split & set(work.prefill_tiles[:, 0].tolist())
    out, lse = attend_lists(work, batch, LAYOUT)
    expected = reference.prefill_attention(*batch.double().prefill_args(), scale=batch.scale)
    tokens = torch.tensor([token for seq in split for token in range(*batch.cu_query_lens[seq : seq + 2].tolist())])
    assert_attention_close(out[tokens], lse[tokens], expected[0][tokens], expected[1][tokens], torch.float32)
    others = [token for token in range(sum(query_lens)) if token not in tokens.tolist()]
    assert out[others].isnan().all()


def test_a_split_extension_under_a_long_window_starts_at_the_window() -> None:
    table, lens = forest([(5000, None)], 16)
    batch = forest_batch(table, lens, LAYOUT, query_lens=[6])
    work = build([6], [5000], "prefill", table, window=2000)
    assert work.wide is not None and int(work.wide.items[:, 3].min()) == (5000 - 5 - 2000) // 64 * 64
    expected = reference.prefill_attention(*batch.double().prefill_args(), scale=batch.scale, sliding_window=2000)
    assert_attention_close(*attend_lists(work, batch, LAYOUT, 2000), *expected, torch.float32)


def test_a_mixed_step_carries_both_lists() -> None:
    """Decode rows among prompts: a split extension, a short prompt, three rows that share a beginning, and an empty row."""
    table, lens = forest([(3000, None), (60, None), (900, [(64, None)] * 3), (16, None)], 16, seed=3)
    order = np.argsort(-lens, kind="stable")
    table, lens = table[order], lens[order]
    lens[-1] = 0
    phases = ["prefill", "decode", "decode", "decode", "prefill", "decode"]
    query_lens = [9, 1, 1, 1, 33, 1]
    work = build(query_lens, lens.tolist(), phases, table)
    assert work.wide is not None and work.narrow is not None and work.prefill_tiles is not None and work.ends is not None
    assert set(work.prefill_tiles[:, 0].tolist()) == {4}
    batch = forest_batch(table, lens, LAYOUT, query_lens=query_lens)
    expected = reference.prefill_attention(*batch.double().prefill_args(), scale=batch.scale)
    assert work.ends.tolist() == [*range(2992, 3001), 964, 964, 964, *range(28, 61), 0]
    out, lse = attend_lists(work, batch, LAYOUT)
    merged = torch.tensor([*range(12), 45])
    assert sorted(work.merge_tokens.tolist()) == merged.tolist()  # type: ignore[union-attr]
    assert_attention_close(out[merged], lse[merged], expected[0][merged], expected[1][merged], torch.float32)
    assert out[12:45].isnan().all()


def test_a_step_of_decode_rows_listed_one_by_one_is_a_mixed_step() -> None:
    table, lens = forest([(900, [(64, None)] * 3)], 16)
    work = build([1] * 3, lens.tolist(), ["decode"] * 3, table)
    batch = forest_batch(table, lens, LAYOUT)
    expected = reference.decode_attention(*batch.double().decode_args(), scale=batch.scale)
    assert_attention_close(*attend_lists(work, batch, LAYOUT), *expected, torch.float32)


@pytest.mark.parametrize("exact", [False, True])
def test_works_of_one_capacity_are_built_into_one_another(exact: bool) -> None:
    capacity = Capacity.for_decode(8, 4000, LAYOUT, exact=exact)
    first = build([1] * 2, [40, 3000], "decode", np.arange(400, dtype=np.int32).reshape(2, 200), capacity=capacity, exact=exact)
    assert (first.wide is None) == exact and first.storage is not None and first.narrow is not None and first.merge_count is not None
    addresses = [tensor.data_ptr() for tensor in (first.storage, first.narrow.items, first.narrow.count, first.merge_count)]
    partials = first.partials(4, 64)
    forests: list[list[Tree]] = [[(1500, [(300, None)] * 8)], [(5, None), (3999, None)], [(9, None)] * 8]
    for seed, trees in enumerate(forests):
        table, lens = forest(trees, 16, seed)
        batch = forest_batch(table, lens, LAYOUT)
        other = build([1] * len(lens), lens.tolist(), "decode", table, capacity=capacity, exact=exact)
        first = build([1] * len(lens), lens.tolist(), "decode", table, capacity=capacity, exact=exact, into=first)
        kept = (first.storage, first.narrow.items, first.narrow.count, first.merge_count)  # type: ignore[union-attr]
        assert [tensor.data_ptr() for tensor in kept] == addresses  # type: ignore[union-attr]
        assert first.partials(4, 64)[0] is partials[0]
        assert (first.seq_lens, first.rebuild_at) == (lens.tolist(), other.rebuild_at)
        expected = reference.decode_attention(*batch.double().decode_args(), scale=batch.scale)
        assert_attention_close(*attend_lists(first, batch, LAYOUT), *expected, torch.float32)


def test_capacities_hold_any_decode_step() -> None:
    capacity = Capacity.for_decode(16, 8192, LAYOUT)
    rng = np.random.default_rng(0)
    for most in (10, 500, 8192):
        for _ in range(5):
            lens = rng.integers(0, most + 1, 16)
            build([1] * 16, lens.tolist(), "decode", np.arange(16 * 512, dtype=np.int32).reshape(16, -1), capacity=capacity)
    # All of them share, in a tree that would need more partials than there are: it is attended to flat.
    table, lens = forest([(8000, [(100, None)] * 16)], 16)
    small = replace(capacity, num_partials=capacity.num_partials - 8 * 16)
    work = build([1] * 16, lens.tolist(), "decode", table, capacity=small)
    assert work.narrow is not None and int(work.narrow.items[: int(work.narrow.count), 1].max()) == 1


def test_what_a_capacity_does_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be"):
        build([1], [9000], "decode", np.zeros((1, 600), np.int32), capacity=Capacity(1, 4, 4, 4), exact=True)
    with pytest.raises(ValueError, match="only a decode step has a capacity"):
        build([2], [9], "prefill", capacity=Capacity(1, 4, 4, 4))
    small = build([1], [9], "decode", capacity=Capacity(1, 4, 0, 4))
    with pytest.raises(ValueError, match="into must be a work of capacity"):
        build([1], [9], "decode", capacity=Capacity(1, 8, 0, 8), into=small)


def test_from_tensors_reads_the_lengths_and_only_live_block_ids() -> None:
    batch = paged_batch([3, 0, 1], [20, 17, -1], device="cpu")
    work = work_from_tensors(batch.block_table, batch.cu_query_lens, batch.seq_lens, block_size=16, backend="torch")
    assert (work.query_lens, work.seq_lens) == ([3, 0, 1], [23, 17, 0])
    assert [ids.tolist() for ids in work.block_ids] == [batch.block_table[0, :2].tolist(), batch.block_table[1, :2].tolist(), []]
    assert all(ids.dtype == torch.int64 for ids in work.block_ids)


def test_from_tensors_and_from_lists_give_the_same() -> None:
    table, lens = forest([(900, [(64, None)] * 3)], 16)
    batch = forest_batch(table, lens, LAYOUT)
    read = work_from_tensors(batch.block_table, None, batch.seq_lens, block_size=16, backend="triton", layout=LAYOUT)
    assert tensors(read) == tensors(build([1] * 3, lens.tolist(), "decode", table))


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="lists must be of one length, got 1 block_tables, 2 query_lens, 1 seq_lens"):
        build_work([[]], [1, 1], [1], phases="prefill", backend="torch", device="cpu")
    with pytest.raises(ValueError, match="query_lens must all be 1 in decode"):
        build_work([[]], [2], [2], phases="decode", backend="torch", device="cpu")
    with pytest.raises(ValueError, match="the triton backend needs a layout"):
        build_work([[]], [1], [2], phases="decode", backend="triton", device="cpu")
