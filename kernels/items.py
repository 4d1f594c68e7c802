"""The lists of items of one step, in numpy: which query tokens attend to which ranges of keys, and what that costs.

A token's keys are cut into ranges, an item is one range and the tokens (entries) that attend to it, and a token's partials are merged
in the order of their positions. Nothing here knows a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixkv.kernels.forest import shared_runs
from radixkv.kernels.layout import Layout
from radixkv.kernels.pieces import Pieces, private_counts, private_pieces, shared_pieces
from radixkv.kernels.ranges import cut, list_order


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
    live_from = np.zeros(len(lens), np.int64) if window is None else np.maximum(lens - window, 0) // step * step
    if exact:
        counts = -(-(lens - live_from) // step)
        return _list(private_pieces(live_from, lens, counts), live_from + counts * step, step, layout)
    pieces = None
    if share:
        found = shared_runs(table, lens, live_from, layout.block_size, layout.prices)
        pieces = None if found is None else shared_pieces(live_from, lens, *found, layout)
    # Flat, a sequence has a partial at least, so that mostly there is no need to know how many.
    if pieces is None or pieces.moved_bytes(layout) >= layout.moved_bytes(int((lens - live_from).sum()), int(np.count_nonzero(lens))):
        flat = private_pieces(live_from, lens, private_counts(lens - live_from, layout))
        if pieces is None or pieces.moved_bytes(layout) >= flat.moved_bytes(layout):
            pieces = flat
    return _list(pieces, lens + layout.chunk, step, layout)


def _list(pieces: Pieces, grown: np.ndarray, tile: int, layout: Layout) -> ItemLists:
    """List the items of all ranges of pieces; the last range of each sequence reaches up to its length in `grown`."""
    num_seqs = len(grown)
    owners, numbers, begins, ends, lasts = cut(pieces.first_keys, pieces.end_keys, pieces.counts, tile)
    num_ranges, keys = len(owners), ends - begins
    own_counts = pieces.counts[:num_seqs]
    live = own_counts > 0
    ends[lasts[: np.count_nonzero(live)]] = grown[live]
    merge_ranges = np.zeros(num_seqs + 1, np.int32)
    merge_ranges[1:] = (pieces.before[:num_seqs] + own_counts).cumsum()

    # Of each range its first entry, their number, the sequence whose row of the block table is read, its first key, its end key.
    ranges = np.empty((num_ranges, 5), np.int32)
    ranges[:, 3] = begins
    ranges[:, 4] = ends
    if pieces.users is None:
        tokens, partials = owners, np.arange(num_ranges)
        ranges[:, 0] = partials
        ranges[:, 1] = 1
        ranges[:, 2] = owners
    else:
        sizes = pieces.users.sizes[owners]
        firsts = sizes.cumsum() - sizes
        tokens = pieces.users.seqs[(pieces.users.firsts[owners] - firsts).repeat(sizes) + np.arange(pieces.num_partials)]
        partials = merge_ranges[tokens] + (pieces.before[owners] + numbers).repeat(sizes)
        ranges[:, 0] = firsts
        ranges[:, 1] = sizes
        ranges[:, 2] = tokens[firsts]
    num_narrow = int(owners.searchsorted(pieces.num_narrow))
    narrow, narrow_keys = range_items(
        ranges[:num_narrow], keys[:num_narrow], 1, layout.narrow_entries, -(-layout.narrow_slots // layout.num_kv_heads)
    )
    wide, wide_keys = range_items(
        ranges[num_narrow:], keys[num_narrow:], layout.group, layout.wide_rows, -(-layout.wide_slots // layout.num_kv_heads)
    )
    return ItemLists(
        prefill_tiles=np.zeros((0, 2), np.int32),
        narrow=narrow,
        wide=wide,
        entry_tokens=tokens.astype(np.int32),
        entry_partials=partials.astype(np.int32),
        merge_tokens=np.arange(num_seqs, dtype=np.int32),
        merge_ranges=merge_ranges,
        rebuild_at=grown * live + 1,
        tile_keys=np.zeros(0, np.int64),
        narrow_keys=narrow_keys,
        wide_keys=wide_keys,
        range_keys=pieces.num_keys,
    )


def range_items(ranges: np.ndarray, keys: np.ndarray, unit: int, most: int, per_round: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of ranges in the order of their list, and the keys they read.

    Args:
        ranges: int32 `[num_ranges, 5]`, columns as in the list but counted in entries. keys: `[num_ranges]`, that each reads.
        unit: what the list counts per entry. most: of which an item has at most so many; a range of more is several items.
        per_round: items that run at once.
    """
    order = list_order(keys, per_round)
    if not len(order) or ranges[:, 1].max() * unit <= most:
        items = ranges[order]
        if unit > 1:
            items[:, :2] *= unit
        return items, keys[order]
    tiles = -(-ranges[:, 1] * unit // most)[order]
    owners = order.repeat(tiles)
    done = (np.arange(len(owners)) - (tiles.cumsum() - tiles).repeat(tiles)) * most
    items = ranges[owners]
    items[:, 0] = items[:, 0] * unit + done
    items[:, 1] = np.minimum(items[:, 1] * unit - done, most)
    return items, keys[owners]
