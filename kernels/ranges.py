"""How long the ranges of keys of one step are: short enough to fill the device evenly, long enough not to drown in partials.

Programs run on a fixed number of slots, slot s taking the units s, s + slots, ... of the list. The time of a list is
taken to be at most that of a slot that gets the heaviest of every round, plus that of moving the partials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# Ranges that give more rounds than this have nothing left to balance.
MOST_ROUNDS = 6
# A slot that has this many times the average to do makes a list a bad one.
_UNEVEN = 1.1
# A power of 2 above every number of ranges.
_PACK = float(1 << 24)


@dataclass(frozen=True)
class Demand:
    """Pieces of work that are to be cut into ranges; times in those of one key in a slot of the narrow kernel.

    All arrays are `[num_pieces]`, float64 but for keys.

    Attributes:
        keys: of each piece; 0 gives no range.
        entries: tokens that attend to the piece, so many partials does each range cost.
        copies: items per range.
        stretch: how many times as long the ranges of the piece are to be.
        num_kv_heads: programs per item. slots: programs that run at once.
        tile: ranges are cut at multiples of so many keys. least: keys that a range has at least, unless the piece is shorter.
        key_time, item_time, partial_time: what a key, an item and a partial (spread over all slots) take.
        least_programs: to be reached if ranges of the least length do.
        most_partials: not to be exceeded unless ranges as long as the pieces do.
    """

    keys: np.ndarray
    entries: np.ndarray
    copies: np.ndarray
    stretch: np.ndarray
    num_kv_heads: int
    slots: int
    tile: int
    least: int
    key_time: float
    item_time: float
    partial_time: float
    least_programs: int = 0
    most_partials: float = float("inf")


def choose_ranges(demand: Demand) -> np.ndarray:
    """Return into how many ranges each piece is cut, int64 `[num_pieces]`."""
    # Small whole numbers in float64, whose products and quotients numpy computes faster.
    tiles, copies, entries = np.ceil(demand.keys / demand.tile), demand.copies, demand.entries
    longest, total = int(tiles.max(initial=0)), float(tiles @ copies)
    lengths = _candidates(demand, longest, total)
    # [num_candidates, num_pieces]
    counts = np.ceil(tiles / (lengths[:, None] * demand.stretch))
    if len(lengths) == 1:
        return counts[0].astype(np.int64)
    partials = counts @ entries
    programs = counts @ copies * demand.num_kv_heads
    slot_tiles, slot_items = _longest_slot(demand, tiles, counts, copies)
    times = slot_tiles * (demand.tile * demand.key_time) + slot_items * demand.item_time + partials * demand.partial_time
    # Rather a little more in all than slots that wait for one another.
    even_tiles = np.maximum(lengths * int(demand.stretch.max()), total * demand.num_kv_heads / demand.slots)
    times *= np.maximum(slot_tiles / (even_tiles * _UNEVEN), 1)
    times[(programs < demand.least_programs) | (partials > demand.most_partials)] = np.inf
    best = int(times.argmin())
    if times[best] == np.inf:
        # Both bounds at once cannot be kept; partials cost more than idle slots.
        best = -1 if partials[-1] > demand.most_partials or programs[0] >= demand.least_programs else 0
    return counts[best].astype(np.int64)


def _candidates(demand: Demand, longest: int, total: float) -> np.ndarray:
    """Return lengths of ranges in tiles, ascending, with which the last round is full or which the bounds may ask for."""
    least = max(1, demand.least // demand.tile)
    if longest <= least:
        return np.array([float(least)])
    per_round = demand.slots / demand.num_kv_heads
    num_items = int(demand.copies.sum())
    # Shorter ones would have too many rounds.
    shortest = max(least, min(longest, int(total / (per_round * MOST_ROUNDS)) + 1))
    lengths = {shortest, longest}
    for rounds in range(1, MOST_ROUNDS + 1):
        items = rounds * per_round
        # As many whole ranges of equal pieces as fit; and as long as fits unequal ones, whose last ranges are half empty.
        if items >= num_items:
            lengths.add(-(-longest // int(items // num_items)))
        if items > num_items / 2:
            lengths.add(int(total / (items - num_items / 2)) + 1)
    if total < 2 * least * per_round:
        # Less than two rounds: what counts is the length itself.
        lengths.update(-(-longest // count) for count in (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64))
    return np.array(sorted({min(length, longest) for length in lengths if length >= shortest}), dtype=np.float64)


def _longest_slot(demand: Demand, tiles: np.ndarray, counts: np.ndarray, copies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tiles and the items of the first slot for each row of counts `[num_candidates, num_pieces]`."""
    # The mean length of a piece's ranges in sixteenths of a tile, and how many there are, sort as one number: length + number / _PACK.
    packed = np.rint(16 * tiles / np.maximum(counts, 1)) + counts * (copies / _PACK)
    packed.sort(axis=1)
    numbers, lengths = np.modf(packed[:, ::-1])
    ends = numbers.cumsum(axis=1)
    most = float(ends[:, -1].max())
    # The item of the first unit of each round, and where in the sorted list it is. Past the end of its list a candidate's place is that
    # of the next one's first item, or of none.
    firsts = np.arange(math.ceil(most * _PACK * demand.num_kv_heads / demand.slots)) * demand.slots // demand.num_kv_heads / _PACK
    rows = np.arange(len(counts))[:, None] * (most + 1)
    places = (ends + rows).ravel().searchsorted((firsts + rows).ravel(), side="right")
    ran = firsts < ends[:, -1:]
    keys = lengths.ravel().take(places, mode="clip").reshape(ran.shape)
    return (keys * ran).sum(axis=1) / 16, ran.sum(axis=1)


def list_order(keys: np.ndarray, per_round: int) -> np.ndarray:
    """Return the order of a list of items: heaviest first, and each round backwards whose next one is not.

    So a slot that has much to do in one round has little in the next, and those of the last, unfilled round follow on the lightest.

    Args:
        keys: of each item. per_round: items that run at once.
    """
    order = np.argsort(-keys, kind="stable")
    for end in range((len(order) - 1) // per_round * per_round, 0, -2 * per_round):
        order[end - per_round : end] = order[end - per_round : end][::-1].copy()
    return order


def cut(
    first_keys: np.ndarray, end_keys: np.ndarray, counts: np.ndarray, tile: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut pieces of keys into ranges that are equal within one tile, at multiples of tile.

    Args:
        first_keys, end_keys, counts: of each piece; a count is at most the number of its tiles.

    Returns:
        Of each range, those of a piece together: its piece, its number within the piece, its first key, its end key.
    """
    pieces, numbers = spread(counts)
    bases = first_keys // tile * tile
    base, tiles, count = bases[pieces], (-(-(end_keys - bases) // tile))[pieces], counts[pieces]
    begins = base + tiles * numbers // count * tile
    ends = base + tiles * (numbers + 1) // count * tile
    return pieces, numbers, np.maximum(begins, first_keys[pieces]), np.minimum(ends, end_keys[pieces])


def spread(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each member of groups of these sizes its group and its place in it."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    ends = sizes.cumsum()
    return groups, np.arange(len(groups)) - (ends - sizes)[groups]
