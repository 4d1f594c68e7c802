"""`Plan`: the tensors of one forward step, built once on the host and read by every layer. For steps that follow one another on the
device see decode_plan.py."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from radixkv.kernels.work import Work
from radixkv.sequence import TOKEN_BYTES, Sequence

Phase = Literal["prefill", "decode"]
BuildWork = Callable[[int | None], Work]


@dataclass(frozen=True)
class Plan:
    """What one packed forward step computes, where it is stored, and what it attends to.

    T tokens of N sequences are packed, one sequence after another. A step of prompt tokens is "prefill", of generated ones "decode".

    Attributes:
        phase: which kernel the step's rows take.
        token_ids, positions: int64 [T].
        slots: int64 [S], where K and V rows go, S >= T. source_rows: int32 [S], the packed row that goes to each slot; None when S = T and
            row i goes to slots[i].
        cu_query_lens: int32 [N + 1]. block_table: int32 [N, B], -1 past the end. seq_lens: int32 [N], this step's tokens included.
        starts: packed row at which each sequence begins, on the host.
        build_work: makes the kernels' work lists for one window, when the first layer with it asks. works: what it made, by window.
    """

    phase: Phase
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    source_rows: torch.Tensor | None
    cu_query_lens: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    starts: list[int]
    build_work: BuildWork
    works: dict[int | None, Work] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    def work(self, window: int | None) -> Work:
        """The work list of the layers with this window."""
        if window not in self.works:
            self.works[window] = self.build_work(window)
        return self.works[window]


@dataclass(frozen=True)
class StepTokens:
    """The host arrays of a step: one packed row per token to compute, and the further slots some rows are stored to."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    source_rows: np.ndarray | None
    query_lens: list[int]


def prompt_tokens(sequences: Seq[Sequence], block_size: int) -> StepTokens:
    """The tokens of a step of prompts: of each sequence all from hit_len on, and the slots of what rows compute for each other."""
    query_lens = [sequence.num_tokens - sequence.hit_len for sequence in sequences]
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    token_ids, positions, slots, extra_slots, extra_rows = [], [], [], [], []
    for sequence in sequences:
        table = np.array(sequence.blocks, dtype=np.int64)
        own = np.arange(sequence.hit_len, sequence.num_tokens)
        token_ids.append(np.frombuffer(sequence.key, dtype="<i4", offset=TOKEN_BYTES * sequence.hit_len))
        positions.append(own)
        slots.append(table[own // block_size] * block_size + own % block_size)
        for run in sequence.shared_runs:
            # What lies in a block shared with the row that computes it is stored there by that row.
            covered = np.arange(run.start, run.end)
            copied = covered[(covered < sequence.first_shared * block_size) | (covered >= sequence.first_private * block_size)]
            extra_slots.append(table[copied // block_size] * block_size + copied % block_size)
            extra_rows.append(starts[run.row] + copied - sequences[run.row].hit_len)
    source_rows = None
    if any(map(len, extra_slots)):
        source_rows = np.concatenate([np.arange(starts[-1]), *extra_rows]).astype(np.int32)
        slots += extra_slots
    return StepTokens(
        np.concatenate(token_ids).astype(np.int64), np.concatenate(positions), np.concatenate(slots), source_rows, query_lens
    )


def decode_tokens(sequences: Seq[Sequence], block_size: int) -> StepTokens:
    """The tokens of a decode step: the last one of each sequence."""
    positions = np.array([sequence.num_tokens - 1 for sequence in sequences], dtype=np.int64)
    blocks = np.array([sequence.blocks[-1] for sequence in sequences], dtype=np.int64)
    last = b"".join([sequence.key[-TOKEN_BYTES:] for sequence in sequences])
    token_ids = np.frombuffer(last, dtype="<i4").astype(np.int64)
    return StepTokens(token_ids, positions, blocks * block_size + positions % block_size, None, [1] * len(sequences))


def assemble(phase: Phase, sequences: Seq[Sequence], step: StepTokens, build_work: BuildWork, device: torch.device) -> Plan:
    """Put a step's host arrays on the device, with the block table and lengths of its sequences.

    Args:
        phase: "prefill" or "decode".
        sequences: N rows whose block tables cover all their tokens.
        step: the arrays of `prompt_tokens` or `decode_tokens` for these sequences.
        build_work: makes the work list of these sequences for one window.
        device: where the tensors go.
    """
    tables = [sequence.blocks for sequence in sequences]
    block_table = np.full((len(tables), max(map(len, tables))), -1, dtype=np.int32)
    for row, blocks in enumerate(tables):
        block_table[row, : len(blocks)] = blocks
    cu_query_lens = np.zeros(len(sequences) + 1, dtype=np.int32)
    np.cumsum(step.query_lens, out=cu_query_lens[1:])

    def upload(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Plan(
        phase=phase,
        token_ids=upload(step.token_ids),
        positions=upload(step.positions),
        slots=upload(step.slots),
        source_rows=None if step.source_rows is None else upload(step.source_rows),
        cu_query_lens=upload(cu_query_lens),
        block_table=upload(block_table),
        seq_lens=upload(np.array([sequence.num_tokens for sequence in sequences], dtype=np.int32)),
        starts=cu_query_lens[:-1].tolist(),
        build_work=build_work,
    )
