"""The lists of items of one step, in numpy: which query tokens attend to which ranges of keys, and what that costs.

A token's keys are cut into ranges, an item is one range and the tokens (entries) that attend to it, and a token's partials are merged
in the order of their positions. How long ranges are is chosen per step: the step takes as long as the slot of the device that has most
to do, plus what the partials move. Nothing here knows a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixkv.kernels.forest import Prices, Run, shared_runs
from radixkv.kernels.ranges import Demand, choose_ranges, cut, list_order, spread

# A range as short as this is worth its partials where there are fewer than so many programs.
_FINE_RANGE, _LEAST_PROGRAMS = 256, 240
# Bounds of the least keys of a shared range.
_SHARED_RANGES = 512, 1024
# Bytes of partials beside those of K/V: in private ranges of the least length, and in a step with shared ones.
_PARTIAL_SHARE, _SHARED_PARTIALS = 0.06, 0.34
# A key of a wide item takes the tensor cores of one multiprocessor this many times as long as a key of narrow items its share of memory.
_WIDE_KEY_TIME = 1.25


@dataclass(frozen=True)
class Layout:
    """What the kernels and the device prescribe to the item lists; `configs.layout_for` makes it.

    Attributes:
        group: query heads per K/V head.
        num_kv_heads, head_dim, block_size: of a pool.
        itemsize: bytes per element of a pool.
        narrow_entries: tokens per item of the narrow kernel, 1 or more.
        wide_rows: (token, query head) rows per item of the wide kernel, which may begin and end inside a token; a group above it
            gets no wide items.
        tile_kv: keys per loop trip; ranges begin at multiples of it, or at those of block_size where sequences branch.
        tile_q: query tokens per prefill tile.
        chunk: keys per range of the exact plan, and the growth that an item list of the default plan outlives.
        narrow_slots, wide_slots: programs of either kernel that run on the device at once.
    """

    group: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    block_size: int
    narrow_entries: int
    wide_rows: int
    tile_kv: int
    tile_q: int
    chunk: int
    narrow_slots: int
    wide_slots: int

    @property
    def key_bytes(self) -> int:
        """K and V of one token and one K/V head."""
        return 2 * self.head_dim * self.itemsize

    @property
    def partial_bytes(self) -> int:
        """One token's partial of one K/V head, fp32, written and read."""
        return 2 * self.group * (self.head_dim + 1) * 4

    @property
    def partial_keys(self) -> float:
        """Keys that take as many bytes as a partial."""
        return self.partial_bytes / self.key_bytes

    def moved_bytes(self, num_keys: int, num_partials: int) -> int:
        """Bytes of so many keys and partials over all K/V heads of a layer."""
        return self.num_kv_heads * (num_keys * self.key_bytes + num_partials * self.partial_bytes)


@dataclass(frozen=True)
class ItemLists:
    """The items of one step as int32 arrays; `radixkv.kernels.work.Work` says what their columns mean.

    Attributes:
        prefill_tiles: `[num_tiles, 2]`.
        narrow, wide: `[num_items, 5]`.
        entry_tokens, entry_partials: `[num_entries]`.
        merge_tokens: `[M]`. merge_ranges: `[M + 1]`.
        rebuild_at: `[num_seqs]`, the length of each sequence from which on the lists no longer serve.
        tile_keys, narrow_keys, wide_keys: `[num_tiles]`, `[num_items]`, keys that each tile or item reads at the present lengths.
        range_keys: keys that the split items read per K/V head, those of the row tiles of one range once.
    """

    prefill_tiles: np.ndarray
    narrow: np.ndarray
    wide: np.ndarray
    entry_tokens: np.ndarray
    entry_partials: np.ndarray
    merge_tokens: np.ndarray
    merge_ranges: np.ndarray
    rebuild_at: np.ndarray
    tile_keys: np.ndarray
    narrow_keys: np.ndarray
    wide_keys: np.ndarray
    range_keys: int

    @property
    def num_partials(self) -> int:
        return len(self.entry_partials)

    @property
    def loaded_keys(self) -> int:
        """Keys that the split items load per K/V head, each row tile its own."""
        return int(self.narrow_keys.sum()) + int(self.wide_keys.sum())

    def moved_bytes(self, layout: Layout) -> int:
        """K/V that the split items read, each range once, and partials written and read, over all K/V heads of a layer."""
        return layout.moved_bytes(self.range_keys, self.num_partials)


def decode_items(
    table: np.ndarray, seq_lens: np.ndarray, layout: Layout, *, window: int | None = None, exact: bool = False, share: bool = True
) -> ItemLists:
    """List the items of a decode step, in which token n is the last one of sequence n.

    Args:
        table: int32 `[num_seqs, max_blocks]`, block ids in token order; what lies past a sequence's end is not looked at.
        seq_lens: `[num_seqs]`, tokens of each sequence, the new one included.
        layout: of the kernels that will run.
        window: only that many last keys are seen; None: all.
        exact: cut at absolute multiples of layout.chunk and share nothing.
        share: whether sequences whose block tables agree may share items.
    """
    lens = np.asarray(seq_lens, dtype=np.int64)
    step = layout.chunk if exact else layout.tile_kv
    live_from = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0) // step * step
    if exact:
        counts = -(-(lens - live_from) // step)
        seqs, numbers = spread(counts)
        first_keys = live_from[seqs] + numbers * step
        end_keys = np.minimum(first_keys + step, lens[seqs])
        return _flat(counts, seqs, first_keys, end_keys, live_from + counts * step, layout)
    tree, flat_keys = None, lens - live_from
    if share:
        prices = Prices(layout.partial_keys, layout.tile_kv, _SHARED_RANGES[0], _least_private(layout))
        found = shared_runs(table, lens, live_from, layout.block_size, prices)
        tree = None if found is None else _tree(lens, live_from, *found, layout)
    num_keys = int(flat_keys.sum())
    # Flat, a sequence has a partial at least, so that mostly there is no need to know how many.
    if tree is not None and tree.moved_bytes(layout) < layout.moved_bytes(num_keys, int((lens > 0).sum())):
        return tree
    counts = choose_ranges(_narrow_demand(flat_keys, np.ones(len(lens)), layout))
    if tree is not None and tree.moved_bytes(layout) < layout.moved_bytes(num_keys, int(counts.sum())):
        return tree
    seqs, _, first_keys, end_keys = cut(live_from, lens, counts, layout.tile_kv)
    return _flat(counts, seqs, first_keys, end_keys, lens + layout.chunk, layout)


def _flat(
    counts: np.ndarray, seqs: np.ndarray, first_keys: np.ndarray, end_keys: np.ndarray, grown: np.ndarray, layout: Layout
) -> ItemLists:
    """List one item per range, those of a sequence together; its last range then reaches up to its length in `grown`."""
    num_seqs, num_items = len(counts), len(seqs)
    keys = end_keys - first_keys
    merge_ranges = np.zeros(num_seqs + 1, np.int32)
    counts.cumsum(out=merge_ranges[1:])
    live = counts > 0
    end_keys[merge_ranges[1:][live] - 1] = grown[live]
    order = list_order(keys, -(-layout.narrow_slots // layout.num_kv_heads))
    narrow = np.empty((num_items, 5), np.int32)
    narrow[:, 0] = order
    narrow[:, 1] = 1
    narrow[:, 2] = seqs[order]
    narrow[:, 3] = first_keys[order]
    narrow[:, 4] = end_keys[order]
    return ItemLists(
        prefill_tiles=np.zeros((0, 2), np.int32),
        narrow=narrow,
        wide=np.zeros((0, 5), np.int32),
        entry_tokens=seqs.astype(np.int32),
        entry_partials=np.arange(num_items, dtype=np.int32),
        merge_tokens=np.arange(num_seqs, dtype=np.int32),
        merge_ranges=merge_ranges,
        rebuild_at=grown * live + 1,
        tile_keys=np.zeros(0, np.int64),
        narrow_keys=keys[order],
        wide_keys=np.zeros(0, np.int64),
        range_keys=int(keys.sum()),
    )


def _tree(lens: np.ndarray, live_from: np.ndarray, order: np.ndarray, runs: list[Run], layout: Layout) -> ItemLists:
    """List the items of shared runs, and of what is left of each sequence."""
    num_seqs, num_runs = len(lens), len(runs)
    bounds = np.array([(run.first_row, run.end_row, run.first_key, run.end_key) for run in runs])
    sizes = bounds[:, 1] - bounds[:, 0]
    # The last run of each sequence is the last in the list that has it, as parents come first.
    last_run = np.full(num_seqs, -1)
    for index, run in enumerate(runs):
        last_run[order[run.first_row : run.end_row]] = index
    begins = np.where(last_run < 0, live_from, np.maximum(bounds[last_run, 3], live_from))
    is_wide = (sizes > layout.narrow_entries) & (layout.group <= layout.wide_rows)
    small, large = np.flatnonzero(~is_wide), np.flatnonzero(is_wide)
    run_keys = bounds[:, 3] - bounds[:, 2]
    keys = np.concatenate([lens - begins, run_keys[small]])
    entries = np.concatenate([np.ones(num_seqs), sizes[small]])
    narrow_counts = choose_ranges(_narrow_demand(keys, entries, layout))
    run_sizes = sizes[large].astype(np.float64)
    most = _SHARED_PARTIALS * (int(keys.sum()) + int(run_keys[large].sum())) / layout.partial_keys - float(narrow_counts @ entries)
    # Not shorter than private ranges, whose partials are fewer, unless those are long enough for both.
    least = int(np.clip((keys / np.maximum(narrow_counts, 1)).max(), *_SHARED_RANGES))
    counts = np.empty(num_seqs + num_runs, np.int64)
    counts[:num_seqs] = narrow_counts[:num_seqs]
    counts[num_seqs + small] = narrow_counts[num_seqs:]
    counts[num_seqs + large] = choose_ranges(wide_demand(run_keys[large], run_sizes, layout, least, most))

    # Pieces: what is left of each sequence, then the runs. before: ranges of a sequence before those of the piece.
    before = np.zeros(num_seqs + num_runs, np.int64)
    for index, run in enumerate(runs):
        if run.parent >= 0:
            before[num_seqs + index] = before[num_seqs + run.parent] + counts[num_seqs + run.parent]
    before[:num_seqs] = np.where(last_run < 0, 0, (before + counts)[num_seqs + last_run])
    merge_ranges = np.concatenate([[0], np.cumsum(before[:num_seqs] + counts[:num_seqs])])

    piece_sizes = np.concatenate([np.ones(num_seqs, np.int64), sizes])
    piece_firsts = np.concatenate([np.arange(num_seqs), num_seqs + bounds[:, 0]])
    members = np.concatenate([np.arange(num_seqs), order])
    first_keys, end_keys = np.concatenate([begins, bounds[:, 2]]), np.concatenate([lens, bounds[:, 3]])
    pieces, numbers, range_firsts, range_ends = cut(first_keys, end_keys, counts, layout.tile_kv)
    live = range_ends - range_firsts
    lasts = (pieces < num_seqs) & (numbers + 1 == counts[pieces])
    range_ends[lasts] += layout.chunk
    range_sizes = piece_sizes[pieces]
    ranges, places = spread(range_sizes)
    tokens = members[piece_firsts[pieces][ranges] + places]
    partials = merge_ranges[tokens] + (before[pieces] + numbers)[ranges]

    first_entries = np.cumsum(range_sizes) - range_sizes
    seqs = members[piece_firsts[pieces]]
    in_wide = np.concatenate([np.zeros(num_seqs, bool), is_wide])[pieces]
    lists = []
    for chosen, unit, most_rows, slots in (
        (~in_wide, 1, layout.narrow_entries, layout.narrow_slots),
        (in_wide, layout.group, layout.wide_rows, layout.wide_slots),
    ):
        arrays = (seqs[chosen], range_firsts[chosen], range_ends[chosen], live[chosen], -(-slots // layout.num_kv_heads))
        lists.append(range_items(first_entries[chosen] * unit, range_sizes[chosen] * unit, most_rows, *arrays))
    (narrow, narrow_keys), (wide, wide_keys) = lists
    return ItemLists(
        prefill_tiles=np.zeros((0, 2), np.int32),
        narrow=narrow,
        wide=wide,
        entry_tokens=tokens.astype(np.int32),
        entry_partials=partials.astype(np.int32),
        merge_tokens=np.arange(num_seqs, dtype=np.int32),
        merge_ranges=merge_ranges.astype(np.int32),
        rebuild_at=np.where(lens > 0, lens + layout.chunk, 0) + 1,
        tile_keys=np.zeros(0, np.int64),
        narrow_keys=narrow_keys,
        wide_keys=wide_keys,
        range_keys=int(live.sum()),
    )


def range_items(
    firsts: np.ndarray,
    sizes: np.ndarray,
    most: int,
    seqs: np.ndarray,
    first_keys: np.ndarray,
    end_keys: np.ndarray,
    keys: np.ndarray,
    per_round: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of ranges, each range cut into tiles of at most `most` entries or rows, and the keys they read."""
    order = list_order(keys, per_round)
    ranges, places = spread(-(-sizes // most)[order])
    ranges = order[ranges]
    first = places * most
    columns = (firsts[ranges] + first, np.minimum(sizes[ranges] - first, most), seqs[ranges], first_keys[ranges], end_keys[ranges])
    return np.stack(columns, axis=1).astype(np.int32), keys[ranges]


def _narrow_demand(keys: np.ndarray, entries: np.ndarray, layout: Layout) -> Demand:
    """Return what is to be cut into items of the narrow kernel, float64 entries."""
    return Demand(
        keys=keys,
        entries=entries,
        copies=np.ceil(entries / layout.narrow_entries),
        # A shared range is longer, as it costs more partials.
        stretch=np.minimum(entries, 2),
        num_kv_heads=layout.num_kv_heads,
        slots=layout.narrow_slots,
        tile=layout.tile_kv,
        least=_least_private(layout),
        key_time=1.0,
        item_time=layout.tile_kv + layout.partial_keys,
        partial_time=layout.partial_keys * layout.num_kv_heads / layout.narrow_slots,
        least_programs=min(_LEAST_PROGRAMS, layout.num_kv_heads * int(np.ceil(keys / _FINE_RANGE).sum())),
    )


def wide_demand(keys: np.ndarray, entries: np.ndarray, layout: Layout, least: int, most_partials: float) -> Demand:
    """Return what is to be cut into items of the wide kernel, float64 entries."""
    return Demand(
        keys=keys,
        entries=entries,
        copies=np.ceil(entries * layout.group / layout.wide_rows),
        stretch=np.ones(len(keys)),
        num_kv_heads=layout.num_kv_heads,
        slots=layout.wide_slots,
        tile=layout.tile_kv,
        least=least,
        key_time=_WIDE_KEY_TIME * layout.wide_slots / layout.narrow_slots,
        item_time=layout.tile_kv,
        partial_time=layout.partial_keys * layout.num_kv_heads / layout.narrow_slots,
        most_partials=most_partials,
    )


def _least_private(layout: Layout) -> int:
    """Return the least keys of a private range: partials are few beside K/V, but a short sequence is cut all the same."""
    fitting = -(-layout.partial_keys / _PARTIAL_SHARE // layout.tile_kv) * layout.tile_kv
    return int(min(max(fitting, 2 * layout.tile_kv), _FINE_RANGE))
