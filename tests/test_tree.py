"""What a tree gives up, what shape it has, and what its namespaces and its `check` tell apart."""

from __future__ import annotations

import inspect
import random
import subprocess
import sys

import pytest

from radixkv.node import SortedKeys
from radixkv.tree import RadixTree, token_key
from tests.calls import count_calls
from tests.small_tree import BLOCK, Ids, crowd, lock, tokens

# Eviction


def test_evicting_one_block_of_a_long_leaf_frees_one_block(tree, ids):
    tree.insert(tokens(32_000), ids(32_000))
    assert tree.evict(1) == [1999]
    assert tree.evict(16) == list(range(1998, 1982, -1))
    assert (tree.num_blocks, tree.num_tokens, tree.evicted_tokens) == (1983, 1983 * BLOCK, 17 * BLOCK)
    assert tree.match_prefix(tokens(32_000)).length == 1983 * BLOCK


def test_a_partly_filled_block_counts_its_tokens(tree, ids):
    tree.insert(tokens(21), ids(21))
    assert tree.evict(1) == [1]
    assert tree.evicted_tokens == 5 and tree.num_tokens == 16


def test_the_least_recently_used_goes_first(tree, ids):
    prompts = [tokens(32, first) for first in (0, 100, 200, 300)]
    blocks = [tree.insert(prompt, ids(32)).blocks for prompt in prompts]
    lock(tree, prompts[0]).release()
    tree.insert(prompts[1], ids(32))
    for expected in (2, 3, 0, 1):
        assert tree.evict(2) == blocks[expected][::-1]


def test_recency_moves_for_exactly_the_blocks_that_were_used(tree, ids):
    """The start of an old leaf was used again, its end was not: the end is older than what came in between."""
    tree.insert(tokens(64), ids(64))
    tree.insert(tokens(32, first=100), ids(32))
    lock(tree, tokens(64), limit=20).release()
    assert tree.evict(99) == [3, 2, 5, 4, 1, 0]


def test_a_parent_is_as_recent_as_its_most_recently_used_child(tree, ids):
    """The child keeps its parent alive; when the child goes, the parent goes next, unless it was itself used since."""
    parent, child = tokens(16), tokens(16) + [7] * 16
    for used_since in (False, True):
        with lock(tree, parent):
            kept = tree.insert(child, ids(32)).blocks
        others = [tree.insert(tokens(16, first=first), ids(16)).blocks[0] for first in (500, 600)]
        tree.insert(child, ids(32))
        last = tree.insert(tokens(16, first=700), ids(16)).blocks[0]
        if used_since:
            lock(tree, parent).release()
        order = [tree.evict(1)[0] for _ in range(5)]
        assert order == others + ([kept[1], last, kept[0]] if used_since else [kept[1], kept[0], last])


def test_clear_gives_up_everything_but_leases_and_is_not_counted_as_evicted(tree, ids):
    tree.insert(tokens(64), ids(64))
    tree.insert(tokens(32) + [1] * 64, ids(96))
    tree.insert(tokens(64), ids(64), ("other",))
    with lock(tree, tokens(20)) as lease:
        assert len(tree.clear()) == 12 - 2
        assert sorted(tree.blocks()) == sorted(lease.blocks)
    assert sorted(tree.clear()) == [0, 1]
    assert tree.evicted_tokens == 0
    assert tree.nodes() == []


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_evicting_nothing_evicts_nothing(tree, ids, num_blocks):
    tree.insert(tokens(64), ids(64))
    assert tree.evict(num_blocks) == []


def test_eviction_does_not_look_at_the_other_leaves():
    """The calls that evicting 64 blocks makes, Python's and C's, are the same among 1,000 leaves and among 100,000."""
    small, large = count_calls(crowd(1_000).evict, 64), count_calls(crowd(100_000).evict, 64)
    assert small > 64
    assert large <= small * 1.05


def test_exposed_parents_do_not_pile_up_in_the_queue(tree, ids):
    """A node that is a leaf by eviction and then used again leaves an entry behind; those come up and go."""
    prompt = tokens(16)
    for i in range(20):
        tree.insert(tokens(16, first=1000 * i + 5000), ids(16))
    tree.insert(prompt, ids(16))
    for _ in range(2000):
        with lock(tree, prompt):
            tree.insert(prompt + [9] * 16, ids(32))
            tree.evict(0)
        for leaf in tree.queue.nodes()[:-1]:
            tree.queue.touch(leaf)
        assert len(tree.evict(1)) == 1
        lock(tree, prompt).release()
    assert len(tree.queue._exposed) < 200


# Shape


def test_a_chain_of_5000_nodes_needs_no_recursion(ids):
    """A long chat with a lease on every turn is a chain of nodes; no operation may descend it by calling itself."""
    tree = RadixTree(BLOCK)
    key = token_key(tokens(5000 * BLOCK))
    tree.insert(key, ids(5000 * BLOCK))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 60)
    try:
        leases = [lock(tree, key, limit=(5000 - i) * BLOCK) for i in range(5000)]
        assert len(tree.nodes()) == 5001
        assert leases[0].blocks == list(range(5000))
        longer = key + token_key([1] * 20)
        assert tree.insert(longer, [*range(5000), 7000, 7001]).first_adopted == 5000
        assert tree.match_prefix(longer).length == 5000 * BLOCK + 20
        tree.check()
        assert tree.evict(99) == [7001, 7000]
        for lease in leases:
            lease.release()
        tree.check()
        assert tree.evict(10) == list(range(4999, 4989, -1))
        assert len(tree.clear()) == 4990
        tree.check()
    finally:
        sys.setrecursionlimit(limit)


def test_nodes_hold_their_own_blocks_only(tree, ids):
    """Thousands of thin leaves under a long prefix do not each pin a copy of it."""
    prefix = tokens(32_000)
    tree.insert(prefix, ids(32_000))
    for i in range(500):
        tree.insert(prefix[:31_984] + [100_000 + i] * BLOCK, list(range(1999)) + [10_000 + i])
    assert sum(len(node.blocks) for node in tree.nodes()) == tree.num_blocks == 2500
    assert sum(len(node.edge) for node in tree.nodes()) == 4 * tree.num_tokens == 4 * BLOCK * 2500


def test_sorted_keys_agree_with_a_sorted_list():
    rng = random.Random(1)
    keys, plain = SortedKeys([]), []
    for _ in range(20_000):
        key = rng.randbytes(3)
        if rng.random() < 0.7 and key not in keys.neighbours(key)[:1]:
            keys.add(key)
            plain.append(key)
        elif plain:
            index = rng.randrange(len(plain))
            plain[index], plain[-1] = plain[-1], plain[index]
            keys.remove(plain.pop())
    plain.sort()
    assert keys.to_list() == plain and len(plain) > 5000
    for _ in range(200):
        key = rng.randbytes(3)
        before, after = [k for k in plain if k <= key][-1:], [k for k in plain if k > key][:1]
        assert keys.neighbours(key) == before + after
    for key in plain:
        keys.remove(key)
    assert keys.to_list() == [] and keys.neighbours(b"x") == []


# Namespaces


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param((), ("",), id="none and empty"),
        pytest.param(("ab", "c"), ("a", "bc"), id="same when joined"),
        pytest.param(("a/b",), ("a", "b"), id="separator inside"),
        pytest.param(("a", ("b",)), ("a", "b"), id="nested"),
        pytest.param((("a", "b"),), (("a",), "b"), id="nested elsewhere"),
        pytest.param((1,), (True,), id="1 and True"),
        pytest.param((1,), (1.0,), id="1 and 1.0"),
        pytest.param((("scale", 1),), (("scale", 1.0),), id="nested 1 and 1.0"),
        pytest.param((1,), ("1",), id="1 and '1'"),
        pytest.param((None,), ("None",), id="None and 'None'"),
        pytest.param(("base",), ("adapter", "base"), id="base and adapter"),
        pytest.param(("a",), (b"a",), id="text and bytes"),
        pytest.param(((int, 1),), (1,), id="crafted to look like the inner form"),
    ],
)
def test_nothing_crosses_namespaces(tree, ids, one, other):
    tree.insert(tokens(40), ids(40), one)
    assert tree.match_prefix(tokens(40), other).length == 0
    assert tree.match_prefix(tokens(40), one).length == 40
    inserted = tree.insert(tokens(40), ids(40), other)
    assert (inserted.blocks, inserted.first_adopted) == ([3, 4, 5], 0)
    with lock(tree, tokens(40), other) as lease:
        assert lease.namespace == other and lease.blocks == [3, 4, 5]
        assert sorted(tree.clear()) == [0, 1, 2]


def test_an_emptied_namespace_leaves_nothing_behind(tree, ids):
    for version in range(100):
        tree.insert(tokens(40), ids(40), ("weights", version))
        tree.evict(99)
    assert tree.nodes() == []


@pytest.mark.parametrize("namespace", ["adapter", ["adapter"], None, 3])
def test_a_namespace_must_be_a_tuple(tree, namespace):
    with pytest.raises(ValueError, match="namespace must be a tuple"):
        tree.match_prefix([1], namespace)
    with pytest.raises(ValueError, match="namespace must be a tuple"):
        tree.insert([1], [0], namespace)


# check() itself


def test_check_finds_what_is_broken():
    def broken(damage) -> None:
        tree, ids = RadixTree(BLOCK), Ids()
        tree.insert(tokens(64), ids(64))
        tree.insert(tokens(32) + [1] * 40, ids(72))
        lease = lock(tree, tokens(64), limit=40)
        tree.check()
        damage(tree)
        with pytest.raises(AssertionError):
            tree.check()
        del lease

    def node_ending_with(tree: RadixTree, token: int):
        return next(node for node in tree.nodes() if node.edge.endswith(token_key([token])))

    broken(lambda tree: node_ending_with(tree, 1).blocks.append(999))
    broken(lambda tree: node_ending_with(tree, 1).blocks.__setitem__(0, 0))
    broken(lambda tree: setattr(node_ending_with(tree, 31), "locks", 0))
    broken(lambda tree: setattr(node_ending_with(tree, 63), "locks", 1))
    broken(lambda tree: setattr(node_ending_with(tree, 1), "edge", token_key(tokens(40))))
    broken(lambda tree: setattr(node_ending_with(tree, 1), "parent", None))
    broken(lambda tree: setattr(tree.forest, "num_blocks", 3))
    broken(lambda tree: setattr(tree.holds, "num_blocks", 0))
    broken(lambda tree: setattr(tree.forest, "num_bytes", 0))
    broken(lambda tree: tree.queue.discard(node_ending_with(tree, 1)))
    broken(lambda tree: tree.queue.add(node_ending_with(tree, 31)))
    broken(lambda tree: tree.nodes()[0].children.clear())


# Making one


def test_the_tree_imports_neither_torch_nor_kernels():
    code = (
        "import sys, types; package = types.ModuleType('radixkv'); package.__path__ = ['radixkv']; sys.modules['radixkv'] = package\n"
        "import radixkv.tree; assert 'torch' not in sys.modules and 'triton' not in sys.modules\n"
        "assert radixkv.tree.RadixTree(16).match_prefix([1, 2]).length == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("block_size", [0, -16, 3, 24])
def test_block_size_must_be_a_power_of_two(block_size):
    with pytest.raises(ValueError, match="block_size must be a power of two"):
        RadixTree(block_size)
