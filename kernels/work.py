"""The work list of one forward step: what a backend needs beside tensors, built once and read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from radixkv.kernels.items import ItemLists, Layout, decode_items, prompt_items

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
class Capacity:
    """Fixed sizes of a work's tensors, for works that are copied into one another's addresses.

    Attributes:
        num_tokens: tokens of the step. num_items: items of either kernel. num_partials: partials and entries.
    """

    num_tokens: int
    num_items: int
    num_partials: int


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
        rebuild_at: per sequence the length from which on the work no longer serves; empty for the torch backend.
        scratch: what a backend keeps for the step, by name; filled by the functions that read the work.
        carried: what the torch backend keeps from one step to the next of the same sequences, each then one token longer; None: nothing.
        round_as_sdpa: torch backend on a CPU, half precision: compute each row in one call and round as
            torch.nn.functional.scaled_dot_product_attention does, rather than once at the end. The LSE is then exact to 1e-4.
    """

    query_lens: list[int]
    seq_lens: list[int]
    block_ids: list[Tensor]
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
        capacity: sizes of the tensors; None: as large as they need to be.
        device: where the tensors are to live.

    Raises:
        ValueError: lists of different lengths, a decode row whose query_len is not 1, or Triton without a layout.
    """
    num_seqs = len(seq_lens)
    phase_list = [phases] * num_seqs if isinstance(phases, str) else list(phases)
    if not len(block_tables) == len(query_lens) == num_seqs == len(phase_list):
        raise ValueError(
            f"build_work: lists must be of one length, got {len(block_tables)} block_tables, "
            f"{len(query_lens)} query_lens, {num_seqs} seq_lens, {len(phase_list)} phases"
        )
    if any(phase == "decode" and query_len != 1 for phase, query_len in zip(phase_list, query_lens, strict=True)):
        raise ValueError("build_work: query_lens must all be 1 in decode")
    if backend == "torch":
        block_ids = [torch.tensor(row, dtype=torch.int64, device=device) for row in block_tables]
        return Work(list(query_lens), list(seq_lens), block_ids)
    if layout is None:
        raise ValueError("build_work: the triton backend needs a layout, got None")
    if any(phase == "decode" for phase in phase_list):
        lists = decode_items(np.zeros((num_seqs, 0), np.int32), np.array(seq_lens), layout, window=window, exact=exact, share=False)
    else:
        lists = prompt_items(np.array(query_lens), np.array(seq_lens), layout, window=window, exact=exact)
    return _upload(list(query_lens), list(seq_lens), lists, layout, device)


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


def _upload(query_lens: list[int], seq_lens: list[int], lists: ItemLists, layout: Layout, device: torch.device | str) -> Work:
    """Put item lists on the device."""

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)

    def split(items: np.ndarray) -> SplitItems | None:
        return SplitItems(put(items), put(np.array([len(items)]))) if len(items) else None

    return Work(
        query_lens,
        seq_lens,
        [],
        prefill_tiles=put(lists.prefill_tiles),
        tile_q=layout.tile_q,
        narrow=split(lists.narrow),
        wide=split(lists.wide),
        entry_tokens=put(lists.entry_tokens),
        entry_partials=put(lists.entry_partials),
        merge_tokens=put(lists.merge_tokens),
        merge_ranges=put(lists.merge_ranges),
        merge_count=put(np.array([len(lists.merge_tokens)])),
        num_partials=lists.num_partials,
        rebuild_at=lists.rebuild_at.tolist(),
    )
