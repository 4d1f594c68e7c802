"""The lists of items of a step with prompt tokens: prefill tiles, and split items for short extensions of long prefixes."""

from __future__ import annotations

import numpy as np

from radixkv.kernels.items import ItemLists, decode_items, range_items
from radixkv.kernels.layout import Layout
from radixkv.kernels.pieces import wide_length
from radixkv.kernels.ranges import cut, spread


def prompt_items(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    layout: Layout,
    *,
    window: int | None = None,
    exact: bool = False,
    starts: np.ndarray | None = None,
) -> ItemLists:
    """List the items of a step of prompt tokens: prefill tiles, and split items for short extensions of long prefixes.

    Args:
        query_lens: `[num_seqs]`, new tokens of each sequence; 0: the sequence has no part in the step.
        seq_lens: `[num_seqs]`, tokens of each sequence, the new ones included.
        layout, window: as in decode_items.
        exact: prefill tiles only.
        starts: `[num_seqs]`, the first token of each sequence; None: they follow one another.
    """
    new, lens = np.asarray(query_lens, dtype=np.int64), np.asarray(seq_lens, dtype=np.int64)
    live_from = np.zeros_like(lens) if window is None else np.maximum(lens - new + 1 - window, 0) // layout.tile_kv * layout.tile_kv
    num_tiles = -(-new // layout.tile_q)
    # What the last tile of each sequence reads, and all of them on average.
    longest = np.where(new > 0, lens - live_from, 0)
    per_slot = int((longest * num_tiles).sum()) * layout.num_kv_heads / layout.wide_slots
    # A sequence is split where its longest tile would outlast everything else by far, and ranges of a fair length make up for that.
    split = longest > max(1.5 * per_slot, 4 * layout.chunk)
    if exact or layout.group > layout.wide_rows:
        split[:] = False
    prefill_tiles, tile_keys = _tiles(np.where(split, 0, new), lens, window, layout)
    none = np.zeros(0, np.int32)
    if not split.any():
        items = np.zeros((0, 5), np.int32)
        return ItemLists(prefill_tiles, items, items, none, none, none, np.zeros(1, np.int32), lens + 1, tile_keys, none, none, 0)
    seqs = np.flatnonzero(split)
    sizes, begins, ends = new[seqs], live_from[seqs], lens[seqs]
    tiles = -(-(ends - begins) // layout.tile_kv)
    shapes = zip(tiles.tolist(), sizes.tolist(), strict=True)
    counts = -(-tiles // wide_length(shapes, layout, 2 * layout.tile_kv))
    # The last range holds all new tokens, so that each of them sees keys of every range.
    counts = np.minimum(counts, np.maximum((ends - begins) // (sizes + 2 * layout.tile_kv), 1))
    pieces, numbers, first_keys, end_keys, _ = cut(begins, ends, counts, layout.tile_kv)
    starts = np.cumsum(new) - new if starts is None else starts
    ranges, places = spread(sizes[pieces])
    num_ranges = np.repeat(counts, sizes)
    merge_ranges = np.concatenate([[0], np.cumsum(num_ranges)])
    split_tokens, split_places = spread(sizes)
    first_split = np.cumsum(sizes) - sizes
    first_entries = np.cumsum(sizes[pieces]) - sizes[pieces]
    rows = np.stack((first_entries, sizes[pieces], seqs[pieces], first_keys, end_keys), axis=1).astype(np.int32)
    per_round = -(-layout.wide_slots // layout.num_kv_heads)
    wide, wide_keys = range_items(rows, end_keys - first_keys, layout.group, layout.wide_rows, per_round)
    return ItemLists(
        prefill_tiles=prefill_tiles,
        narrow=np.zeros((0, 5), np.int32),
        wide=wide,
        entry_tokens=(starts[seqs[pieces]][ranges] + places).astype(np.int32),
        entry_partials=(merge_ranges[first_split[pieces][ranges] + places] + numbers[ranges]).astype(np.int32),
        merge_tokens=(starts[seqs][split_tokens] + split_places).astype(np.int32),
        merge_ranges=merge_ranges.astype(np.int32),
        rebuild_at=lens + 1,
        tile_keys=tile_keys,
        narrow_keys=none,
        wide_keys=wide_keys,
        range_keys=int((ends - begins).sum()),
    )


def mixed_items(
    table: np.ndarray, new: np.ndarray, lens: np.ndarray, decoding: np.ndarray, layout: Layout, *, window: int | None, exact: bool
) -> tuple[ItemLists, np.ndarray | None]:
    """List the items of a step of prompt tokens and the decode rows among them.

    Args:
        table: int32 `[num_seqs, max_blocks]`, as in decode_items.
        new, lens: `[num_seqs]`, new tokens and all tokens of each sequence.
        decoding: bool `[num_seqs]`, which sequences decode.
        layout, window, exact: as in decode_items.

    Returns:
        The lists, and the end of each token where there are partials; None: there are none.
    """
    starts = np.cumsum(new) - new
    lists = prompt_items(np.where(decoding, 0, new), lens, layout, window=window, exact=exact, starts=starts)
    if decoding.any():
        seqs = np.flatnonzero(decoding)
        decode = decode_items(table[seqs], lens[seqs], layout, window=window, exact=exact)
        lists = _join_lists(lists, decode, seqs, starts[seqs], layout)
    if not lists.num_partials and not decoding.any():
        return lists, None
    seqs, places = spread(new)
    return lists, (lens - new + 1)[seqs] + places


def _join_lists(prompt: ItemLists, decode: ItemLists, seqs: np.ndarray, tokens: np.ndarray, layout: Layout) -> ItemLists:
    """Join the lists of a step's prompt tokens and those of its decode rows, which are the given sequences and tokens of the step."""
    first_entry = first_partial = prompt.num_partials
    items = []
    for rows, unit in ((decode.narrow, 1), (decode.wide, layout.group)):
        moved = rows.copy()
        moved[:, 0] += first_entry * unit
        moved[:, 2] = seqs[rows[:, 2]]
        items.append(moved)
    rebuild_at = prompt.rebuild_at.copy()
    rebuild_at[seqs] = decode.rebuild_at
    return ItemLists(
        prefill_tiles=prompt.prefill_tiles,
        narrow=items[0],
        wide=np.concatenate([prompt.wide, items[1]]),
        entry_tokens=np.concatenate([prompt.entry_tokens, tokens[decode.entry_tokens]]),
        entry_partials=np.concatenate([prompt.entry_partials, decode.entry_partials + first_partial]),
        merge_tokens=np.concatenate([prompt.merge_tokens, tokens[decode.merge_tokens]]),
        merge_ranges=np.concatenate([prompt.merge_ranges, decode.merge_ranges[1:] + first_partial]),
        rebuild_at=rebuild_at,
        tile_keys=prompt.tile_keys,
        narrow_keys=decode.narrow_keys,
        wide_keys=np.concatenate([prompt.wide_keys, decode.wide_keys]),
        range_keys=prompt.range_keys + decode.range_keys,
    )


def _tiles(new: np.ndarray, lens: np.ndarray, window: int | None, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return (sequence, first query token) of the prefill tiles, those with the most keys first, and how many keys each reads."""
    seqs, places = spread(-(-new // layout.tile_q))
    firsts = places * layout.tile_q
    begins = (lens - new)[seqs] + firsts
    ends = np.minimum(begins + layout.tile_q, lens[seqs])
    keys = ends if window is None else ends - np.maximum(begins + 1 - window, 0)
    order = np.argsort(-keys, kind="stable")
    return np.stack([seqs[order], firsts[order]], axis=1).astype(np.int32), keys[order]
