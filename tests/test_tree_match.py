"""What a match finds and what an insertion stores, rule by rule. (Whether the rules hold together is in test_tree_fuzz.py.)"""

from __future__ import annotations

import random

import pytest

from tests.small_tree import BLOCK, counters, lock, tokens

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
