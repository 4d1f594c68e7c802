"""`DecodePlan`: what the decode steps of a batch share on the device, moved on from step to step instead of built anew."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from radixkv.kernels.work import Work
from radixkv.plan import Phase
from radixkv.sequence import Sequence

# Columns of the block table come in powers of two from here, so that a growing row seldom asks for another table.
MIN_BLOCKS = 64

BuildDecodeWork = Callable[[np.ndarray, np.ndarray, int | None, Work | None], Work]


class DecodePlan:
    """The tensors of the decode steps of up to num_rows rows, at addresses that stay.

    A step of the same rows, each one token longer, costs one launch, and a small copy to the device where a block begins. Work lists are
    built when rows come or go, and when a row outgrows them.

    Args:
        num_rows: rows at most; those that a step does not use are empty.
        max_blocks: columns of the block table.
        block_size: tokens per block.
        device: where the tensors are.
        advance: the backend's `advance_rows`.
        build_work: makes the work list of (block table [num_rows, max_blocks], lengths [num_rows], window), always of one capacity, in the
            tensors of the work that it is given besides, if any.

    Attributes:
        positions, slots: int64 [num_rows]. block_table: int32 [num_rows, max_blocks]. seq_lens: int32 [num_rows], 0 in an empty row. They
            are those of a step after `advance`.
        works: the work lists in use, by window; their tensors stay where they are too.
        num_builds: work lists built so far. in_use: whether a step is running on it.
    """

    phase: Phase = "decode"
    source_rows = None

    @torch.inference_mode(False)  # written again by calls that may or may not be in that mode
    def __init__(
        self,
        num_rows: int,
        max_blocks: int,
        *,
        block_size: int,
        device: torch.device,
        advance: Callable[..., None],
        build_work: BuildDecodeWork,
    ):
        self.num_rows, self.max_blocks, self.block_size = num_rows, max_blocks, block_size
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.slots = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.block_table = torch.full((num_rows, max_blocks), -1, dtype=torch.int32, device=device)
        self._flat_table = self.block_table.view(-1)
        self.works: dict[int | None, Work] = {}
        self.num_builds = 0
        self.in_use = False
        self._advance_rows, self._build_work = advance, build_work
        # What the device holds, as the host knows it.
        self._table = np.full((num_rows, max_blocks), -1, dtype=np.int32)
        self._lens = np.zeros(num_rows, dtype=np.int32)
        self._sequences: list[Sequence] = []
        self._jumps: list[int] = []
        self._ready = False
        self._stale = False
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.inference_mode(False)
    def follow(self, sequences: Seq[Sequence]) -> None:
        """Make ready for the next step of these rows, each of which has just got its token and the block for it.

        Until `commit` the plan counts as lost: a step that fails makes the next one start from the rows.
        """
        jumps = [sequence.jumps for sequence in sequences]
        if self._ready and self._sequences == list(sequences) and self._jumps == jumps:
            self._append_blocks()
            self._lens[: len(sequences)] += 1
        else:
            self._load(sequences)
        self._ready, self._jumps = False, jumps
        for window, work in self.works.items():
            if self._stale or bool((self._lens >= np.array(work.rebuild_at)).any()):
                self.works[window] = self._build(window, work)
        self._stale = False

    def advance(self) -> None:
        """On the device: append a token to every row. Nothing here depends on the host."""
        self._advance_rows(self.positions, self.seq_lens, self.slots, self.block_table, self.block_size)

    def commit(self) -> None:
        """The step is done; the next one may go on from it."""
        self._ready = True

    @torch.inference_mode(False)
    def work(self, window: int | None) -> Work:
        """The work list of the layers with this window."""
        if window not in self.works:
            self.works[window] = self._build(window, None)
        return self.works[window]

    @torch.inference_mode(False)
    def outputs(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers for out, like query [num_rows, num_heads, head_dim], and lse; each layer overwrites what the one before wrote."""
        if self._outputs is None or self._outputs[0].shape != query.shape:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            self._outputs = out, torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        return self._outputs

    def _load(self, sequences: Seq[Sequence]) -> None:
        self._sequences = list(sequences)
        self._table.fill(-1)
        self._lens.fill(0)
        for row, sequence in enumerate(sequences):
            self._table[row, : len(sequence.blocks)] = sequence.blocks
            self._lens[row] = sequence.num_tokens
        self.block_table.copy_(torch.from_numpy(self._table))
        self.seq_lens.copy_(torch.from_numpy(np.maximum(self._lens - 1, 0)))  # advance() adds the new token
        self._stale = True

    def _append_blocks(self) -> None:
        lens = self._lens[: len(self._sequences)]
        rows = np.flatnonzero(lens % self.block_size == 0)
        if not len(rows):
            return
        entries = rows * self.max_blocks + lens[rows] // self.block_size
        sequences = self._sequences
        blocks = np.array([sequences[row].blocks[-1] for row in rows.tolist()], dtype=np.int32)
        self._table.reshape(-1)[entries] = blocks
        where, what = torch.from_numpy(entries), torch.from_numpy(blocks)
        self._flat_table.index_copy_(0, where.to(self._flat_table.device), what.to(self._flat_table.device))

    def _build(self, window: int | None, into: Work | None) -> Work:
        self.num_builds += 1
        return self._build_work(self._table, self._lens, window, into)


def columns_for(num_blocks: int) -> int:
    """The columns of a block table that has room for rows of num_blocks blocks, and to grow."""
    return max(MIN_BLOCKS, 1 << (num_blocks - 1).bit_length())
