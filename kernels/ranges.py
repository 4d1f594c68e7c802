"""How long the ranges of keys of one step are: short enough to fill the device evenly, long enough not to drown in partials.

Programs run on a fixed number of slots, slot s taking the units s, s + slots, ... of the list. The time of a list is
taken to be at most that of a slot that gets the heaviest of every round, plus that of moving the partials.
"""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

import numpy as np

# Ranges that give more rounds than this have nothing left to balance.
MOST_ROUNDS = 6
# A slot that has this many times the average to do makes a list a bad one.
_UNEVEN = 1.1
# Up to so many pieces times lengths a loop over them is faster than numpy.
_FEW = 80
# A power of 2 above every number of ranges.
_PACK = float(1 << 24)


class Kernel(NamedTuple):
    """What a kernel takes for its work; times in those of one key in a slot of the narrow kernel.

    Attributes:
        num_kv_heads: programs per item. slots: programs that run at once.
        tile: keys of a tile; ranges are cut at multiples of it.
        key_time, item_time, partial_time: what a key, an item and a partial (spread over all slots) take.
    """

    num_kv_heads: int
    slots: int
    tile: int
    key_time: float
    item_time: float
    partial_time: float


class Demand(NamedTuple):
    """Pieces of work that are to be cut into ranges; those that are alike are listed once, with the entries and copies of all of them.

    Attributes:
        tiles: of each piece, 1 or more.
        entries: tokens that attend to the piece, so many partials does each range cost.
        copies: items per range.
        stretches: how many times as long the ranges of the piece are to be.
        least: keys that a range has at least, unless the piece is shorter.
        least_programs: to be reached if ranges of the least length do.
        most_partials: not to be exceeded unless ranges as long as the pieces do.
    """

    tiles: list[int]
    entries: list[int]
    copies: list[int]
    stretches: list[int]
    least: int
    least_programs: int = 0
    most_partials: float = float("inf")


def choose_length(kernel: Kernel, demand: Demand) -> int:
    """Return how many tiles the ranges of a piece have at most, times its stretch."""
    total = sum(map(mul, demand.tiles, demand.copies))
    lengths = _candidates(kernel, demand, total)
    if len(lengths) == 1:
        return lengths[0]
    measure = _measure if len(demand.tiles) * len(lengths) <= _FEW else _measure_many
    least_items = demand.least_programs / kernel.num_kv_heads
    tile_time = kernel.tile * kernel.key_time
    # Rather a little more in all than slots that wait for one another.
    stretch, even_tiles = _UNEVEN * max(demand.stretches), _UNEVEN * total * kernel.num_kv_heads / kernel.slots
    least_time, best, measured = float("inf"), lengths[-1], measure(kernel, demand, lengths)
    for length, (slot_tiles, slot_items, items, partials) in zip(lengths, measured, strict=True):
        if items < least_items or partials > demand.most_partials:
            continue
        time = slot_tiles * tile_time + slot_items * kernel.item_time + partials * kernel.partial_time
        time *= max(slot_tiles / max(length * stretch, even_tiles), 1.0)
        if time < least_time:
            least_time, best = time, length
    if least_time == float("inf") and measured[0][2] < least_items and measured[-1][3] <= demand.most_partials:
        # Both bounds at once cannot be kept; partials cost more than idle slots.
        best = lengths[0]
    return best


def _candidates(kernel: Kernel, demand: Demand, total: int) -> list[int]:
    """Return lengths of ranges in tiles, ascending, with which the last round is full or which the bounds may ask for."""
    least, longest = max(1, demand.least // kernel.tile), max(demand.tiles, default=0)
    if longest <= least:
        return [least]
    per_round = kernel.slots / kernel.num_kv_heads
    num_items = sum(demand.copies)
    # Shorter ones would have too many rounds.
    shortest = max(least, min(longest, int(total / (per_round * MOST_ROUNDS)) + 1))
    lengths = {shortest, longest}
    for rounds in range(1, MOST_ROUNDS + 1):
        items, fitting = rounds * per_round, []
        # As many whole ranges of equal pieces as fit; and as long as fits unequal ones, whose last ranges are half empty.
        if items >= num_items:
            fitting.append(-(-longest // int(items // num_items)))
        if items > num_items / 2:
            fitting.append(int(total / (items - num_items / 2)) + 1)
        if fitting and max(fitting) < shortest:
            break  # as are those of more rounds
        lengths.update(fitting)
    if total < 2 * least * per_round:
        # Less than two rounds: what counts is the length itself.
        lengths.update([-(-longest // count) for count in (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)])
    return sorted([length for length in lengths if shortest <= length <= longest])


def _measure(kernel: Kernel, demand: Demand, lengths: list[int]) -> list[tuple[float, float, float, float]]:
    """Return for each length of ranges the tiles and the items of the first slot, and all items and partials.

    A range has the mean length of those of its piece, in sixteenths of a tile.
    """
    pieces = list(zip(demand.tiles, demand.stretches, demand.copies, demand.entries, strict=True))
    num_kv_heads, slots = kernel.num_kv_heads, kernel.slots
    measured: list[tuple[float, float, float, float]] = []
    for length in lengths:
        partials = items = rounds = slot_tiles = 0
        ranges = []
        for tiles, stretch, copies, entries in pieces:
            count = -(-tiles // (length * stretch))
            partials += count * entries
            ranges.append(((32 * tiles + count) // (2 * count), count * copies))
        ranges.sort(reverse=True)
        for sixteenths, number in ranges:
            items += number
            # Of how many rounds the first unit is one of these ranges or of heavier ones.
            reached = -(-items * num_kv_heads // slots)
            slot_tiles += (reached - rounds) * sixteenths
            rounds = reached
        measured.append((slot_tiles / 16, rounds, items, partials))
    return measured


def _measure_many(kernel: Kernel, demand: Demand, lengths: list[int]) -> list[tuple[float, float, float, float]]:
    """Return the same as `_measure`, faster where pieces are many."""
    # Small whole numbers in float64, whose products and quotients numpy computes faster.
    tiles, stretches, copies, entries = np.array([demand.tiles, demand.stretches, demand.copies, demand.entries], dtype=np.float64)
    # [num_lengths, num_pieces]
    counts = np.ceil(tiles / (np.array(lengths, dtype=np.float64)[:, None] * stretches))
    # The length of a piece's ranges and how many there are sort as one number, the longest first: number / _PACK - length.
    packed = counts * (copies / _PACK) - np.floor(16 * tiles / counts + 0.5)
    packed.sort(axis=1)
    sixteenths = np.floor(packed)
    items = (packed - sixteenths).cumsum(axis=1) * _PACK
    rounds = np.zeros((len(lengths), len(tiles) + 1))
    np.ceil(items * kernel.num_kv_heads / kernel.slots, out=rounds[:, 1:])
    slot_tiles = ((rounds[:, :-1] - rounds[:, 1:]) * sixteenths).sum(axis=1) / 16
    return list(zip(slot_tiles.tolist(), rounds[:, -1].tolist(), items[:, -1].tolist(), (counts @ entries).tolist(), strict=True))


def list_order(keys: np.ndarray, per_round: int) -> np.ndarray:
    """Return the order of a list of items: heaviest first, and each round backwards whose next one is not.

    So a slot that has much to do in one round has little in the next, and those of the last, unfilled round follow on the lightest.

    Args:
        keys: of each item. per_round: items that run at once.
    """
    order = (-keys).argsort(kind="stable")
    for end in range((len(order) - 1) // per_round * per_round, 0, -2 * per_round):
        order[end - per_round : end] = order[end - per_round : end][::-1].copy()
    return order


def cut(
    first_keys: np.ndarray, end_keys: np.ndarray, counts: np.ndarray, tile: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut pieces of keys into ranges that are equal within one tile, at multiples of tile.

    Args:
        first_keys, end_keys, counts: of each piece; a count is at most the number of its tiles.

    Returns:
        Of each range, those of a piece together: its piece, its number within the piece, its first key, its end key. Of each piece
        that is not empty its last range.
    """
    totals = counts.cumsum()
    pieces = np.arange(len(counts)).repeat(counts)
    numbers = np.arange(len(pieces)) - (totals - counts)[pieces]
    bases = first_keys // tile
    tiles = -(-end_keys // tile) - bases
    begins = np.maximum((bases[pieces] + tiles[pieces] * numbers // counts[pieces]) * tile, first_keys[pieces])
    live = counts.nonzero()[0]
    lasts = totals[live] - 1
    ends = np.empty_like(begins)
    ends[:-1] = begins[1:]
    ends[lasts] = end_keys[live]
    return pieces, numbers, begins, ends, lasts


def spread(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each member of groups of these sizes its group and its place in it."""
    groups = np.arange(len(sizes)).repeat(sizes)
    return groups, np.arange(len(groups)) - (sizes.cumsum() - sizes)[groups]
