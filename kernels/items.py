"""The lists of items of one step, in numpy: which query tokens attend to which ranges of keys, and what that costs.

A token's keys are cut into ranges, an item is one range and the tokens (entries) that attend to it, and a token's partials are merged
in the order of their positions. Nothing here knows a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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


@dataclass(frozen=True)
class ItemLists:
    """The items of one step as int32 arrays; `radixkv.kernels.work.Work` says what their columns mean.

    Attributes:
        prefill_tiles: `[num_tiles, 2]`.
        narrow, wide: `[num_items, 5]`.
        entry_tokens, entry_partials: `[num_entries]`.
        merge_tokens: `[M]`. merge_ranges: `[M + 1]`.
        num_partials: partials that the items write.
        rebuild_at: `[num_seqs]`, the length of each sequence from which on the lists no longer serve.
    """

    prefill_tiles: np.ndarray
    narrow: np.ndarray
    wide: np.ndarray
    entry_tokens: np.ndarray
    entry_partials: np.ndarray
    merge_tokens: np.ndarray
    merge_ranges: np.ndarray
    num_partials: int
    rebuild_at: np.ndarray


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
    first_chunk = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0) // layout.chunk
    num_ranges = np.maximum(-(-lens // layout.chunk) - first_chunk, 0)
    ranges = np.concatenate([[0], np.cumsum(num_ranges)])
    seqs = np.repeat(np.arange(len(lens)), num_ranges)
    begins = (np.arange(ranges[-1]) - ranges[seqs] + first_chunk[seqs]) * layout.chunk
    entries = np.arange(ranges[-1])
    items = np.stack([entries, np.ones_like(entries), seqs, begins, begins + layout.chunk], axis=1)
    return ItemLists(
        prefill_tiles=np.zeros((0, 2), np.int32),
        narrow=items.astype(np.int32),
        wide=np.zeros((0, 5), np.int32),
        entry_tokens=seqs.astype(np.int32),
        entry_partials=entries.astype(np.int32),
        merge_tokens=np.arange(len(lens), dtype=np.int32),
        merge_ranges=ranges.astype(np.int32),
        num_partials=int(ranges[-1]),
        rebuild_at=(-(-lens // layout.chunk) * layout.chunk + 1).astype(np.int32),
    )


def prompt_items(
    query_lens: np.ndarray, seq_lens: np.ndarray, layout: Layout, *, window: int | None = None, exact: bool = False
) -> ItemLists:
    """List the items of a step of prompt tokens: prefill tiles, and split items for short extensions of long prefixes.

    Args:
        query_lens: `[num_seqs]`, new tokens of each sequence.
        seq_lens: `[num_seqs]`, tokens of each sequence, the new ones included.
        layout, window: as in decode_items.
        exact: prefill tiles only.
    """
    tiles = [
        (seq_len - query_len + min(first + layout.tile_q, query_len), seq, first)
        for seq, (query_len, seq_len) in enumerate(zip(np.asarray(query_lens).tolist(), np.asarray(seq_lens).tolist(), strict=True))
        for first in range(0, query_len, layout.tile_q)
    ]
    tiles.sort(key=lambda tile: -tile[0])
    none = np.zeros(0, np.int32)
    return ItemLists(
        prefill_tiles=np.array([tile[1:] for tile in tiles], dtype=np.int32).reshape(-1, 2),
        narrow=np.zeros((0, 5), np.int32),
        wide=np.zeros((0, 5), np.int32),
        entry_tokens=none,
        entry_partials=none,
        merge_tokens=none,
        merge_ranges=np.zeros(1, np.int32),
        num_partials=0,
        rebuild_at=np.asarray(seq_lens, dtype=np.int32) + 1,
    )
