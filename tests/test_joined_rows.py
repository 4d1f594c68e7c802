"""Rows of batches that join, part, and are published while they run."""

from __future__ import annotations

import pytest

from radixkv.cache import PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.sequence import Batch, CallOptions
from radixkv.token_key import token_key
from tests.models import prompt
from tests.small_cache import BLOCK, small_cache


def running(cache: PrefixCache, *prompts: list[int], **options: object) -> Batch:
    batch = cache.admit([token_key(tokens) for tokens in prompts], [1] * len(prompts), options=CallOptions(**options))  # type: ignore[arg-type]
    with cache.prompt_step(batch) as step:
        step.begin()
    return batch


def grow(cache: PrefixCache, batch: Batch, count: int) -> None:
    for token in range(count):
        with cache.decode_step(batch, list(range(len(batch.sequences))), [token] * len(batch.sequences)) as step:
            step.begin()


def test_joined_rows_go_on_together_and_the_other_batch_is_closed():
    cache = small_cache()
    one, two = running(cache, [1] * 20, [2] * 5), running(cache, [3] * 40)
    kept = [*one.sequences, *two.sequences]
    cache.join(one, two)
    cache.check()
    assert one.sequences == kept and two.closed and not two.sequences
    grow(cache, one, BLOCK + 1)
    cache.check()
    cache.store(one)
    cache.store(two)  # closed, left alone
    cache.check()
    assert cache.known_prefix(token_key([3] * 40 + list(range(BLOCK + 1))))[0] == 40 + BLOCK + 1


def test_only_batches_admitted_alike_join():
    cache = small_cache()
    batch = running(cache, [1] * 20)
    for other in (running(cache, [2], namespace=("a",)), running(cache, [2], store=False)):
        with pytest.raises(ValueError, match="admitted alike"):
            cache.join(batch, other)
        cache.discard(other)
    cache.store(batch)
    with pytest.raises(RuntimeError, match="already stored"):
        cache.join(batch, running(cache, [4]))


def test_parted_rows_are_stored_while_the_others_go_on():
    cache = small_cache()
    shared = list(range(100, 130))
    batch = running(cache, [*shared, 1], [*shared, 2], [*shared, 3])
    parted = cache.part(batch, [0, 2])
    assert [len(parted.sequences), len(batch.sequences)] == [2, 1]
    cache.check()
    cache.store(parted)
    cache.check()
    grow(cache, batch, 2 * BLOCK)
    cache.check()
    for last, length in ((1, 31), (2, 30), (3, 31)):
        assert cache.known_prefix(token_key([*shared, last]))[0] == length
    cache.discard(batch)
    cache.check()


def parted(num_shared: int) -> tuple[PrefixCache, Batch, list[int]]:
    """Of two rows that share so many blocks in a pool of 20 one is stored, and the other one runs; these tokens they share."""
    cache = small_cache(num_blocks=20)
    shared = prompt(num_shared * BLOCK, seed=1).tolist()
    batch = running(cache, [*shared, 1], [*shared, 2])
    cache.store(cache.part(batch, [0]))
    cache.check()
    return cache, batch, shared


def test_blocks_of_a_running_row_are_not_counted_as_room():
    """A row that is stored leaves the blocks that it shares to the tree, and another row goes on in them: evicting them frees none."""
    cache, batch, _ = parted(8)
    assert cache.num_allocatable == 20 - 8 - 1
    with pytest.raises(OutOfBlocks):
        cache.allocate(12)
    assert cache.tree.num_blocks == 9, "nothing was evicted in vain"
    taken = cache.allocate(11)
    cache.pool.release(taken)
    cache.discard(batch)
    cache.check()


def test_what_is_leased_beside_it_is_not_taken_off_the_room_twice():
    cache, batch, shared = parted(4)
    with cache.match_prefix(shared):
        # 4 shared, 1 of the row; the stored row's last block and the free ones are room.
        assert cache.num_allocatable == 20 - 4 - 1
        cache.pool.release(cache.allocate(15))
    cache.discard(batch)
    cache.check()


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 40])
def test_a_published_row_is_found_to_its_last_token_and_goes_on(length):
    cache = small_cache()
    tokens = prompt(length, seed=1).tolist()
    batch = running(cache, tokens, [7] * 20)
    assert cache.known_prefix(token_key(tokens)) == (0, 0)
    cache.publish(batch, 0)
    cache.check()
    assert cache.known_prefix(token_key([*tokens, 5])) == (length, length)
    other = running(cache, [*tokens, 5, 6])
    assert other.sequences[0].hit_len == length
    grow(cache, batch, BLOCK + 2)
    grow(cache, other, BLOCK + 2)
    cache.publish(batch, 0)
    cache.check()
    assert cache.known_prefix(token_key([*tokens, *range(BLOCK + 2)]))[0] == length + BLOCK + 2
    cache.store(batch)
    cache.store(other)
    cache.check()


def test_publishing_without_a_free_block_leaves_that_to_the_next_step():
    """The row's last block is the tree's then; the step that writes to it asks for a copy, and fails as long as there is no block."""
    cache = small_cache(num_blocks=3)
    batch = running(cache, [1] * (2 * BLOCK + 5))
    cache.publish(batch, 0)
    cache.check()
    assert batch.may_share
    cache.discard(batch)
    cache.check()


def test_what_is_not_to_be_stored_or_of_older_weights_is_not_published():
    cache = small_cache()
    private = running(cache, [1] * 20, store=False)
    cache.publish(private, 0)
    stale = running(cache, [2] * 20)
    cache.invalidate()
    cache.publish(stale, 0)
    assert cache.known_prefix(token_key([1] * 20)) == cache.known_prefix(token_key([2] * 20)) == (0, 0)
    cache.check()
    cache.discard(private)
    cache.discard(stale)
    cache.check()


def test_of_what_is_cached_how_much_is_held():
    cache = small_cache()
    batch = running(cache, list(range(50)))
    cache.store(batch)
    key = token_key([*range(50), 9])
    assert cache.known_prefix(key) == (50, 0)
    with cache.match_prefix(list(range(20))):
        assert cache.known_prefix(key) == (50, 32)  # blocks are held whole
    assert cache.known_prefix(key) == (50, 0)
