"""The radix tree, rule by rule. (Whether the rules hold together is in test_tree_fuzz.py.)"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from radixkv.node import SortedKeys
from radixkv.tree import Lease, RadixTree, token_key

BLOCK = 16


def tokens(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


class Ids:
    """Fresh block ids, never the same twice."""

    def __init__(self) -> None:
        self.next = 0

    def __call__(self, num_tokens: int, block_size: int = BLOCK) -> list[int]:
        start, self.next = self.next, self.next - (-num_tokens // block_size)
        return list(range(start, self.next))


@pytest.fixture
def ids() -> Ids:
    return Ids()


@pytest.fixture
def tree():
    tree = RadixTree(BLOCK)
    yield tree
    tree.check()


def lock(tree: RadixTree, prompt, namespace: tuple = (), limit: int | None = None) -> Lease:
    return tree.lock(tree.match_prefix(prompt, namespace, limit))


def counters(tree: RadixTree) -> tuple[int, ...]:
    return tree.num_blocks, tree.num_leased_blocks, tree.num_evictable_blocks, tree.num_tokens, tree.evicted_tokens, tree.num_leases


# Keys


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([1, 2, 300], id="list"),
        pytest.param((1, 2, 300), id="tuple"),
        pytest.param(np.array([1, 2, 300]), id="int64 array"),
        pytest.param(np.array([1, 2, 300], dtype=np.uint16), id="uint16 array"),
        pytest.param(np.array([1, 0, 2, 0, 300, 0])[::2], id="strided array"),
        pytest.param(np.array([1, 2, 300], dtype=">i4"), id="big-endian array"),
        pytest.param(torch.tensor([1, 2, 300]), id="int64 tensor"),
        pytest.param(torch.tensor([1, 2, 300], dtype=torch.int32), id="int32 tensor"),
        pytest.param([np.int64(1), 2, torch.tensor(300)], id="list of scalars"),
        pytest.param(b"\x01\0\0\0\x02\0\0\0\x2c\x01\0\0", id="key"),
    ],
)
def test_token_key_is_little_endian_int32(given):
    assert token_key(given) == b"\x01\0\0\0\x02\0\0\0\x2c\x01\0\0"


def test_token_key_takes_the_whole_range_of_ids_and_no_tokens():
    assert token_key([0, 1, 2**31 - 1]) == b"\0\0\0\0\x01\0\0\0\xff\xff\xff\x7f"
    assert token_key(range(3)) == token_key([0, 1, 2])
    assert token_key([]) == token_key(()) == token_key(torch.tensor([], dtype=torch.int64)) == b""


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([3, -1], id="negative"),
        pytest.param(np.array([3, -1]), id="negative in an array"),
        pytest.param([2**31], id="2**31"),
        pytest.param([2**70], id="2**70"),
        pytest.param(np.array([2**32 + 1]), id="would wrap around"),
        pytest.param(np.array([2**63], dtype=np.uint64), id="uint64"),
        pytest.param([1.0, 2.0], id="floats"),
        pytest.param(np.array([1.0]), id="float array"),
        pytest.param(torch.tensor([1.0]), id="float tensor"),
        pytest.param(torch.tensor([1.0], dtype=torch.bfloat16), id="bfloat16 tensor"),
        pytest.param([5, True], id="bool in a list"),
        pytest.param([False, 5], id="False in a list"),
        pytest.param(np.array([True]), id="bool array"),
        pytest.param(torch.tensor([True]), id="bool tensor"),
        pytest.param([[1, 2]], id="2-D list"),
        pytest.param(np.array([[1, 2]]), id="2-D array"),
        pytest.param(torch.tensor([[1, 2]]), id="2-D tensor"),
        pytest.param(torch.tensor(3), id="0-D tensor"),
        pytest.param(b"\0\0\0", id="a key that cuts a token"),
        pytest.param("12", id="str"),
        pytest.param({1, 2}, id="set"),
        pytest.param(None, id="None"),
        pytest.param([None], id="list of None"),
    ],
)
def test_token_key_refuses_what_are_not_token_ids(given):
    with pytest.raises(ValueError, match="token_key"):
        token_key(given)


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


# Match


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 1000, 9000])
def test_a_match_is_exact_to_the_token_wherever_it_ends(tree, ids, length):
    prompt = tokens(10_000)
    tree.insert(prompt, ids(10_000))
    assert tree.match_prefix(prompt[:length] + tokens(500, first=50_000)).length == length
    assert tree.match_prefix(prompt[:length]).length == length
    assert tree.match_prefix(prompt, limit=length).length == length


def test_tokens_that_differ_in_one_bit_do_not_match(tree, ids):
    """One bit in any byte of any token of the block ends the match at that token."""
    tree.insert([7] * BLOCK, ids(BLOCK))
    for position in range(BLOCK):
        for bit in range(31):
            prompt = [7] * BLOCK
            prompt[position] ^= 1 << bit
            assert tree.match_prefix(prompt).length == position


@pytest.mark.parametrize("bit", [0, 8, 16, 30])
@pytest.mark.parametrize("position", [0, 1, 16, 32, 64, 1024, 1600])
def test_a_token_that_differs_in_a_high_byte_only_is_no_part_of_the_match(tree, ids, position, bit):
    """Its first bytes are equal; at a block border they must not drag in the next block."""
    stored = tokens(2000)
    tree.insert(stored, ids(2000))
    prompt = stored[:position] + [stored[position] ^ 1 << bit] + [1] * 100
    with lock(tree, prompt) as lease:
        assert lease.length == position
        assert lease.blocks == list(range(-(-position // BLOCK)))
    inserted = tree.insert(prompt, ids(len(prompt)))
    assert inserted.first_adopted == position // BLOCK
    assert tree.match_prefix(prompt).length == len(prompt) and tree.match_prefix(stored).length == 2000
    tree.check()


def test_the_longest_of_several_partial_matches_is_found(tree, ids):
    """Siblings that share a part of a block are neighbours in the sorted keys, whatever lies between in the dict."""
    rng = random.Random(0)
    stored = [tuple(rng.randrange(3) for _ in range(rng.randint(1, 40))) for _ in range(2000)]
    for prompt in stored:
        tree.insert(prompt, ids(len(prompt)))
    for _ in range(200):
        prompt = tuple(rng.randrange(3) for _ in range(30))
        longest = max(
            next((i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), min(30, len(other))) for other in stored
        )
        assert tree.match_prefix(prompt).length == longest


def test_match_changes_nothing_recency_included(tree, ids):
    old, new = tokens(48), tokens(48, first=100)
    old_blocks, _ = tree.insert(old, ids(48)).blocks, tree.insert(new, ids(48)).blocks
    before = counters(tree)
    stamps = [node.stamp for node in tree.nodes()]
    for limit in (None, 0, 5, 20, 48):
        tree.match_prefix(old, limit=limit)
        tree.match_prefix(old, ("nowhere",), limit)
    assert counters(tree) == before
    assert [node.stamp for node in tree.nodes()] == stamps
    assert tree.evict(3) == old_blocks[::-1]


def test_a_colliding_hash_cannot_serve_other_tokens(tree, ids):
    """If the lookup of a child returned the wrong one, as with a hash that is constant and trusted, tokens are still compared."""

    class Colliding(dict):
        def get(self, key, default=None):
            return next(iter(self.values()), default)

    tree.insert(tokens(64), ids(64))
    root = tree.nodes()[0]
    root.children = Colliding(root.children)
    assert tree.match_prefix(tokens(64, first=500)).length == 0
    assert tree.match_prefix(tokens(8) + tokens(64, first=500)).length == 8
    assert tree.match_prefix(tokens(64)).length == 64


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_of_nothing_matches_nothing(tree, ids, limit):
    tree.insert(tokens(16), ids(16))
    assert tree.match_prefix(tokens(16), limit=limit).length == 0


# Insert


def test_insert_adopts_only_what_is_new(tree, ids):
    first = tree.insert(tokens(48), ids(48))
    assert (first.blocks, first.first_adopted, first.replaced) == ([0, 1, 2], 0, [])
    other = tokens(32) + tokens(40, first=900)
    second = tree.insert(other, ids(72))
    assert (second.blocks, second.first_adopted, second.replaced) == ([0, 1, 5, 6, 7], 2, [])
    again = tree.insert(other, ids(72))
    assert (again.blocks, again.first_adopted, again.replaced) == ([0, 1, 5, 6, 7], 5, [])
    assert sorted(tree.blocks()) == [0, 1, 2, 5, 6, 7]
    assert tree.num_tokens == 48 + 40


def test_insert_does_not_keep_or_change_the_list_that_it_was_given(tree):
    blocks = [5, 6, 7]
    inserted = tree.insert(tokens(48), blocks)
    inserted.blocks.clear()
    blocks.clear()
    assert sorted(tree.blocks()) == [5, 6, 7]


@pytest.mark.parametrize("num_blocks", [0, 2, 4])
def test_another_number_of_blocks_is_refused(tree, num_blocks):
    with pytest.raises(ValueError, match="40 tokens fill 3 blocks of 16"):
        tree.insert(tokens(40), list(range(num_blocks)))
    assert tree.num_blocks == 0


def test_an_empty_sequence_is_fine(tree):
    assert tree.insert([], []) == ([], 0, [])
    assert tree.match_prefix([]).length == 0
    assert tree.nodes() == []


def test_two_branches_may_share_a_part_of_a_block(tree, ids):
    left, right = tokens(40) + [1000] * 24, tokens(40) + [2000] * 24
    tree.insert(left, ids(64))
    inserted = tree.insert(right, ids(64))
    assert inserted.first_adopted == 2
    assert inserted.blocks == [0, 1, 6, 7]
    assert tree.match_prefix(left).length == tree.match_prefix(right).length == 64
    assert tree.match_prefix(tokens(40) + [3000]).length == 40


def test_a_chat_that_grows_stays_one_edge(tree, ids):
    """Turn by turn a leaf grows in place, its partly filled last block being replaced: no node per turn."""
    length = 0
    blocks: list[int] = []
    for turn in range(128):
        length += 37
        with lock(tree, tokens(length)) as lease:
            assert lease.length == length - 37
            kept = lease.blocks[: lease.length // BLOCK]
        inserted = tree.insert(tokens(length), kept + ids(length - len(kept) * BLOCK))
        partial = (length - 37) % BLOCK
        assert inserted.replaced == ([blocks[-1]] if turn and partial else [])
        blocks = inserted.blocks
        tree.check()
    assert len(tree.nodes()) == 2
    assert tree.num_tokens == length
    assert sorted(tree.blocks()) == sorted(blocks)


def test_a_partly_filled_tail_inside_the_first_block_grows_too(tree, ids):
    tree.insert(tokens(5), ids(5))
    inserted = tree.insert(tokens(9), ids(9))
    assert (inserted.blocks, inserted.first_adopted, inserted.replaced) == ([1], 0, [0])
    inserted = tree.insert(tokens(40), ids(40))
    assert (inserted.blocks, inserted.first_adopted, inserted.replaced) == ([2, 3, 4], 0, [1])
    assert tree.match_prefix(tokens(50)).length == 40
    tree.check()


def test_a_leased_tail_stays_and_the_longer_one_is_stored_beside_it(tree, ids):
    tree.insert(tokens(40), ids(40))
    lease = lock(tree, tokens(40))
    inserted = tree.insert(tokens(60), ids(60))
    assert (inserted.blocks, inserted.first_adopted, inserted.replaced) == ([0, 1, 5, 6], 2, [])
    assert lease.blocks == [0, 1, 2]
    assert tree.match_prefix(tokens(60)).length == 60
    tree.check()
    lease.release()
    assert tree.num_evictable_blocks == 5
    inserted = tree.insert(tokens(61), ids(61))
    assert inserted.replaced == [6]
    assert tree.match_prefix(tokens(61)).length == 61


def test_of_two_equal_matches_the_one_that_can_grow_is_taken(tree, ids):
    """A tail that was leased when a longer one came is used up first, so that it does not stay beside a third."""
    tree.insert([5, 5], [0])
    with lock(tree, [5, 5]):
        tree.insert([5, 5, 9], [1])
    inserted = tree.insert([5, 5, 7], [2])
    assert (inserted.blocks, inserted.first_adopted, inserted.replaced) == ([2], 0, [0])
    assert sorted(tree.blocks()) == [1, 2]


def test_insert_of_something_shorter_is_already_known(tree, ids):
    tree.insert(tokens(64), ids(64))
    inserted = tree.insert(tokens(20), ids(20))
    assert (inserted.blocks, inserted.first_adopted, inserted.replaced) == ([0, 1], 2, [])
    assert tree.num_blocks == 4


def test_the_lease_of_a_full_leaf_that_grows_protects_what_it_held_only(tree, ids):
    tree.insert(tokens(32), ids(32))
    with lock(tree, tokens(32)) as lease:
        tree.insert(tokens(64), ids(64))
        assert (tree.num_leased_blocks, tree.num_evictable_blocks) == (2, 2)
        assert tree.evict(99) == [5, 4]
        assert lease.blocks == [0, 1]


# Leases


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


def crowd(num_leaves: int) -> RadixTree:
    tree = RadixTree(BLOCK)
    for i in range(num_leaves):
        tree.insert((i * 7919 % 1_000_003).to_bytes(4, "little") * BLOCK, [i])
    return tree


def count_calls(operation, *arguments) -> int:
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        operation(*arguments)
    finally:
        sys.setprofile(None)
    return calls


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
