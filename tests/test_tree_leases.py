"""Leases: what they protect, and how they end."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest

from radixkv.tree import RadixTree, token_key
from tests.small_tree import BLOCK, counters, lock, tokens


@pytest.mark.parametrize(("length", "num_held"), [(1, 1), (15, 1), (16, 1), (17, 2), (64, 4), (79, 5), (80, 5)])
def test_a_lease_protects_exactly_the_matched_blocks(tree, ids, length, num_held):
    tree.insert(tokens(80), ids(80))
    with lock(tree, tokens(80), limit=length) as lease:
        tree.check()
        assert lease.length == length
        assert lease.blocks == list(range(num_held))
        assert lease.tokens == token_key(tokens(length))
        assert (tree.num_leased_blocks, tree.num_evictable_blocks) == (num_held, 5 - num_held)
        assert sorted(tree.evict(99)) == list(range(num_held, 5))
        assert tree.evict(1) == []
        tree.check()
        assert tree.match_prefix(tokens(80)).length == min(80, num_held * BLOCK)
    assert tree.num_leased_blocks == 0
    assert len(tree.evict(99)) == num_held


def test_lock_and_release_change_no_counter(tree, ids):
    for first in (0, 200, 400):
        tree.insert(tokens(100, first), ids(100))
    tree.insert(tokens(50) + [9] * 50, ids(100))
    before = counters(tree)
    for prompt, limit in [(tokens(100), None), (tokens(100), 20), (tokens(50) + [9] * 50, 55), (tokens(30, 200), None), ([3], None)]:
        lease = lock(tree, prompt, limit=limit)
        assert counters(tree) != before or not lease.length
        lease.release()
        assert counters(tree) == before
        tree.check()


def test_overlapping_leases_are_counted_once_and_released_in_any_order(tree, ids):
    tree.insert(tokens(160), ids(160))
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        leases = [lock(tree, tokens(160), limit=limit) for limit in (40, 100, 160)]
        left = {0: 3, 1: 7, 2: 10}
        for index in order:
            assert tree.num_leased_blocks == max(left.values())
            leases[index].release()
            del left[index]
            tree.check()
        assert tree.num_leased_blocks == 0


def test_a_lease_survives_a_split_of_the_node_that_it_holds(tree, ids):
    tree.insert(tokens(160), ids(160))
    lease = lock(tree, tokens(160))
    tree.insert(tokens(70) + [5] * 30, ids(100))
    shorter = lock(tree, tokens(20))
    tree.check()
    assert lease.blocks == list(range(10))
    tree.evict(99)
    assert tree.match_prefix(tokens(160)).length == 160
    lease.release()
    tree.evict(99)
    assert sorted(tree.blocks()) == shorter.blocks == [0, 1]
    shorter.release()


def test_a_clone_is_a_hold_of_its_own(tree, ids):
    tree.insert(tokens(40), ids(40))
    lease = lock(tree, tokens(40))
    clone = lease.clone()
    lease.release()
    assert tree.num_leased_blocks == 3 and tree.num_leases == 1
    assert (clone.length, clone.blocks, clone.namespace, clone.tokens) == (40, [0, 1, 2], (), token_key(tokens(40)))
    clone.release()
    assert tree.num_leased_blocks == 0


def test_a_lease_of_nothing_is_fine(tree):
    lease = lock(tree, tokens(10))
    assert (lease.length, lease.blocks, lease.tokens, lease.released) == (0, [], b"", False)
    clone = lease.clone()
    lease.release()
    clone.release()
    with pytest.raises(RuntimeError):
        lease.release()
    assert tree.num_leases == 0


@pytest.mark.parametrize(
    "use", [lambda lease: lease.release(), lambda lease: lease.clone(), lambda lease: lease.blocks], ids=["release", "clone", "blocks"]
)
def test_a_lease_used_after_its_release_says_so(tree, ids, use):
    tree.insert(tokens(40), ids(40))
    lease = lock(tree, tokens(40))
    lease.release()
    assert lease.released
    with pytest.raises(RuntimeError, match="this lease of 40 tokens was released before"):
        use(lease)
    assert tree.num_leased_blocks == 0


def test_a_lease_is_released_on_the_way_out_of_a_with_block(tree, ids):
    tree.insert(tokens(40), ids(40))
    with pytest.raises(KeyError), lock(tree, tokens(40)) as lease:
        raise KeyError
    assert lease.released and tree.num_leased_blocks == 0
    with lock(tree, tokens(40)) as lease:
        lease.release()
    assert tree.num_leased_blocks == 0


def test_leases_that_are_dropped_come_back_by_themselves(tree, ids):
    tree.insert(tokens(40), ids(40))
    for _ in range(1000):
        lock(tree, tokens(40))
    assert tree.num_leases == 0
    cycle: list = [lock(tree, tokens(40))]
    cycle.append(cycle)
    assert tree.num_leased_blocks == 3
    del cycle
    gc.collect()
    assert tree.num_leased_blocks == 0


def test_a_lease_cannot_be_copied_behind_the_trees_back(tree, ids):
    """A copy would give back a hold that was never taken."""
    tree.insert(tokens(40), ids(40))
    with lock(tree, tokens(40)) as lease:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="use clone"):
                attempt(lease)


def test_lent_leases_are_released_when_the_last_borrower_gives_them_back(tree, ids):
    tree.insert(tokens(40), ids(40))
    lease = lock(tree, tokens(40))
    lease.lend()
    lease.lend()
    lease.give_back()
    assert not lease.released
    lease.give_back()
    assert lease.released
    with lock(tree, tokens(40)) as lease:
        lease.lend()
        lease.give_back()
        assert not lease.released


def test_a_match_made_stale_is_looked_up_again(tree, ids):
    tree.insert(tokens(80), ids(80))
    found = tree.match_prefix(tokens(100))
    tree.evict(2)
    with tree.lock(found) as lease:
        assert lease.length == 48 and lease.blocks == [0, 1, 2]
    found = tree.match_prefix(tokens(100), limit=30)
    tree.insert(tokens(100), ids(100))
    with tree.lock(found) as lease:
        assert lease.length == 30 and lease.blocks == [0, 1]
    found = tree.match_prefix(tokens(100))
    tree.clear()
    with tree.lock(found) as lease:
        assert lease.length == 0


def test_rows_of_a_batch_may_all_be_matched_before_they_are_locked(tree, ids):
    """The first lock splits the node that the other matches point to."""
    tree.insert(tokens(160), ids(160))
    limits = [100, 30, 160, 64, 100]
    found = [tree.match_prefix(tokens(160), limit=limit) for limit in limits]
    leases = [tree.lock(match) for match in found]
    for lease, limit in zip(leases, limits, strict=True):
        assert lease.length == limit
        assert lease.blocks == list(range(-(-limit // BLOCK)))
    assert tree.num_leased_blocks == 10


def test_a_match_of_another_tree_is_refused(tree):
    with pytest.raises(ValueError, match="another tree"):
        tree.lock(RadixTree(BLOCK).match_prefix([1]))


def test_forks_are_leases_of_their_own_until_the_scope_ends(tree, ids):
    tree.insert(tokens(70), ids(70))
    with lock(tree, tokens(70)) as lease:
        first, second, third, *others = lease.fork(5)
        assert all((fork.length, fork.blocks, fork.namespace) == (70, lease.blocks, lease.namespace) for fork in (first, second, third))
        first.release()
        with pytest.raises(RuntimeError, match="released before"):
            first.release()
        del others
        lease.release()
        assert tree.evict(99) == [] and tree.num_leased_blocks == 5, "the forks hold it without the lease"
        with second:
            deeper = second.fork(1)[0]
        assert second.released and deeper.released and not third.released
    assert third.released and tree.num_leased_blocks == 0
    tree.check()
    assert len(tree.evict(99)) == 5


def test_forks_outside_of_a_scope_come_back_by_themselves(tree, ids):
    tree.insert(tokens(40), ids(40))
    lease = lock(tree, tokens(40))
    forks = lease.fork(3)
    lease.release()
    tree.match_prefix(tokens(40))
    assert tree.num_leased_blocks == 3
    wrongs: list[Any] = [0, -1, 2.0, True]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="num_forks must be an int of at least 1"):
            forks[0].fork(wrong)
    with pytest.raises(RuntimeError, match="released before"):
        lease.fork(2)
    del forks
    tree.match_prefix(tokens(40))
    assert tree.num_leased_blocks == 0
    tree.check()
