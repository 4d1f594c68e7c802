"""How long the ranges of keys of one step are: short enough to fill the device evenly, long enough not to drown in partials.

Programs run on a fixed number of slots, slot s taking the units s, s + slots, ... of the list. The time of a list is
taken to be at most that of a slot that gets the heaviest of every round, plus that of moving the partials.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Ranges that give more rounds than this have nothing left to balance.
_MOST_ROUNDS = 10
# A slot that has this many times the average to do makes a list a bad one.
_UNEVEN = 1.1


@dataclass(frozen=True)
class Demand:
    """Pieces of work that are to be cut into ranges; arrays `[num_pieces]`, times in those of one key in a slot of the narrow kernel.

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
    tiles = -(-demand.keys // demand.tile)
    candidates = _candidates(demand, tiles)
    # [num_candidates, num_pieces]
    counts = -(-tiles // (candidates[:, None] * demand.stretch))
    if len(candidates) == 1:
        return counts[0]
    partials = counts @ demand.entries
    programs = counts @ demand.copies * demand.num_kv_heads
    slot_keys, slot_items = _longest_slot(demand, tiles, counts)
    times = slot_keys * demand.key_time + slot_items * demand.item_time + partials * demand.partial_time
    # Rather a little more in all than slots that wait for one another.
    even_tiles = np.maximum((tiles / np.maximum(counts, 1)).max(1), tiles @ demand.copies * (demand.num_kv_heads / demand.slots))
    times *= np.maximum(slot_keys / (even_tiles * demand.tile) / _UNEVEN, 1)
    times[(programs < demand.least_programs) | (partials > demand.most_partials)] = np.inf
    best = int(times.argmin())
    if times[best] == np.inf:
        # Both bounds at once cannot be kept; partials cost more than idle slots.
        best = -1 if partials[-1] > demand.most_partials or programs[0] >= demand.least_programs else 0
    return counts[best]


def _candidates(demand: Demand, tiles: np.ndarray) -> np.ndarray:
    """Return lengths of ranges in tiles, ascending, with which the last round is full or which the bounds may ask for."""
    longest, total = int(tiles.max(initial=0)), int(tiles @ demand.copies)
    least = max(1, demand.least // demand.tile)
    if longest <= least:
        return np.array([least])
    per_round = demand.slots / demand.num_kv_heads
    num_items = int(demand.copies.sum())
    lengths = {least, longest}
    for rounds in range(1, _MOST_ROUNDS + 1):
        items = rounds * per_round
        # As many whole ranges of equal pieces as fit; and as long as fits unequal ones, whose last ranges are half empty.
        if items >= num_items:
            lengths.add(-(-longest // int(items // num_items)))
        if items > num_items / 2:
            lengths.add(int(total / (items - num_items / 2)) + 1)
    if total < 2 * least * per_round:
        # Less than two rounds: what counts is the length itself.
        lengths.update(int(least * 1.25**power) for power in range(1, 20) if least * 1.25**power < longest)
    shortest = max(least, min(longest, int(total / (per_round * _MOST_ROUNDS))))
    return np.array(sorted(min(max(length, shortest), longest) for length in lengths if length >= shortest or length == least))


def _longest_slot(demand: Demand, tiles: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys and the items of the first slot for each row of counts `[num_candidates, num_pieces]`."""
    # A piece is cut into ranges of one tile more or less: `larger` of the longer ones.
    shorter = tiles // np.maximum(counts, 1)
    larger = tiles - shorter * counts
    lengths = np.concatenate([shorter + 1, shorter], axis=1)
    numbers = np.concatenate([larger, counts - larger], axis=1) * np.concatenate([demand.copies, demand.copies])
    order = np.argsort(-lengths, axis=1)
    lengths = np.take_along_axis(lengths, order, 1)
    ends = np.take_along_axis(numbers, order, 1).cumsum(1)
    totals = ends[:, -1]
    rounds = -(-int(totals.max()) * demand.num_kv_heads // demand.slots)
    # The item of the first unit of each round, and where in the sorted list it is.
    firsts = np.arange(rounds) * demand.slots // demand.num_kv_heads
    rows = np.arange(len(counts))[:, None] * (int(totals.max()) + 1)
    places = np.searchsorted((ends + rows).ravel(), (firsts + rows).ravel(), side="right").reshape(len(counts), rounds)
    places -= np.arange(len(counts))[:, None] * lengths.shape[1]
    ran = firsts < totals[:, None]
    keys = np.take_along_axis(lengths, np.where(ran, places, 0), 1) * demand.tile
    return np.where(ran, keys, 0).sum(1), ran.sum(1)


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
    """Cut pieces of keys into ranges of about equal length, at multiples of tile.

    Args:
        first_keys, end_keys, counts: of each piece; a count is at most the number of whole tiles, or 1.

    Returns:
        Of each range, those of a piece together: its piece, its number within the piece, its first key, its end key.
    """
    pieces, numbers = spread(counts)
    first, length, count = first_keys[pieces], (end_keys - first_keys)[pieces], counts[pieces]
    begins = first + length * numbers // count
    ends = first + length * (numbers + 1) // count
    begins = np.where(numbers > 0, begins // tile * tile, begins)
    ends = np.where(numbers + 1 < count, ends // tile * tile, ends)
    return pieces, numbers, begins, ends


def spread(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each member of groups of these sizes its group and its place in it."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    ends = sizes.cumsum()
    return groups, np.arange(len(groups)) - (ends - sizes)[groups]
