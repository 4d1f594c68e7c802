"""`StepMaker`: makes the steps of one pool and backend, and keeps what decode steps share from one to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from radixkv.attention import Backend
from radixkv.decode_plan import DecodePlan, columns_for
from radixkv.host_plan import HostDecodePlan
from radixkv.kernels.work import Work
from radixkv.plan import Phase, Plan, StepTokens, assemble, decode_tokens, prompt_tokens
from radixkv.pool import BlockPool
from radixkv.sequence import Sequence
from radixkv.step import HeldStep, Step


class StepMaker:
    """The caller holds a lock; a step may still run inside of another one, from a hook on a layer.

    Args:
        pool: where K/V lives. backend: what runs.
    """

    def __init__(self, pool: BlockPool, backend: Backend):
        self._pool, self._backend = pool, backend
        self._decode_plans: dict[int, DecodePlan] = {}

    @contextmanager
    def prompt(self, sequences: list[Sequence], carried: dict) -> Iterator[Step]:
        """The step of all tokens of the sequences that no row could reuse.

        Args:
            sequences: with block tables for all their tokens. carried: what the torch backend keeps for the steps to come.
        """
        arrays = prompt_tokens(sequences, self._pool.block_size)
        yield Step(self._pool, self._backend, self._assemble("prefill", sequences, arrays, carried))

    @contextmanager
    def decode(self, sequences: list[Sequence], carried: dict, num_rows: int | None) -> Iterator[Step]:
        """The step of the last token of each sequence; arguments as in `prompt`.

        Args:
            num_rows: Triton only: rows of the step's tensors, those past the real ones empty, at addresses that stay for this number.
        """
        if self._backend.name == "triton":
            plan = self._decode_plan(sequences, num_rows)
            plan.follow(sequences)
            plan.in_use = True
            try:
                yield Step(self._pool, self._backend, plan, reuses_outputs=num_rows is not None)
            finally:
                plan.in_use = False
            plan.commit()
        elif len(sequences) == 1 and self._pool.device.type == "cpu":
            yield HeldStep(self._pool, self._backend, sequences[0], carried, partial(self._assemble_decode, sequences, carried))
        elif self._pool.device.type == "cpu":
            yield Step(self._pool, self._backend, self._host_plan(sequences, carried))
        else:
            yield Step(self._pool, self._backend, self._assemble_decode(sequences, carried))

    def _host_plan(self, sequences: list[Sequence], carried: dict) -> HostDecodePlan:
        """The plan of the rows' step before, if it can be moved on, else a new one."""
        plan = carried.get(HostDecodePlan)
        if plan is None or not plan.follow(sequences):
            plan = carried[HostDecodePlan] = HostDecodePlan(sequences, self._pool.block_size, self._backend)
        return plan

    def _assemble_decode(self, sequences: list[Sequence], carried: dict) -> Plan:
        return self._assemble("decode", sequences, decode_tokens(sequences, self._pool.block_size), carried)

    def _assemble(self, phase: Phase, sequences: list[Sequence], arrays: StepTokens, carried: dict) -> Plan:
        tables, seq_lens = [sequence.blocks for sequence in sequences], [sequence.num_tokens for sequence in sequences]

        def build_work(window: int | None) -> Work:
            if phase == "prefill":
                return self._backend.build_prompt_work(tables, arrays.query_lens, seq_lens, window, carried)
            return self._backend.build_decode_work(tables, seq_lens, window, carried=carried)

        return assemble(phase, sequences, arrays, build_work, self._pool.device)

    def _decode_plan(self, sequences: list[Sequence], num_rows: int | None) -> DecodePlan:
        """The plan of so many rows, a new one if there is none that is free and wide enough."""
        columns = columns_for(max(len(sequence.blocks) for sequence in sequences))
        key = len(sequences) if num_rows is None else num_rows
        kept = self._decode_plans.get(key)
        if kept is not None and kept.max_blocks >= columns and not kept.in_use:
            return kept

        def build_work(table: np.ndarray, lens: np.ndarray, window: int | None, into: Work | None) -> Work:
            return self._backend.build_decode_work(table, lens, window, max_len=columns * self._pool.block_size, into=into)

        plan = DecodePlan(
            key,
            columns,
            block_size=self._pool.block_size,
            device=self._pool.device,
            advance=self._backend.advance_rows,
            build_work=build_work,
        )
        if kept is None or not kept.in_use:
            if num_rows is None:  # of any number of rows, so that plans would pile up
                self._decode_plans.clear()
            self._decode_plans[key] = plan
        return plan
