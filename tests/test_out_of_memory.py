"""Python's own allocator fails, once, at each allocation that an operation makes: the tree is whole, and as it was before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from radixkv.token_key import token_key
from radixkv.tree import RadixTree
from tests.test_tree_stateful import BLOCK, INSERTIONS, small_tree, state

# CPython's own means for this; a build may leave it out.
testcapi = pytest.importorskip("_testcapi")
MAX_ALLOCATIONS = 2000


def fails_at(number: int, operation: Callable[[], Any]) -> bool:
    """Runs an operation whose allocation of that number finds no memory; whether it got that far."""
    testcapi.set_nomemory(number, number + 1)
    try:
        operation()
    except MemoryError:
        return True
    finally:
        testcapi.remove_mem_hooks()
    return False


class Failures:
    """Each allocation that an operation makes, to fail in turn, until several numbers in a row were never reached.

    An allocation or two that fail may go unnoticed, as those that only make something faster; hence several.

    Attributes:
        number: of the allocation whose turn it is.
    """

    def __init__(self, num_unnoticed: int = 5) -> None:
        self.number = self._num_unnoticed = 0
        self._enough = num_unnoticed

    def __iter__(self) -> Iterator[Failures]:
        while self._num_unnoticed < self._enough:
            self.number += 1
            assert self.number < MAX_ALLOCATIONS
            yield self

    def fail(self, operation: Callable[[], Any]) -> bool:
        """Run the operation; whether the allocation failed and was noticed."""
        failed = fails_at(self.number, operation)
        self._num_unnoticed = 0 if failed else self._num_unnoticed + 1
        return failed

    def was_noticed(self) -> None:
        """The operation told in its own way."""
        self._num_unnoticed = 0


def tree_of(eviction: str) -> RadixTree:
    tree = RadixTree(BLOCK, eviction)
    small_tree(tree)
    return tree


@pytest.mark.parametrize("eviction", ["lru", "slru", "priority"])
@pytest.mark.parametrize(("tokens", "namespace", "leased"), INSERTIONS.values(), ids=INSERTIONS)
def test_an_insertion(eviction, tokens, namespace, leased):
    """Its caller still owns the blocks then; a tree that had them too would give them away twice."""
    key, blocks = token_key(tokens), list(range(50, 50 - (-len(tokens) // BLOCK)))
    priority = 3 if eviction == "priority" else None
    failures = Failures()
    for failure in failures:
        tree = tree_of(eviction)
        lease = tree.lock(tree.match_prefix(key, limit=leased))
        before, counted = state(tree), (tree.history.num_insertions, tree.history.stored_tokens)
        if failure.fail(lambda: tree.insert(key, blocks, namespace, priority)):  # noqa: B023 - called at once
            assert state(tree) == before
            assert (tree.history.num_insertions, tree.history.stored_tokens) == counted
            tree.check()
            tree.insert(key, blocks, namespace, priority)
        tree.check()
        assert tree.match_prefix(key, namespace).length == len(tokens)
        lease.release()
        tree.clear()
        assert tree.nodes() == []
    assert failures.number > 20


@pytest.mark.parametrize("eviction", ["lru", "slru", "priority"])
@pytest.mark.parametrize("length", [5, 16, 20, 64], ids=lambda length: f"{length} tokens")
def test_a_lease_that_splits(eviction, length):
    """A hold that was counted but that nobody has would keep its blocks for ever."""
    failures = Failures()
    for failure in failures:
        tree = tree_of(eviction)
        match = tree.match_prefix(range(100, 164), limit=length)
        before = state(tree)
        leases: list[Any] = []
        if failure.fail(lambda: leases.append(tree.lock(match))):  # noqa: B023 - called at once
            leases.clear()
            assert state(tree) == before
        else:
            assert tree.num_leases == 1 and tree.num_leased_blocks == -(-length // BLOCK)
        tree.check()
        leases.clear()
        assert tree.num_leased_blocks == 0
        tree.check()
        tree.clear()
        assert tree.nodes() == []
    assert failures.number > 5


@pytest.mark.parametrize("eviction", ["lru", "slru", "priority"])
@pytest.mark.parametrize("is_leased", [False, True])
def test_a_leaf_that_is_filled(eviction, is_leased):
    """Its tokens are counted if and only if it has them."""
    short, longer = token_key(range(2 * BLOCK + 3)), token_key(range(3 * BLOCK))
    failures = Failures()
    for failure in failures:
        tree = RadixTree(BLOCK, eviction)
        tree.insert(short, [1, 2, 3])
        lease = tree.lock(tree.match_prefix(short)) if is_leased else None
        before, counted = state(tree), (tree.history.num_insertions, tree.history.stored_tokens)
        if failure.fail(lambda: tree.fill_block(longer, 3)):  # noqa: B023 - called at once
            assert state(tree) == before
            assert (tree.history.num_insertions, tree.history.stored_tokens) == counted
            tree.check()
            tree.fill_block(longer, 3)
        tree.check()
        assert tree.match_prefix(longer).length == 3 * BLOCK and tree.blocks() == [1, 2, 3]
        if lease is not None:
            lease.release()
        tree.check()
    assert failures.number > 10


def test_a_part_of_a_lease():
    for failure in Failures():
        tree = RadixTree(BLOCK)
        tree.insert(range(5 * BLOCK), [1, 2, 3, 4, 5])
        lease, parts = tree.lock(tree.match_prefix(range(4 * BLOCK + 2))), []
        before = state(tree)
        if failure.fail(lambda: parts.append(lease.beginning(2 * BLOCK))):  # noqa: B023 - called at once
            parts.clear()
            assert state(tree) == before
        tree.check()
        lease.release()
        assert tree.num_leased_blocks == (2 if parts else 0)
        parts.clear()
        assert tree.num_leased_blocks == 0
        tree.check()


@pytest.mark.parametrize("eviction", ["lru", "slru", "lfu", "cost"])
@pytest.mark.parametrize("num_wanted", [1, 9, None], ids=["a block", "several leaves", "clear"])
def test_an_eviction(eviction, num_wanted):
    """Ids that had left the tree when memory ran out were told to nobody, and so lost to the pool."""
    for failure in Failures():
        tree = tree_of(eviction)
        everything = set(tree.blocks())
        given_up: list[list[int]] = [[]]

        def evict(tree=tree, given_up=given_up) -> None:
            given_up[0] = tree.clear() if num_wanted is None else tree.evict(num_wanted)

        failed = failure.fail(evict)
        tree.check()
        gone = given_up[0]
        assert set(tree.blocks()) | set(gone) == everything and len(tree.blocks()) + len(gone) == len(everything)
        assert not (failed and gone)
        counted = tree.history.evicted_blocks if num_wanted is not None else 0
        assert counted == (0 if num_wanted is None else len(gone))
        if len(gone) < (len(everything) if num_wanted is None else num_wanted):
            failure.was_noticed()
        tree.clear()
        assert tree.nodes() == []


@pytest.mark.parametrize("eviction", ["lru", "slru", "lfu", "cost"])
def test_the_return_of_a_lease(eviction):
    """A release that found no memory was forgotten, and its blocks were held for ever."""
    for number in range(1, 40):
        tree = tree_of(eviction)
        for tokens in (range(100, 164), range(20), range(100, 120)):
            tree.lock(tree.match_prefix(tokens)).release()
        fails_at(number, tree.holds.take_in)
        assert tree.num_leases == 0 and tree.num_leased_blocks == 0
        tree.check()


def test_many_children_and_their_sorted_keys():
    """The sorted keys split a bucket, or come to be, in the middle of an insertion."""
    for num_siblings in (1, 2, 1024, 1025):
        siblings = [token_key([i] * BLOCK) for i in range(num_siblings)]
        for failure in Failures(3):
            tree = RadixTree(BLOCK)
            for i, key in enumerate(siblings):
                tree.insert(key, [i])
            before = tree.num_blocks
            new = token_key([900_000] * BLOCK)
            if failure.fail(lambda: tree.insert(new, [900_000])):  # noqa: B023 - called at once
                assert tree.num_blocks == before
                tree.check()
                tree.insert(new, [900_000])
            tree.check()
            assert tree.match_prefix(new).length == BLOCK
