"""The model of test_tree_fuzz.py driven by hypothesis, which shrinks what it finds; the long run; and allocations that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radixkv.errors import OutOfBlocks
from radixkv.node import Node, Root, SortedKeys
from radixkv.token_key import token_key
from radixkv.tree import RadixTree
from tests.small_cache import BLOCK, ask, keep, small_cache
from tests.test_tree_fuzz import WEIGHTS, Fuzz, shape

RANDOM = st.randoms(use_true_random=False)


class TreeMachine(RuleBasedStateMachine):
    """Tree, pool and brute-force model; hypothesis chooses the operations and everything that is random in them."""

    @initialize(sizes=st.sampled_from([(1, 12, 2), (4, 20, 2), (16, 16, 2)]))
    def start(self, sizes: tuple[int, int, int]) -> None:
        block_size, num_blocks, vocabulary = sizes
        self.fuzz = Fuzz(0, block_size, num_blocks, vocabulary)

    @rule(name=st.sampled_from([name for name in WEIGHTS if name != "clear"]), source=RANDOM)
    def operate(self, name: str, source: Any) -> None:
        self.fuzz.random = source
        getattr(self.fuzz, name)()

    @rule()
    def clear(self) -> None:
        self.fuzz.clear()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "fuzz"):
            self.fuzz.compare()

    def teardown(self) -> None:
        if hasattr(self, "fuzz"):
            self.fuzz.close()


TreeMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


TestTreeMachine = TreeMachine.TestCase


@pytest.mark.parametrize("which", range(12))
def test_a_long_run(which, num_fuzz_operations):
    """`make fuzz` runs 20,000 operations of each, compared with the model after every one, and as many in a replica."""
    block_size, num_blocks, vocabulary = [(1, 32, 2), (4, 40, 2), (4, 20, 3), (16, 32, 2), (2, 64, 3), (16, 48, 5)][which % 6]
    fuzz, replica = (Fuzz(1000 + which, block_size, num_blocks, vocabulary) for _ in range(2))
    fuzz.run(num_fuzz_operations)
    replica.run(num_fuzz_operations)
    assert fuzz.log == replica.log
    assert shape(fuzz.tree) == shape(replica.tree)
    fuzz.close()


class Failing:
    """Stands in for a function or class whose call number `at` finds no memory."""

    def __init__(self, real: Any, at: int) -> None:
        self.real, self.at, self.calls = real, at, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise MemoryError
        return self.real(*args, **kwargs)


def small_tree(tree: RadixTree | None = None) -> RadixTree:
    """A leaf that may grow, one that is leased, a branch inside a block, and another namespace."""
    tree = RadixTree(BLOCK) if tree is None else tree
    tree.insert(range(40), [0, 1, 2])
    tree.insert(range(100, 164), [3, 4, 5, 6])
    tree.insert([*range(100, 140), *range(900, 924)], [3, 4, 7, 8])
    tree.insert(range(40), [9, 10, 11], ("other",))
    return tree


def state(tree: RadixTree) -> list[Any]:
    """What the tree holds, however it is split."""
    paths = sorted((str(path_of(node)), node.path_blocks()) for node in tree.nodes() if not node.children)
    return [tree.num_blocks, tree.num_tokens, tree.num_leased_blocks, tree.num_leases, paths]


def path_of(node: Node | None) -> tuple[tuple, bytes]:
    key = b""
    while not isinstance(node, Root):
        assert node is not None
        key, node = node.edge + key, node.parent
    return node.namespace_key, key


INSERTIONS = {
    "a leaf grows": (range(90), (), 0),
    "a leaf beside others": (range(500, 560), (), 0),
    "below a leaf that is leased": ([*range(32), *range(700, 750)], (), 32),
    "a split": ([*range(116), *range(700, 750)], (), 0),
    "a split inside": ([*range(100, 120), *range(700, 750)], (), 0),
    "a new namespace": (range(40), ("new",), 0),
    "what is known": (range(20), (), 0),
}


@pytest.mark.parametrize(
    "place", [(Node, "__init__"), (Root, "__init__"), (Node, "path_blocks")], ids=["node", "root", "path"]
)
@pytest.mark.parametrize(("tokens", "namespace", "leased"), INSERTIONS.values(), ids=INSERTIONS)
def test_an_insertion_that_finds_no_memory_changes_nothing(monkeypatch, place, tokens, namespace, leased):
    """The caller still owns its blocks then, so that the tree must not have one of them, and must be whole."""
    blocks = list(range(50, 50 - (-len(tokens) // BLOCK)))
    failed, at = True, 0
    while failed:
        at += 1
        tree = small_tree()
        lease = tree.lock(tree.match_prefix(tokens, limit=leased))
        before = state(tree)
        with monkeypatch.context() as patch:
            # A function, because an object in a class would not be bound to its instances.
            failing = Failing(getattr(*place), at)
            patch.setattr(*place, lambda *args, failing=failing: failing(*args))
            try:
                tree.insert(tokens, blocks, namespace)
                failed = False
            except MemoryError:
                assert state(tree) == before
        tree.check()
        if failed:
            tree.insert(tokens, blocks, namespace)
            tree.check()
        assert tree.match_prefix(tokens, namespace).length == len(tokens)
        lease.release()
        tree.clear()
        assert tree.nodes() == []


@pytest.mark.parametrize("error", [MemoryError, OutOfBlocks, KeyboardInterrupt], ids=lambda error: error.__name__)
@pytest.mark.parametrize("owner", ["pool", "cache"])
def test_requests_whose_allocation_fails_lose_nothing(monkeypatch, owner, error):
    """Every other call of BlockPool.allocate or PrefixCache.allocate fails; the request is then asked again."""
    cache = small_cache(num_blocks=24)
    target = cache.pool if owner == "pool" else cache
    failing = EveryOther(target.allocate, error)
    monkeypatch.setattr(target, "allocate", failing)
    refused = 0
    for turn in range(60):
        tokens = [*range(turn % 7 * 100, turn % 7 * 100 + 20), *range(1000, 1000 + turn)]
        for _ in range(3):
            cached = cache.tree.num_blocks
            try:
                keep(cache, tokens) if turn % 3 else ask(cache, tokens)
                break
            except error:
                refused += 1
                cache.check()
                # What was evicted to make room is gone; nothing else is, and nobody holds anything.
                assert cache.tree.num_leased_blocks == 0
                assert cache.tree.num_blocks + cache.pool.num_free == cache.pool.num_blocks and cache.tree.num_blocks <= cached
        cache.check()
        with cache.match_prefix(tokens) as lease:
            assert lease.length == len(tokens)
    assert failing.calls > 60 and (refused > 20 or error is OutOfBlocks)


class EveryOther:
    """Stands in for a function of which every other call fails."""

    def __init__(self, real: Callable[[int], list[int]], error: type[BaseException]) -> None:
        self.real, self.error, self.calls = real, error, 0

    def __call__(self, num_blocks: int) -> list[int]:
        self.calls += 1
        if self.calls % 2:
            raise self.error
        return self.real(num_blocks)


def test_sorted_keys_that_were_removed_come_back():
    """A removed key is only noted at first; added again it is there once, and as a neighbour it is passed over."""
    keys = SortedKeys(token_key([i]) for i in range(100))
    for i in range(40, 60):
        keys.remove(token_key([i]))
    assert keys.neighbours(token_key([59])) == [token_key([39]), token_key([60])]
    keys.remove(token_key([39]))
    keys.add(token_key([39]))
    for i in (45, 50):
        keys.add(token_key([i]))
    assert keys.to_list() == sorted(token_key([i]) for i in (*range(40), 45, 50, *range(60, 100)))
    assert keys.neighbours(token_key([50])) == [token_key([50]), token_key([60])]
