"""Namespaces that were retired: what they hold goes before everything else, under any policy."""

from __future__ import annotations

import pytest

from radixkv.tree import RadixTree
from tests.eviction_oracle import BLOCK, NAMES


def stored(tree: RadixTree, namespace: tuple, block: int) -> None:
    tree.insert([block] * BLOCK, [block], namespace)


@pytest.mark.parametrize("name", NAMES)
def test_stale_namespaces_go_first(name):
    tree = RadixTree(BLOCK, name)
    stored(tree, ("new",), 0)
    for block in (1, 2):
        stored(tree, ("old", 1), block)
    stored(tree, ("old", 2), 3)
    tree.retire(("old",))
    tree.check()
    stored(tree, ("new",), 4)
    stored(tree, ("old", 1), 5)  # late, and as stale as the rest
    tree.check()
    assert tree.match_prefix([2] * BLOCK, ("old", 1)).length == BLOCK
    assert sorted(tree.evict(4)) == [1, 2, 3, 5]
    assert sorted(tree.evict(9)) == [0, 4]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_leased_when_it_becomes_stale_goes_first_once_it_is_released(name):
    tree = RadixTree(BLOCK, name)
    tree.insert([1] * 3 * BLOCK, [0, 1, 2], ("old",))
    stored(tree, ("new",), 7)
    lease = tree.lock(tree.match_prefix([1] * 2 * BLOCK, ("old",)))
    tree.retire(())
    stored(tree, ("newer",), 8)
    assert sorted(tree.evict(2)) == [2, 7]
    tree.check()
    lease.release()
    tree.check()
    assert tree.evict(2) == [1, 0]
    tree.check()
    stored(tree, ("old",), 3)  # emptied before, and so as fresh as any
    assert tree.evict(1) == [8]
    tree.check()


def test_retiring_a_namespace_retires_no_look_alike():
    tree = RadixTree(BLOCK)
    for block, namespace in enumerate([(1,), (True,), ((1,),), (1, 2)]):
        stored(tree, namespace, block)
    tree.retire((1,))
    assert sorted(tree.blocks()) == [0, 1, 2, 3]
    assert {node.blocks[0] for node in tree.stale_nodes()} == {0, 3}


def test_nothing_is_refused_or_tied_when_a_namespace_is_retired_twice():
    tree = RadixTree(BLOCK)
    for block in range(3):
        stored(tree, ("old",), block)
    tree.retire(("old",))
    tree.retire(("old",))
    tree.retire(("never heard of",))
    tree.check()
    assert tree.evict(3) == [0, 1, 2]
