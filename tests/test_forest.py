"""Which rows begin alike, for tables that no tree made: the same block after other blocks, garbage past the end, empty rows."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.kernels.forest import Prices, _neighbours, shared_runs

# Partials and items are nearly free, so that every branch is an item.
FREE = Prices(partial=0.001, item=0.001, shared_range=10**6, private_range=10**6)


def common_beginning(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many leading blocks two rows share."""
    pairs = zip(one.tolist(), other.tolist(), strict=False)
    return next((place for place, (block, same) in enumerate(pairs) if block != same), min(len(one), len(other)))


def random_table(rng: np.random.Generator, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of so many different blocks, grown from one another, and how many blocks of each are live."""
    num_seqs, most = int(rng.integers(2, 12)), int(rng.integers(1, 9))
    table = rng.integers(0, num_blocks, (num_seqs, most), dtype=np.int32)
    for row in range(1, num_seqs):
        kept = rng.integers(0, most + 1)
        table[row, :kept] = table[rng.integers(row), :kept]
    return table, rng.integers(0, most + 1, num_seqs)


@pytest.mark.parametrize("num_blocks", [2, 3, 1000])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_rows_that_begin_alike_are_neighbours(num_blocks: int, is_sorted: bool) -> None:
    """Two rows share what all neighbours between them share; otherwise something is read twice."""
    rng = np.random.default_rng(num_blocks)
    for _ in range(400):
        table, limits = random_table(rng, num_blocks)
        if is_sorted:
            order = np.lexsort(table.T[::-1])
            table, limits = table[order], limits[order]
        if not limits.any():
            continue
        order, common = _neighbours(table, limits)
        assert sorted(order.tolist()) == list(range(len(table)))
        rows = [table[seq, : limits[seq]] for seq in order]
        for first in range(len(rows)):
            for last in range(first + 1, len(rows)):
                assert common_beginning(rows[first], rows[last]) == min(common[first:last])


def test_order_as_given_is_kept_where_it_serves() -> None:
    table = np.array([[7, 3, 11], [7, 3, 12], [7, 2, 13], [4, 0, 14], [4, 1, 15]], dtype=np.int32)
    order, common = _neighbours(table, np.full(5, 3))
    assert order.tolist() == [0, 1, 2, 3, 4] and common == [2, 1, 0, 1]


def test_runs_of_a_forest_parents_first() -> None:
    table = np.array([[7, 3, 1], [4, 0, 0], [7, 3, 0], [4, 1, 1], [7, 2, 9]], dtype=np.int32)
    found = shared_runs(table, np.full(5, 49), np.zeros(5, np.int64), 16, FREE)
    assert found is not None
    order, runs = found
    rows = [(sorted(order[run.first_row : run.end_row].tolist()), run.first_key, run.end_key) for run in runs]
    assert sorted(rows) == [([0, 2], 16, 32), ([0, 2, 4], 0, 16), ([1, 3], 0, 16)]
    for run, (seqs, first_key, _) in zip(runs, rows, strict=True):
        parent = next((place for place, (others, _, end) in enumerate(rows) if set(seqs) < set(others) and end == first_key), -1)
        assert run.parent == parent and parent < len(runs)


@pytest.mark.parametrize("lens", [[0, 0], [16, 16], [1, 40], [33]])
def test_rows_without_a_full_block_share_nothing(lens: list[int]) -> None:
    """Blocks past a row's end are not looked at, and a row's last token is its own."""
    table = np.zeros((len(lens), 3), np.int32)
    assert shared_runs(table, np.array(lens), np.zeros(len(lens), np.int64), 16, FREE) is None
