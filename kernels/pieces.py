"""What the keys of a step are to be cut into: how many ranges what each sequence reads alone gives, and what several share.

How long ranges are is chosen per step: the step takes as long as the slot of the device that has most to do, plus what the partials
move.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import mul
from typing import NamedTuple

import numpy as np

from radixkv.kernels.forest import Run
from radixkv.kernels.layout import FINE_RANGE, SHARED_RANGES, Layout
from radixkv.kernels.ranges import Demand, choose_length

# Programs that are wanted as long as ranges are not too short for it.
_LEAST_PROGRAMS = 240
# Bytes of partials beside those of K/V in a step with shared ranges.
_SHARED_PARTIALS = 0.34
# A shared range of the narrow kernel is this many times as long as a private one, as it costs more partials.
_STRETCH = 2


class Users(NamedTuple):
    """Which sequences attend to each piece.

    Attributes:
        sizes: `[num_pieces]`, how many. firsts: `[num_pieces]`, the place of the first of them in `seqs`, where they are neighbours.
    """

    sizes: np.ndarray
    firsts: np.ndarray
    seqs: np.ndarray


class Pieces(NamedTuple):
    """What is to be cut into ranges: what each sequence reads alone, then the runs that several share.

    Attributes:
        first_keys, end_keys: int64 `[num_pieces]`.
        counts: `[num_pieces]`, ranges of each piece; 0: it is empty.
        before: `[num_pieces]`, ranges of a sequence before those of the piece.
        users: None: there are no runs.
        num_narrow: so many pieces are the narrow kernel's, the others the wide one's.
        num_keys, num_partials: of all pieces.
    """

    first_keys: np.ndarray
    end_keys: np.ndarray
    counts: np.ndarray
    before: np.ndarray
    users: Users | None
    num_narrow: int
    num_keys: int
    num_partials: int

    def moved_bytes(self, layout: Layout) -> int:
        """Return K/V that are read, each range once, and partials written and read, over all K/V heads of a layer."""
        return layout.moved_bytes(self.num_keys, self.num_partials)


def private_pieces(first_keys: np.ndarray, lens: np.ndarray, counts: np.ndarray) -> Pieces:
    """Return the pieces of sequences that share nothing, cut into so many ranges each."""
    num_keys, num_partials = int((lens - first_keys).sum()), int(counts.sum())
    return Pieces(first_keys, lens, counts, np.zeros_like(counts), None, len(lens), num_keys, num_partials)


def private_counts(keys: np.ndarray, layout: Layout) -> np.ndarray:
    """Return into how many ranges each sequence is cut where nothing is shared."""
    tiles = -(-keys // layout.tile_kv)
    return -(-tiles // _narrow_length(tiles, [], layout))


def shared_pieces(first_keys: np.ndarray, lens: np.ndarray, order: np.ndarray, runs: list[Run], layout: Layout) -> Pieces:
    """Return the pieces of sequences that share runs.

    Args:
        first_keys: `[num_seqs]`, the first key that each sequence sees. lens: `[num_seqs]`, tokens.
        order, runs: of `shared_runs`.
        layout: of the kernels that will run.
    """
    num_seqs = len(lens)
    reached = first_keys[order]
    for run in runs:
        reached[run.first_row : run.end_row] = run.end_key
    # The rows are the first fields of Pieces, and those of Users.
    columns = np.empty((6, num_seqs + len(runs)), np.int64)
    begins = columns[0, :num_seqs]
    begins[order] = reached
    np.maximum(begins, first_keys, out=begins)
    keys, run_keys = lens - begins, [run.end_key - run.first_key for run in runs]
    num_keys, sizes = int(keys.sum()) + sum(run_keys), [run.end_row - run.first_row for run in runs]
    # Where the wide kernel cannot be used all are the narrow one's.
    most = layout.narrow_entries if layout.group <= layout.wide_rows else num_seqs
    small = [place for place, size in enumerate(sizes) if size <= most]
    large = [place for place, size in enumerate(sizes) if size > most]
    counts, run_counts, num_partials = _shared_counts(keys, run_keys, sizes, small, large, num_keys, layout)

    passed = np.zeros(num_seqs, np.int64)
    before: list[int] = []
    for run, count in zip(runs, run_counts, strict=True):
        before.append(before[run.parent] + run_counts[run.parent] if run.parent >= 0 else 0)
        passed[run.first_row : run.end_row] = before[-1] + count
    seqs = np.arange(num_seqs)
    columns[1, :num_seqs] = lens
    columns[2, :num_seqs] = counts
    columns[3, order] = passed
    columns[4, :num_seqs] = 1
    columns[5, :num_seqs] = seqs
    for column, place in enumerate([*small, *large], start=num_seqs):
        run = runs[place]
        columns[:, column] = run.first_key, run.end_key, run_counts[place], before[place], sizes[place], num_seqs + run.first_row
    users = Users(columns[4], columns[5], np.concatenate((seqs, order)))
    return Pieces(columns[0], columns[1], columns[2], columns[3], users, num_seqs + len(small), num_keys, num_partials)


def _shared_counts(
    keys: np.ndarray, run_keys: list[int], sizes: list[int], small: list[int], large: list[int], num_keys: int, layout: Layout
) -> tuple[np.ndarray, list[int], int]:
    """Choose all ranges of a step with shared ones.

    Args:
        keys: `[num_seqs]`, that each sequence reads alone. run_keys, sizes: keys and sequences of each run.
        small, large: which runs are the narrow kernel's and the wide one's. num_keys: of all.

    Returns:
        Into how many ranges what each sequence reads alone is cut, `[num_seqs]`, into how many each run, and the partials of all.
    """
    tile, run_counts = layout.tile_kv, [0] * len(sizes)
    runs = [(-(-length // tile), size) for length, size in zip(run_keys, sizes, strict=True)]
    tiles = -(-keys // tile)
    length = _narrow_length(tiles, [runs[place] for place in small], layout)
    counts = -(-tiles // length)
    num_partials = int(counts.sum())
    for place in small:
        run_counts[place] = -(-runs[place][0] // (_STRETCH * length))
        num_partials += run_counts[place] * sizes[place]
    # Not shorter than private ranges, whose partials are fewer, unless those are long enough for both.
    least, most = SHARED_RANGES
    if _STRETCH * length * tile > least:
        longest = [run_keys[place] / run_counts[place] for place in small]
        longest.append(float((keys / np.maximum(counts, 1)).max()))
        least = min(max(int(max(longest)), least), most)
    most_partials = _SHARED_PARTIALS * num_keys / layout.partial_keys - num_partials
    length = wide_length([runs[place] for place in large], layout, least, most_partials)
    for place in large:
        run_counts[place] = -(-runs[place][0] // length)
        num_partials += run_counts[place] * sizes[place]
    return counts, run_counts, num_partials


def _narrow_length(tiles: np.ndarray, runs: list[tuple[int, int]], layout: Layout) -> int:
    """Choose the ranges of the narrow kernel, for what each sequence reads alone and for runs as (tiles, sequences)."""
    numbers, least_tiles = np.bincount(tiles), layout.private_range // layout.tile_kv
    if not runs and len(numbers) <= least_tiles + 1:
        return least_tiles
    numbers[:1] = 0
    alone = numbers.nonzero()[0]
    tile_counts, seq_counts = alone.tolist(), numbers[alone].tolist()
    alike = _alike(runs)
    lengths = [*tile_counts, *[length for length, _ in alike]]
    times = [*seq_counts, *alike.values()]
    # Ranges that are as short as may be; where that many are no question, they need not be counted.
    least_programs = _LEAST_PROGRAMS
    if sum(map(mul, lengths, times)) * layout.tile_kv * layout.num_kv_heads < _LEAST_PROGRAMS * FINE_RANGE:
        ranges = sum([-(-length * layout.tile_kv // FINE_RANGE) * number for length, number in zip(lengths, times, strict=True)])
        least_programs = min(_LEAST_PROGRAMS, layout.num_kv_heads * ranges)
    demand = Demand(
        lengths,
        entries=[*seq_counts, *[size * number for (_, size), number in alike.items()]],
        copies=[*seq_counts, *[-(-size // layout.narrow_entries) * number for (_, size), number in alike.items()]],
        stretches=[1] * len(seq_counts) + [_STRETCH] * len(alike),
        least=layout.private_range,
        least_programs=least_programs,
    )
    return choose_length(layout.narrow_kernel, demand)


def wide_length(runs: Iterable[tuple[int, int]], layout: Layout, least: int, most_partials: float = float("inf")) -> int:
    """Choose how many tiles the ranges of the wide kernel have at most.

    Args:
        runs: tiles of each, and how many tokens attend to it. layout: of the kernels that will run.
        least: keys of a range. most_partials: of all of them.
    """
    alike = _alike(runs)
    demand = Demand(
        tiles=[length for length, _ in alike],
        entries=[size * number for (_, size), number in alike.items()],
        copies=[-(-size * layout.group // layout.wide_rows) * number for (_, size), number in alike.items()],
        stretches=[1] * len(alike),
        least=least,
        most_partials=most_partials,
    )
    return choose_length(layout.wide_kernel, demand)


def _alike(runs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return the different ones of runs, and how often there is each."""
    numbers: dict[tuple[int, int], int] = {}
    for run in runs:
        numbers[run] = numbers.get(run, 0) + 1
    return numbers
