"""The trunk: a walk down a long conversation whose turns were tried more than once looks nothing up, and finds what it would by looking."""

from __future__ import annotations

import random

import pytest

from radixkv.token_key import TOKEN_BYTES, token_key
from radixkv.tree import RadixTree

BLOCK = 4
DEPTH = 50


class Counting(dict):
    """Children that count how often they are looked up."""

    lookups = 0

    def get(self, key, default=None):
        Counting.lookups += 1
        return super().get(key, default)


def conversation(num_siblings: int) -> tuple[RadixTree, bytes]:
    """DEPTH nodes one below the other, each the only one among num_siblings leaves that goes on."""
    tree = RadixTree(BLOCK)
    key = token_key(range(DEPTH * BLOCK))
    tree.insert(key, range(DEPTH))
    for depth in range(DEPTH):
        for other in range(num_siblings):
            tree.insert(key[: depth * BLOCK * TOKEN_BYTES] + token_key([9000 + other] * BLOCK), [*range(depth), 1000 + depth * 10 + other])
    tree.check()
    assert len(tree.nodes()) == 1 + DEPTH * (1 + num_siblings)
    return tree, key


def lookups_of(tree: RadixTree, key: bytes) -> int:
    for node in tree.nodes():
        node.children = Counting(node.children)
    Counting.lookups = 0
    tree.match_prefix(key)
    return Counting.lookups


@pytest.mark.parametrize("num_siblings", [1, 3])
def test_the_trunk_of_a_conversation_is_walked_without_lookups(num_siblings):
    tree, key = conversation(num_siblings)
    assert tree.match_prefix(key).length == DEPTH * BLOCK
    # The last of them has leaves for children, so that there the guess would be no better than a lookup.
    assert lookups_of(tree, key) == 1


@pytest.mark.parametrize("depth", [0, 1, 20, DEPTH - 1])
def test_a_walk_that_leaves_the_trunk_looks_up_once(depth):
    tree, key = conversation(2)
    branch = key[: depth * BLOCK * TOKEN_BYTES] + token_key([9001] * BLOCK)
    match = tree.match_prefix(branch)
    assert match.length == (depth + 1) * BLOCK
    assert match.node is not None and match.node.blocks == [1000 + depth * 10 + 1]
    assert lookups_of(tree, branch) == 1


def test_among_many_siblings_or_two_that_go_on_there_is_none():
    tree, key = conversation(4)
    assert all(node.trunk is None for node in tree.nodes())
    tree, key = conversation(1)
    half = key[: DEPTH // 2 * BLOCK * TOKEN_BYTES] + token_key([9000] * BLOCK)
    for other in (1, 2):
        tree.insert(half + token_key([other] * BLOCK), [*range(DEPTH // 2), 1000 + DEPTH // 2 * 10, 5000 + other])
    tree.check()
    assert lookups_of(tree, key) == 2
    assert tree.match_prefix(half).length == len(half) // TOKEN_BYTES


def test_a_leaf_that_ends_inside_its_first_block_hides_nobody():
    """Its tokens are the beginning of a sibling's, so whoever goes into it because they fit finds less than there is."""
    tree = RadixTree(BLOCK)
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8], [0, 1])
    with tree.lock(tree.match_prefix([1, 2, 3, 4])):
        tree.insert([1, 2, 3, 4, 5, 6], [0, 2])
    for node in tree.nodes():
        assert node.trunk is None or len(node.trunk.edge) >= BLOCK * TOKEN_BYTES
    assert tree.match_prefix([1, 2, 3, 4, 5, 6, 7, 8]).length == 8


@pytest.mark.parametrize("seed", range(4))
def test_a_walk_finds_the_same_with_and_without_a_trunk(seed):
    """Random trees that grow, split and lose leaves: `check` after each operation, and every match as if no node had a trunk."""
    rng = random.Random(seed)
    tree, next_block = RadixTree(BLOCK), 0
    num_trunks = 0
    for _ in range(600):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 60))]
        num_blocks = -(-len(tokens) // BLOCK)
        tree.insert(tokens, range(next_block, next_block + num_blocks))
        next_block += num_blocks
        if rng.random() < 0.4:
            tree.evict(rng.randrange(1, 20))
        tree.check()
        query = [rng.randrange(2) for _ in range(60)]
        found = tree.match_prefix(query)
        trunks = {node: node.trunk for node in tree.nodes() if node.trunk is not None}
        num_trunks += len(trunks)
        for node in trunks:
            node.trunk = None
        assert tree.match_prefix(query)[:1] + tree.match_prefix(query)[5:] == found[:1] + found[5:]
        for node, trunk in trunks.items():
            node.trunk = trunk
    assert num_trunks > 100


def test_a_split_puts_the_upper_half_in_the_place_of_the_trunk():
    tree, key = RadixTree(BLOCK), token_key(range(DEPTH * BLOCK))
    tree.insert(key, range(DEPTH))
    tree.insert(key[: 8 * BLOCK * TOKEN_BYTES] + token_key([9000] * BLOCK), [*range(8), 100])
    tree.insert(key[: 9 * BLOCK * TOKEN_BYTES] + token_key([9000] * BLOCK), [*range(9), 101])
    with tree.lock(tree.match_prefix(key[: 4 * BLOCK * TOKEN_BYTES])):
        tree.check()
        upper = [node for node in tree.nodes() if len(node.blocks) == 4]
        assert len(upper) == 2 and upper[0].trunk is upper[1] and tree.nodes()[0].trunk is upper[0]
        assert tree.match_prefix(key).length == DEPTH * BLOCK
