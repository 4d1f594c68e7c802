"""A decode plan moved on from step to step holds what one made anew would hold, and builds work lists only when it must."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.decode_plan import MIN_BLOCKS, DecodePlan, columns_for
from radixkv.kernels import reference
from radixkv.sequence import Sequence

BLOCK_SIZE = 16
GROWTH = 40  # tokens that the stand-in's work lists outlive


class Rows:
    """Sequences that grow, with blocks of their own."""

    def __init__(self, lens: list[int], seed: int):
        self.random = random.Random(seed)
        self.free = list(range(9000))
        self.random.shuffle(self.free)
        self.sequences = []
        for seq_len in lens:
            blocks = [self.free.pop() for _ in range(-(-seq_len // BLOCK_SIZE))]
            self.sequences.append(Sequence(bytearray(4 * seq_len), blocks=blocks))

    def grow(self, rows: list[int] | None = None) -> list[Sequence]:
        chosen = [self.sequences[row] for row in (range(len(self.sequences)) if rows is None else rows)]
        for sequence in chosen:
            if sequence.num_tokens == len(sequence.blocks) * BLOCK_SIZE:
                sequence.blocks.append(self.free.pop())
            sequence.key += b"\1\0\0\0"
        return chosen


def make_plan(num_rows: int, max_blocks: int = MIN_BLOCKS) -> DecodePlan:
    def build_work(table: np.ndarray, lens: np.ndarray, window: int | None, into: Any) -> Any:
        refills = 0 if into is None else into.refills + 1
        return SimpleNamespace(window=window, rebuild_at=(lens + GROWTH).tolist(), refills=refills)

    return DecodePlan(
        num_rows, max_blocks, block_size=BLOCK_SIZE, device=torch.device("cpu"), advance=reference.advance_rows, build_work=build_work
    )


def stand_in(plan: DecodePlan, window: int | None) -> Any:
    return plan.work(window)


def step(plan: DecodePlan, sequences: list[Sequence]) -> None:
    plan.follow(sequences)
    plan.advance()
    plan.work(None)
    plan.commit()


def assert_holds(plan: DecodePlan, sequences: list[Sequence]) -> None:
    lens = [sequence.num_tokens for sequence in sequences]
    empty = plan.num_rows - len(lens)
    assert plan.seq_lens.tolist() == lens + [0] * empty
    assert plan.positions.tolist() == [seq_len - 1 for seq_len in lens] + [0] * empty
    slots = [sequence.blocks[-1] * BLOCK_SIZE + (sequence.num_tokens - 1) % BLOCK_SIZE for sequence in sequences]
    assert plan.slots.tolist() == slots + [-1] * empty
    for row in range(plan.num_rows):
        blocks = sequences[row].blocks if row < len(sequences) else []
        assert plan.block_table[row].tolist() == blocks + [-1] * (plan.max_blocks - len(blocks))


@pytest.mark.parametrize("num_rows", [5, 8], ids=["full", "padded"])
def test_steps_of_the_same_rows(num_rows: int) -> None:
    rows = Rows([1, 15, 16, 17, 100], seed=1)
    plan = make_plan(num_rows)
    addresses = [tensor.data_ptr() for tensor in (plan.positions, plan.slots, plan.seq_lens, plan.block_table)]
    for _ in range(GROWTH):
        sequences = rows.grow()
        step(plan, sequences)
        assert_holds(plan, sequences)
    assert plan.num_builds == 1
    step(plan, rows.grow())
    assert plan.num_builds == 2  # every list was outgrown in that step
    assert stand_in(plan, None).refills == 1
    assert [tensor.data_ptr() for tensor in (plan.positions, plan.slots, plan.seq_lens, plan.block_table)] == addresses


def test_rows_that_end_and_other_batches_in_between() -> None:
    rows, others = Rows([20, 30, 40, 50], seed=2), Rows([33, 7], seed=3)
    plan = make_plan(4)
    for _ in range(60):
        chosen = sorted(rows.random.sample(range(4), rows.random.randint(1, 4)))
        for batch, which in ((rows, chosen), (rows, chosen), (others, [0, 1])):
            sequences = batch.grow(which)
            step(plan, sequences)
            assert_holds(plan, sequences)
            limits = plan.work(None).rebuild_at
            assert all(sequence.num_tokens < limit for sequence, limit in zip(sequences, limits[: len(sequences)], strict=True))


def test_a_step_that_failed_is_not_gone_on_from() -> None:
    rows = Rows([20, 31], seed=4)
    plan = make_plan(2)
    step(plan, rows.grow())
    plan.follow(rows.grow())
    plan.advance()  # and no commit: something raised in a layer
    sequences = rows.grow()
    step(plan, sequences)
    assert_holds(plan, sequences)
    failed_before = rows.grow()
    plan.follow(failed_before)  # raised before anything ran on the device
    sequences = rows.grow()
    step(plan, sequences)
    assert_holds(plan, sequences)


def test_a_work_list_for_each_window() -> None:
    rows = Rows([100], seed=5)
    plan = make_plan(1)
    plan.follow(rows.grow())
    assert plan.work(8) is plan.work(8) is not plan.work(None)
    assert stand_in(plan, 8).window == 8 and plan.num_builds == 2


@pytest.mark.parametrize(("num_blocks", "columns"), [(1, 64), (64, 64), (65, 128), (129, 256)])
def test_tables_have_room_to_grow(num_blocks: int, columns: int) -> None:
    assert columns_for(num_blocks) == columns
