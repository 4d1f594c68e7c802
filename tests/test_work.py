"""Work lists: what is in them, and that both ways to build one agree."""

from __future__ import annotations

import pytest
import torch

from radixkv.kernels.items import Layout
from radixkv.kernels.work import Work, build_work, work_from_tensors
from radixkv.testing import paged_batch

LAYOUT = Layout(
    group=2,
    num_kv_heads=2,
    head_dim=64,
    itemsize=2,
    block_size=16,
    narrow_entries=8,
    wide_rows=128,
    tile_kv=64,
    tile_q=2,
    chunk=256,
    narrow_slots=12,
    wide_slots=4,
)


def prompt_work(query_lens: list[int], seq_lens: list[int]) -> Work:
    """Return the work of a step of prompt tokens."""
    rows: list[list[int]] = [[] for _ in seq_lens]
    return build_work(rows, query_lens, seq_lens, phases="prefill", backend="triton", layout=LAYOUT, exact=True, device="cpu")


def test_prefill_tiles_come_heaviest_first_and_none_is_empty() -> None:
    work = prompt_work([5, 0, 3], [25, 9, 103])
    assert work.prefill_tiles is not None
    # Keys seen by the tiles: sequence 2 up to 103, sequence 0 up to 25.
    assert work.prefill_tiles.tolist() == [[2, 2], [2, 0], [0, 4], [0, 2], [0, 0]]
    assert work.tile_q == 2


def test_from_tensors_reads_the_lengths_and_only_live_block_ids() -> None:
    batch = paged_batch([3, 0, 1], [20, 17, -1], device="cpu")
    work = work_from_tensors(batch.block_table, batch.cu_query_lens, batch.seq_lens, block_size=16, backend="torch")
    assert (work.query_lens, work.seq_lens) == ([3, 0, 1], [23, 17, 0])
    assert [ids.tolist() for ids in work.block_ids] == [batch.block_table[0, :2].tolist(), batch.block_table[1, :2].tolist(), []]
    assert all(ids.dtype == torch.int64 for ids in work.block_ids)


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="lists must be of one length, got 1 block_tables, 2 query_lens, 1 seq_lens"):
        build_work([[]], [1, 1], [1], phases="prefill", backend="torch", device="cpu")
    with pytest.raises(ValueError, match="query_lens must all be 1 in decode"):
        build_work([[]], [2], [2], phases="decode", backend="torch", device="cpu")
    with pytest.raises(ValueError, match="the triton backend needs a layout"):
        build_work([[]], [1], [2], phases="decode", backend="triton", device="cpu")
