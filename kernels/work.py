"""The work list of one forward step: what a backend needs beside tensors, built once and read by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Phase = Literal["prefill", "decode"]
Backend = Literal["torch", "triton"]


@dataclass(frozen=True)
class Work:
    """What the layers of one forward step share, so that no layer waits for the device.

    Attributes:
        query_lens: new tokens of each sequence (1 in decode).
        seq_lens: tokens of each sequence, the new ones included.
        block_ids: per sequence int64 `[num_blocks]` on the device; torch backend only, else empty.
        prefill_tiles: int32 `[num_tiles, 2]`: sequence, first query token inside that sequence. Heaviest first. Triton prefill only.
        decode_items: int32 `[num_items, 4]`: sequence, first key, end key, partial index. Triton decode only.
        merge_ranges: int32 `[num_seqs + 1]`: the partials of sequence n are merge_ranges[n] up to merge_ranges[n + 1]. Triton decode only.
        tile_q: query tokens of one prefill tile; 0 where there are no prefill tiles.
        chunk: keys of one decode item; 0 where there are no decode items.
        scratch: what a backend keeps for the step, by name; filled by the functions that read the work.
        carried: what the torch backend keeps from one step to the next of the same sequences, each then one token longer; None: nothing.
        round_as_sdpa: torch backend on a CPU, half precision: compute each row in one call and round as
            torch.nn.functional.scaled_dot_product_attention does, rather than once at the end. The LSE is then exact to 1e-4.
    """

    query_lens: list[int]
    seq_lens: list[int]
    block_ids: list[Tensor]
    prefill_tiles: Tensor | None = None
    decode_items: Tensor | None = None
    merge_ranges: Tensor | None = None
    tile_q: int = 0
    chunk: int = 0
    scratch: dict[str, Any] = field(default_factory=dict)
    carried: dict[Any, Any] | None = None
    round_as_sdpa: bool = False


def build_work(
    block_table_rows: list[list[int]],
    query_lens: list[int],
    seq_lens: list[int],
    *,
    phase: Phase,
    backend: Backend,
    tile_q: int,
    chunk: int,
    device: torch.device | str,
) -> Work:
    """Build the work list of one step from host lists; nothing is read back from the device.

    Args:
        block_table_rows: per sequence the ids of the blocks that hold its tokens, and no more.
        query_lens: per sequence the number of new tokens, 0 or more; 1 in decode.
        seq_lens: per sequence the number of tokens, the new ones included.
        phase: which attention will run.
        backend: which implementation will run.
        tile_q: query tokens per prefill tile, from prefill_config.
        chunk: tokens per decode item, from decode_config; borders are at absolute multiples of it.
        device: where the tensors are to live.

    Raises:
        ValueError: lists of different lengths, or a decode step whose query_lens are not all 1.
    """
    if not len(block_table_rows) == len(query_lens) == len(seq_lens):
        raise ValueError(
            f"build_work: lists must be of one length, got {len(block_table_rows)} block_table_rows, "
            f"{len(query_lens)} query_lens, {len(seq_lens)} seq_lens"
        )
    if phase == "decode" and any(query_len != 1 for query_len in query_lens):
        raise ValueError("build_work: query_lens must all be 1 in decode")
    if backend == "torch":
        block_ids = [torch.tensor(row, dtype=torch.int64, device=device) for row in block_table_rows]
        return Work(query_lens, seq_lens, block_ids)
    if phase == "prefill":
        return Work(query_lens, seq_lens, [], prefill_tiles=_prefill_tiles(query_lens, seq_lens, tile_q, device), tile_q=tile_q)
    decode_items, merge_ranges = _decode_items(seq_lens, chunk, device)
    return Work(query_lens, seq_lens, [], decode_items=decode_items, merge_ranges=merge_ranges, chunk=chunk)


def work_from_tensors(
    block_table: Tensor,
    cu_query_lens: Tensor | None,
    seq_lens: Tensor,
    *,
    block_size: int,
    backend: Backend,
    tile_q: int,
    chunk: int,
) -> Work:
    """Build the work list of one call from its device tensors; waits for the device to read the lengths.

    Args:
        block_table: int32 `[num_seqs, max_blocks]`.
        cu_query_lens: int32 `[num_seqs + 1]`; None: a decode step.
        seq_lens: int32 `[num_seqs]`.
        block_size: tokens per block.
        backend, tile_q, chunk: as in build_work.
    """
    lens = seq_lens.tolist()
    borders = list(range(len(lens) + 1)) if cu_query_lens is None else cu_query_lens.tolist()
    query_lens = [end - begin for begin, end in zip(borders[:-1], borders[1:], strict=True)]
    # Triton reads block ids from the table itself, so only the torch backend needs them on the host.
    table = block_table.tolist() if backend == "torch" else [[] for _ in lens]
    rows = [row[: -(-seq_len // block_size)] for row, seq_len in zip(table, lens, strict=True)]
    phase: Phase = "decode" if cu_query_lens is None else "prefill"
    return build_work(
        rows, query_lens, lens, phase=phase, backend=backend, tile_q=tile_q, chunk=chunk, device=block_table.device
    )


def _prefill_tiles(query_lens: list[int], seq_lens: list[int], tile_q: int, device: torch.device | str) -> Tensor:
    """List the (sequence, first query token) of every tile, those with the most keys first."""
    tiles = [
        (seq_len - query_len + min(first + tile_q, query_len), seq, first)
        for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True))
        for first in range(0, query_len, tile_q)
    ]
    tiles.sort(key=lambda tile: -tile[0])
    return torch.tensor([tile[1:] for tile in tiles], dtype=torch.int32).reshape(-1, 2).to(device)


def _decode_items(seq_lens: list[int], chunk: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """List the chunks of every sequence, and where each sequence's partials begin."""
    items: list[tuple[int, int, int, int]] = []
    ranges = [0]
    for seq, seq_len in enumerate(seq_lens):
        items.extend((seq, first, min(first + chunk, seq_len), ranges[-1] + i) for i, first in enumerate(range(0, seq_len, chunk)))
        ranges.append(len(items))
    return (
        torch.tensor(items, dtype=torch.int32).reshape(-1, 4).to(device),
        torch.tensor(ranges, dtype=torch.int32).to(device),
    )
