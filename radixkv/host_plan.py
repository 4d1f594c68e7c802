"""`HostDecodePlan`: what `DecodePlan` is on a device, for the torch backend on a CPU."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixkv.decode_plan import columns_for
from radixkv.kernels.work import Work
from radixkv.plan import Phase
from radixkv.sequence import Sequence

if TYPE_CHECKING:
    from radixkv.attention import Backend


class HostDecodePlan:
    """The tensors of the decode steps of some rows, written on from step to step. A step costs the same however long the rows are.

    Args:
        sequences: the rows, each with the token of the first step and the block for it. block_size: tokens per block.
        backend: the torch one.

    Attributes:
        positions, slots: int64 [rows]. block_table: int32 [rows, columns]. seq_lens: int32 [rows]. They are those of the step at hand.
    """

    phase: Phase = "decode"
    source_rows = None

    @torch.inference_mode(False)  # written again by calls that may or may not be in that mode
    def __init__(self, sequences: Seq[Sequence], block_size: int, backend: Backend):
        self._sequences, self._block_size, self._backend = list(sequences), block_size, backend
        self._jumps = [sequence.jumps for sequence in sequences]
        self._table = np.full((len(sequences), columns_for(max(len(sequence.blocks) for sequence in sequences))), -1, dtype=np.int32)
        for row, sequence in enumerate(sequences):
            self._table[row, : len(sequence.blocks)] = sequence.blocks
        last = np.array([sequence.blocks[-1] for sequence in sequences])
        lens = np.array([sequence.num_tokens for sequence in sequences])
        # Rows of one array, so that a step writes them on at once.
        self._counts = np.stack([lens, lens - 1, last * block_size + (lens - 1) % block_size])
        self._lens, positions, self._slots = self._counts
        self._seq_lens = lens.astype(np.int32)
        self.positions, self.slots = torch.from_numpy(positions), torch.from_numpy(self._slots)
        self.block_table, self.seq_lens = torch.from_numpy(self._table), torch.from_numpy(self._seq_lens)
        self._work = backend.growing_work(self._table, self._lens)
        # After how many steps, of a block's worth of them, which rows begin a block.
        self._beginning: dict[int, list[int]] = {}
        for row, num_steps in enumerate((-lens % block_size).tolist()):
            self._beginning.setdefault(num_steps, []).append(row)
        self._num_steps = 0

    def follow(self, sequences: Seq[Sequence]) -> bool:
        """Move on to the next step of the rows, each of which has just got its token and the block for it.

        False: these are other rows, or something else happened to them (a step that failed counts); a new plan must be made.
        """
        if self._sequences != sequences or self._jumps != [sequence.jumps for sequence in sequences]:
            return False
        begun = self._beginning.get(self._num_steps % self._block_size, [])
        if any(len(sequences[row].blocks) > self._table.shape[1] for row in begun):
            return False
        self._num_steps += 1
        self._counts += 1
        self._seq_lens += 1
        for row in begun:
            blocks = sequences[row].blocks
            self._table[row, len(blocks) - 1] = blocks[-1]
            self._slots[row] = blocks[-1] * self._block_size
        self._backend.grow_work(self._work, begun)
        return True

    def work(self, window: int | None) -> Work:
        """The work list, which serves layers of any window."""
        return self._work
