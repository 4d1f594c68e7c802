"""The work list of one forward step: what a backend needs beside tensors, built once and read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from radixkv.kernels.items import ItemLists, decode_items
from radixkv.kernels.layout import Layout
from radixkv.kernels.packing import Capacity, pack
from radixkv.kernels.prompt_items import mixed_items

Phase = Literal["prefill", "decode"]
Backend = Literal["torch", "triton"]


@dataclass(frozen=True)
class SplitItems:
    """The items of one split kernel, narrow or wide.

    Attributes:
        items: int32 `[capacity, 5]`. Narrow: first entry, number of entries, sequence whose row of the block table is read, first key,
            end key. Wide: the same, but first row, number of rows: rows count heads, row r is query head r % group of entry r // group,
            so that a tile of rows is full whatever the group. Heaviest first; the row tiles of one range are neighbours.
        count: int32 `[1]`, the live items; what lies past them is garbage. Read on the device.
    """

    items: Tensor
    count: Tensor

    @property
    def capacity(self) -> int:
        return self.items.shape[0]


@dataclass(frozen=True)
class Work:
    """What the layers of one forward step share, so that no layer waits for the device.

    A token is a packed row of query; in decode token n is the last one of sequence n. Its end is its position + 1, the number of keys
    that it may see. A token's keys lie in ranges; entry e of an item is one token that attends to the item's range, and writes one
    partial. All tensors are int32 and live on the device.

    Attributes:
        query_lens: new tokens of each sequence (1 in decode), when the work was built.
        seq_lens: tokens of each sequence, the new ones included, when the work was built.
        block_ids: per sequence int64 `[num_blocks]` on the device; torch backend only, else empty.
        table, lens: in place of block_ids for a work that grows, see torch_ops.grow_work: int32 `[num_seqs, columns]` and int64
            `[num_seqs]` on the host, the caller's, who writes to them.
        prefill_tiles: `[num_tiles, 2]`: sequence, first query token inside that sequence. Heaviest first, none empty. They are
            computed without partials.
        tile_q: query tokens of one prefill tile.
        narrow: the items of few rows: private ranges of decode rows, and small shared ones.
        wide: the items of many rows: short extensions of long prefixes, and ranges that many decode rows share.
        entry_tokens: `[num_entries]`, the token of each entry.
        entry_partials: `[num_entries]`, the partial that each entry writes. Those of a token are consecutive, in order of position.
        ends: `[num_tokens]`, the end of each token; None: decode, where seq_lens on the device holds the ends.
        merge_tokens: `[M]`: row merge_tokens[m] of the output is the merge of the partials merge_ranges[m] up to merge_ranges[m + 1].
        merge_ranges: `[M + 1]`; an empty range gives out 0 and lse -inf.
        merge_count: `[1]`, how many of merge_tokens are live.
        num_partials: capacity of the partial buffers.
        storage: 1-d, holds all of the tensors above.
        rebuild_at: per sequence the length from which on the work no longer serves; empty for the torch backend.
        scratch: what a backend keeps for the step, by name; filled by the functions that read the work.
        carried: what the torch backend keeps from one step to the next of the same sequences, each then one token longer; None: nothing.
        round_as_sdpa: torch backend on a CPU, half precision: compute each row in one call and round as
            torch.nn.functional.scaled_dot_product_attention does, rather than once at the end. The LSE is then exact to 1e-4.
    """

    query_lens: list[int]
    seq_lens: list[int]
    block_ids: list[Tensor]
    table: np.ndarray | None = None
    lens: np.ndarray | None = None
    prefill_tiles: Tensor | None = None
    tile_q: int = 0
    narrow: SplitItems | None = None
    wide: SplitItems | None = None
    entry_tokens: Tensor | None = None
    entry_partials: Tensor | None = None
    ends: Tensor | None = None
    merge_tokens: Tensor | None = None
    merge_ranges: Tensor | None = None
    merge_count: Tensor | None = None
    num_partials: int = 0
    storage: Tensor | None = None
    rebuild_at: list[int] = field(default_factory=list)
    scratch: dict[str, Any] = field(default_factory=dict)
    carried: dict[Any, Any] | None = None
    round_as_sdpa: bool = False

    def partials(self, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return the buffers of the partials, fp32 `[num_partials, num_heads, head_dim]` and `[num_partials, num_heads]`.

        The layers of a step share them; the first call for these sizes allocates them.
        """
        buffers = self.scratch.setdefault("partials", {})
        if (num_heads, head_dim) not in buffers:
            assert self.entry_partials is not None, "work without split items has no partials"
            device = self.entry_partials.device
            part_out = torch.empty((self.num_partials, num_heads, head_dim), dtype=torch.float32, device=device)
            buffers[num_heads, head_dim] = part_out, torch.empty(part_out.shape[:2], dtype=torch.float32, device=device)
        return buffers[num_heads, head_dim]


def build_work(
    block_tables: Sequence[Sequence[int]] | np.ndarray,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    phases: Phase | Sequence[Phase],
    backend: Backend,
    layout: Layout | None = None,
    window: int | None = None,
    exact: bool = False,
    capacity: Capacity | None = None,
    into: Work | None = None,
    device: torch.device | str,
) -> Work:
    """Build the work list of one step from host data; nothing is read back from the device.

    Args:
        block_tables: per sequence the ids of the blocks that hold its tokens, and no more; or an int32 array
            `[num_seqs, max_blocks]`, of which what lies past a sequence's end is not looked at (Triton only).
        query_lens: per sequence the number of new tokens, 0 or more; 1 in decode.
        seq_lens: per sequence the number of tokens, the new ones included.
        phases: which attention will run, for all sequences or for each.
        backend: which implementation will run.
        layout: what its kernels prescribe, from configs.layout_for; Triton only.
        window: only that many last keys are seen, a query's own included; None: all. One work serves one window.
        exact: the exact plan: a row's result does not depend on the rest of the batch.
        capacity: sizes of the tensors of a decode step; None: as large as they need to be. A tree of shared runs that does not fit is
            attended to flat.
        into: a work of the same capacity, which is used no more. Its tensors are overwritten, in one copy, and are those of the result:
            addresses and partial buffers stay, so that a captured graph serves the other step.
        device: where the tensors are to live.

    Raises:
        ValueError: lists of different lengths, a decode row whose query_len is not 1, Triton without a layout, a step above its
            capacity, or another capacity than that of `into`.
    """
    num_seqs = len(seq_lens)
    num_phases = num_seqs if isinstance(phases, str) else len(phases)
    if not len(block_tables) == len(query_lens) == num_seqs == num_phases:
        raise ValueError(
            f"build_work: lists must be of one length, got {len(block_tables)} block_tables, "
            f"{len(query_lens)} query_lens, {num_seqs} seq_lens, {num_phases} phases"
        )
    new, lens = np.array(query_lens, dtype=np.int64), np.array(seq_lens, dtype=np.int64)
    decoding = np.array([phase == "decode" for phase in ([phases] if isinstance(phases, str) else phases)], dtype=bool)
    if np.count_nonzero((new != 1) & decoding):
        raise ValueError("build_work: query_lens must all be 1 in decode")
    if backend == "torch":
        block_ids = [torch.tensor(row, dtype=torch.int64, device=device) for row in block_tables]
        return Work(new.tolist(), lens.tolist(), block_ids)
    if layout is None:
        raise ValueError("build_work: the triton backend needs a layout, got None")
    if capacity is not None and phases != "decode":
        raise ValueError("build_work: only a decode step has a capacity, got prompt tokens")
    table, ends = _table(block_tables) if decoding.any() else np.zeros((num_seqs, 0), np.int32), None
    if phases == "decode":
        lists = decode_items(table, lens, layout, window=window, exact=exact)
        if capacity is not None and not capacity.holds(lists):
            lists = decode_items(table, lens, layout, window=window, exact=exact, share=False)
    else:
        lists, ends = mixed_items(table, new, lens, np.broadcast_to(decoding, new.shape), layout, window=window, exact=exact)
    return _upload(new.tolist(), lens.tolist(), lists, ends, layout, capacity, into, device)


def work_from_tensors(
    block_table: Tensor,
    cu_query_lens: Tensor | None,
    seq_lens: Tensor,
    *,
    block_size: int,
    backend: Backend,
    layout: Layout | None = None,
    window: int | None = None,
    exact: bool = False,
) -> Work:
    """Build the work list of one call from its device tensors; waits for the device to read the lengths.

    Args:
        block_table: int32 `[num_seqs, max_blocks]`.
        cu_query_lens: int32 `[num_seqs + 1]`; None: a decode step.
        seq_lens: int32 `[num_seqs]`.
        block_size: tokens per block.
        backend, layout, window, exact: as in build_work.
    """
    lens = seq_lens.tolist()
    borders = list(range(len(lens) + 1)) if cu_query_lens is None else cu_query_lens.tolist()
    query_lens = [end - begin for begin, end in zip(borders[:-1], borders[1:], strict=True)]
    phase: Phase = "decode" if cu_query_lens is None else "prefill"
    table: Sequence[Sequence[int]] | np.ndarray = block_table.cpu().numpy()
    if backend == "torch":
        table = [row[: -(-seq_len // block_size)].tolist() for row, seq_len in zip(table, lens, strict=True)]
    return build_work(
        table,
        query_lens,
        lens,
        phases=phase,
        backend=backend,
        layout=layout,
        window=window,
        exact=exact,
        device=block_table.device,
    )


def _table(block_tables: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
    """Return block tables as an int32 array, rows filled up with -1."""
    if isinstance(block_tables, np.ndarray):
        return np.ascontiguousarray(block_tables, dtype=np.int32)
    table = np.full((len(block_tables), max(map(len, block_tables), default=0)), -1, dtype=np.int32)
    for seq, row in enumerate(block_tables):
        table[seq, : len(row)] = row
    return table


def _upload(
    query_lens: list[int],
    seq_lens: list[int],
    lists: ItemLists,
    ends: np.ndarray | None,
    layout: Layout,
    capacity: Capacity | None,
    into: Work | None,
    device: torch.device | str,
) -> Work:
    """Put item lists on the device in one copy, in tensors as large as the capacity, if there is one, asks for."""
    if capacity is not None and not capacity.holds(lists):
        raise ValueError(f"build_work: capacity must be {Capacity.of(lists)} or more, got {capacity}")
    sizes = capacity or Capacity.of(lists)
    host, pieces, shapes = pack(lists, ends, sizes)
    if into is not None:
        if into.storage is None or into.storage.shape != host.shape or into.num_partials != sizes.num_partials:
            raise ValueError(f"build_work: into must be a work of capacity {sizes}, got one of {into.num_partials} partials")
        into.storage.copy_(torch.from_numpy(host))
        return replace(into, query_lens=query_lens, seq_lens=seq_lens, rebuild_at=lists.rebuild_at.tolist())
    storage = torch.from_numpy(host).to(device)
    views = dict(zip(shapes, storage.split(pieces)[::2], strict=True))
    for name in ("narrow", "wide", "prefill_tiles"):
        views[name] = views[name].view(shapes[name])
    return Work(
        query_lens,
        seq_lens,
        [],
        prefill_tiles=views["prefill_tiles"],
        tile_q=layout.tile_q,
        narrow=SplitItems(views["narrow"], views["narrow_count"]) if shapes["narrow"][0] else None,
        wide=SplitItems(views["wide"], views["wide_count"]) if shapes["wide"][0] else None,
        entry_tokens=views["entry_tokens"],
        entry_partials=views["entry_partials"],
        ends=None if ends is None else views["ends"],
        merge_tokens=views["merge_tokens"],
        merge_ranges=views["merge_ranges"],
        merge_count=views["merge_count"],
        num_partials=sizes.num_partials,
        storage=storage,
        rebuild_at=lists.rebuild_at.tolist(),
    )
