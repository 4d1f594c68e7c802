"""Eviction policies: each against an oracle that keeps every use and sorts, and what a user sees of them."""

from __future__ import annotations

import pytest

import radixkv
from radixkv.eviction_queue import HeapQueue
from radixkv.tree import RadixTree
from tests.calls import count_calls
from tests.eviction_oracle import BLOCK, NAMES, Driver, Oracle
from tests.models import tiny_qwen2
from tests.small_tree import crowd


@pytest.mark.parametrize("name", NAMES)
def test_every_choice_is_that_of_an_oracle_that_sorts(name):
    for seed in range(3):
        oracles: list[Oracle] = []

        def maker(block_size: int, oracles=oracles) -> Oracle:
            oracles.append(Oracle(block_size, name))
            return oracles[0]

        driver = Driver(seed, maker, takes_priority=name == "priority")
        for _ in range(1500):
            driver.step(lambda tree, num_blocks: tree.evict(num_blocks))
            driver.tree.check()
        assert oracles[0].num_choices > 500


@pytest.mark.parametrize("name", NAMES)
def test_many_blocks_at_once_are_those_that_would_go_one_by_one(name):
    gone: list[list[int]] = [[], []]

    def at_once(tree: RadixTree, num_blocks: int) -> None:
        gone[0] += tree.evict(num_blocks)

    def one_by_one(tree: RadixTree, num_blocks: int) -> None:
        for _ in range(num_blocks):
            gone[1] += tree.evict(1)

    drivers = [Driver(5, name, takes_priority=name == "priority") for _ in range(2)]
    for _ in range(2500):
        for driver, evict in zip(drivers, (at_once, one_by_one), strict=True):
            driver.step(evict)
    assert gone[0] == gone[1]
    assert len(gone[0]) > 500


@pytest.mark.parametrize("name", NAMES)
def test_leased_blocks_never_go(name):
    tree = RadixTree(BLOCK, name)
    tree.insert(range(12), [0, 1, 2])
    tree.insert(range(50, 62), [3, 4, 5])
    with tree.lock(tree.match_prefix(range(7))) as lease:
        assert lease.blocks == [0, 1]
        assert sorted(tree.evict(99)) == [2, 3, 4, 5]
        assert tree.evict(99) == []
    assert tree.evict(99) == [1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_of_evicting_does_not_grow_with_the_leaves(name):
    small, large = (count_calls(crowd(num_leaves, name).evict, 64) for num_leaves in (500, 20_000))
    assert small > 64
    assert large <= 1.05 * small


@pytest.mark.parametrize("name", ["lfu", "fifo", "priority", "cost"])
def test_old_entries_do_not_pile_up(name):
    tree = RadixTree(BLOCK, name)
    for i in range(20):
        tree.insert([i] * BLOCK, [i])
    for i in range(5000):
        tree.lock(tree.match_prefix([i % 20] * BLOCK)).release()
    tree.check()
    assert isinstance(tree.queue, HeapQueue) and len(tree.queue._heap) <= 2 * 20 + 64 + 1


# What each policy is for


def prompts_of(tree: RadixTree, *firsts: int) -> None:
    for first in firsts:
        tree.insert([first] * BLOCK, [first])


def use(tree: RadixTree, first: int, times: int = 1) -> None:
    for _ in range(times):
        tree.lock(tree.match_prefix([first] * BLOCK)).release()
        assert tree.num_leases == 0


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("lru", [2, 1, 3, 0]),
        ("lfu", [2, 3, 0, 1]),
        ("fifo", [0, 1, 2, 3]),
        ("slru", [2, 1, 3, 0]),  # two of four may be protected; 1 was pushed out of them when 3 was used, and 2 never was in
        ("priority", [2, 1, 3, 0]),
        ("cost", [2, 3, 0, 1]),
    ],
)
def test_the_same_uses_and_six_orders(name, order):
    tree = RadixTree(BLOCK, name)
    prompts_of(tree, 0, 1, 2, 3)
    for first, times in ((1, 8), (3, 1), (0, 2)):
        use(tree, first, times)
    assert tree.evict(9) == order


def test_slru_keeps_what_was_reused_from_what_never_was():
    """A scan of prompts that nobody repeats pushes out everything under LRU, and under SLRU only itself."""
    kept = {}
    for name in ("lru", "slru"):
        tree = RadixTree(BLOCK, name)
        prompts_of(tree, *range(10))
        for first in range(4):
            use(tree, first)
        for first in range(100, 140):
            tree.evict(1)
            prompts_of(tree, first)
        kept[name] = [first for first in range(10) if tree.match_prefix([first] * BLOCK).length]
    assert kept == {"lru": [], "slru": [0, 1, 2, 3]}


def test_priorities():
    tree = RadixTree(BLOCK, "priority")
    for first, priority in ((0, 5), (1, None), (2, -3), (3, 5)):
        tree.insert([first] * BLOCK, [first], priority=priority)
    lease = tree.lock(tree.match_prefix([1] * BLOCK), priority=7)
    assert lease.priority == lease.clone().priority == 7
    lease.release()
    tree.insert([3] * BLOCK, [9], priority=4)
    assert tree.evict(9) == [2, 3, 0, 1]


def test_a_prefix_has_the_highest_priority_of_what_was_below_it():
    tree = RadixTree(BLOCK, "priority")
    tree.insert([1] * BLOCK + [2] * BLOCK, [0, 1], priority=-2)
    tree.insert([1] * BLOCK + [3] * BLOCK, [0, 2], priority=-1)
    prompts_of(tree, 9)
    assert tree.evict(9) == [1, 2, 0, 9]


@pytest.mark.parametrize("priority", [True, 1.5, "high"])
def test_a_priority_is_an_int(priority):
    tree = RadixTree(BLOCK, "priority")
    with pytest.raises(ValueError, match="priority must be an int"):
        tree.insert([1], [0], priority=priority)
    assert tree.nodes() == []


def test_a_priority_that_nothing_would_heed_is_refused():
    tree = RadixTree(BLOCK)
    tree.insert([1], [0])
    with pytest.raises(ValueError, match="eviction='priority'"):
        tree.lock(tree.match_prefix([1]), priority=1)
    with pytest.raises(ValueError, match="eviction='priority'"):
        tree.insert([2], [1], priority=1)
    assert (tree.num_blocks, tree.num_leases) == (1, 0)


def test_cost_prefers_to_lose_few_tokens_and_shallow_ones():
    tree = RadixTree(BLOCK, "cost")
    tree.insert([1] * BLOCK, [0])
    tree.insert([2], [1])
    tree.insert([3] * BLOCK * 5000, range(10, 5010))
    assert tree.evict(1) == [1]
    assert tree.evict(1) == [0]
    assert tree.evict(2) == [5009, 5008]


@pytest.mark.parametrize("eviction", ["LRU", "", None, 3])
def test_a_wrong_name_lists_the_right_ones(eviction):
    for make in (lambda: RadixTree(BLOCK, eviction), lambda: radixkv.patch_model(tiny_qwen2(), eviction=eviction)):
        with pytest.raises(ValueError, match="'lru', 'lfu', 'fifo', 'slru', 'priority', 'cost'"):
            make()
