"""How long ranges are: both ways to measure a list agree, the bounds are kept, and cuts are even."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.kernels.ranges import Demand, Kernel, _measure, _measure_many, choose_length, cut

NARROW = Kernel(num_kv_heads=4, slots=396, tile=64, key_time=1.0, item_time=92.0, partial_time=0.28)


def random_demand(rng: np.random.Generator, num_pieces: int) -> Demand:
    tiles, copies, stretches = (rng.integers(1, most, num_pieces).tolist() for most in (400, 5, 3))
    entries = [number * int(rng.integers(1, 20)) for number in copies]
    return Demand(tiles, entries, copies, stretches, least=256)


@pytest.mark.parametrize("num_pieces", [1, 2, 7, 64])
@pytest.mark.parametrize("slots", [24, 264, 396, 660])
def test_pieces_measured_one_by_one_and_together_are_the_same(num_pieces: int, slots: int) -> None:
    rng = np.random.default_rng(num_pieces)
    for _ in range(30):
        kernel = NARROW._replace(slots=slots, num_kv_heads=int(rng.integers(1, 9)))
        demand, lengths = random_demand(rng, num_pieces), sorted(set(rng.integers(1, 400, 12).tolist()))
        np.testing.assert_allclose(_measure(kernel, demand, lengths), _measure_many(kernel, demand, lengths), rtol=1e-12)


def test_a_slot_takes_the_first_unit_of_each_round() -> None:
    """16 slots and 2 heads, 8 items a round: of 10 items of 5 tiles and 10 of 3, slot 0 runs the first, the ninth and the 17th."""
    kernel = NARROW._replace(slots=16, num_kv_heads=2)
    demand = Demand(tiles=[3, 5], entries=[10, 10], copies=[10, 10], stretches=[1, 1], least=64)
    assert _measure(kernel, demand, [5]) == [(13.0, 3, 20, 20)]


def test_alike_pieces_listed_once_are_chosen_for_as_if_listed_each() -> None:
    rng = np.random.default_rng(0)
    for number in (2, 3, 17):
        once = random_demand(rng, 3)
        each = Demand(once.tiles * number, once.entries * number, once.copies * number, once.stretches * number, once.least)
        together = once._replace(entries=[x * number for x in once.entries], copies=[x * number for x in once.copies])
        assert choose_length(NARROW, together) == choose_length(NARROW, each)


def test_bounds_are_kept_and_partials_come_first() -> None:
    demand = Demand([128], [8], [8], [1], least=256)
    fine, coarse = (choose_length(NARROW, demand._replace(**bound)) for bound in ({"least_programs": 800}, {"most_partials": 20.0}))
    assert -(-128 // fine) * 8 * 4 >= 800 and -(-128 // coarse) * 8 <= 20
    assert choose_length(NARROW, demand._replace(least_programs=800, most_partials=1.0)) == 128
    assert choose_length(NARROW, Demand([], [], [], [], least=256)) == 4


def test_cuts_are_even_and_skip_empty_pieces() -> None:
    firsts, ends, counts = np.array([0, 64, 80, 0, 0]), np.array([0, 64, 1000, 500, 0]), np.array([0, 0, 3, 2, 0])
    pieces, numbers, begins, range_ends, lasts = cut(firsts, ends, counts, 64)
    assert pieces.tolist() == [2, 2, 2, 3, 3] and numbers.tolist() == [0, 1, 2, 0, 1] and lasts.tolist() == [2, 4]
    assert list(zip(begins.tolist(), range_ends.tolist(), strict=True)) == [(80, 384), (384, 704), (704, 1000), (0, 256), (256, 500)]
