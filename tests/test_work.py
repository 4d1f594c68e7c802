"""Work lists: what is in them, and that both ways to build one agree."""

from __future__ import annotations

import pytest
import torch

from radixkv.kernels.work import build_work, work_from_tensors
from radixkv.testing import paged_batch


def test_prefill_tiles_come_heaviest_first_and_none_is_empty() -> None:
    work = build_work([[], [], []], [5, 0, 3], [25, 9, 103], phase="prefill", backend="triton", tile_q=2, chunk=0, device="cpu")
    assert work.prefill_tiles is not None
    # Keys seen by the tiles: sequence 2 up to 103, sequence 0 up to 25.
    assert work.prefill_tiles.tolist() == [[2, 2], [2, 0], [0, 4], [0, 2], [0, 0]]
    assert work.tile_q == 2


def test_decode_chunks_lie_at_absolute_multiples() -> None:
    work = build_work([[]] * 4, [1] * 4, [0, 8, 9, 17], phase="decode", backend="triton", tile_q=0, chunk=8, device="cpu")
    assert work.decode_items is not None and work.merge_ranges is not None
    assert work.decode_items.tolist() == [[1, 0, 8, 0], [2, 0, 8, 1], [2, 8, 9, 2], [3, 0, 8, 3], [3, 8, 16, 4], [3, 16, 17, 5]]
    assert work.merge_ranges.tolist() == [0, 0, 1, 3, 6]


def test_items_of_a_sequence_do_not_depend_on_its_batch_mates() -> None:
    def chunks(seq_lens: list[int], seq: int) -> list[list[int]]:
        work = build_work(
            [[]] * len(seq_lens), [1] * len(seq_lens), seq_lens, phase="decode", backend="triton", tile_q=0, chunk=8, device="cpu"
        )
        assert work.decode_items is not None
        return [item[1:3] for item in work.decode_items.tolist() if item[0] == seq]

    assert chunks([21], 0) == chunks([3, 21, 100], 1) == [[0, 8], [8, 16], [16, 21]]


@pytest.mark.parametrize("seq_lens", [[], [0], [0, 0]], ids=["no_sequences", "one_empty", "all_empty"])
def test_empty_work_keeps_its_shapes(seq_lens: list[int]) -> None:
    rows: list[list[int]] = [[] for _ in seq_lens]
    ones = [1] * len(seq_lens)
    decode = build_work(rows, ones, seq_lens, phase="decode", backend="triton", tile_q=0, chunk=8, device="cpu")
    prefill = build_work(rows, seq_lens, seq_lens, phase="prefill", backend="triton", tile_q=4, chunk=0, device="cpu")
    assert decode.decode_items is not None and decode.merge_ranges is not None and prefill.prefill_tiles is not None
    assert decode.decode_items.shape == (0, 4) and decode.merge_ranges.tolist() == [0] * (len(seq_lens) + 1)
    assert prefill.prefill_tiles.shape == (0, 2)


def test_from_tensors_reads_the_lengths_and_only_live_block_ids() -> None:
    batch = paged_batch([3, 0, 1], [20, 17, -1], device="cpu")
    work = work_from_tensors(batch.block_table, batch.cu_query_lens, batch.seq_lens, block_size=16, backend="torch", tile_q=0, chunk=0)
    assert (work.query_lens, work.seq_lens) == ([3, 0, 1], [23, 17, 0])
    assert [ids.tolist() for ids in work.block_ids] == [batch.block_table[0, :2].tolist(), batch.block_table[1, :2].tolist(), []]
    assert all(ids.dtype == torch.int64 for ids in work.block_ids)


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="lists must be of one length, got 1 block_table_rows, 2 query_lens, 1 seq_lens"):
        build_work([[]], [1, 1], [1], phase="prefill", backend="torch", tile_q=1, chunk=1, device="cpu")
    with pytest.raises(ValueError, match="query_lens must all be 1 in decode"):
        build_work([[]], [2], [2], phase="decode", backend="torch", tile_q=1, chunk=1, device="cpu")
