"""What the index of a million cached tokens takes of the host's memory, and that nothing is held for what is gone."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from radixkv.token_key import TOKEN_BYTES
from radixkv.tree import RadixTree

BLOCK = 16
LIMIT_MB = 64
PREFIX_LEN = 32_768


def random_key(rng: np.random.Generator, length: int) -> bytes:
    return rng.integers(0, 32_000, length, dtype=np.int32).tobytes()


def long_sequences(tree: RadixTree, num_tokens: int) -> None:
    """Sequences of 1,000 tokens."""
    rng = np.random.default_rng(0)
    num_blocks = -(-1000 // BLOCK)
    for i in range(num_tokens // 1000):
        tree.insert(random_key(rng, 1000), range(i * num_blocks, (i + 1) * num_blocks))


def one_block_leaves(tree: RadixTree, num_tokens: int) -> None:
    """As many leaves of one block as come to the tokens, under one prefix."""
    rng = np.random.default_rng(1)
    prefix = random_key(rng, PREFIX_LEN)
    table = [*tree.insert(prefix, range(PREFIX_LEN // BLOCK)).blocks, 0]
    for i in range(num_tokens // BLOCK):
        table[-1] = len(table) + i
        tree.insert(prefix + random_key(rng, BLOCK), table)


def short_branches(tree: RadixTree, num_tokens: int) -> None:
    """Sequences of four blocks that part in the middle of one another's."""
    rng = np.random.default_rng(2)
    key = b""
    next_block = 0
    while tree.num_tokens < num_tokens:
        kept = int(rng.integers(0, 4)) * BLOCK + BLOCK // 2
        key = key[: kept * TOKEN_BYTES] + random_key(rng, 4 * BLOCK - min(kept, len(key) // TOKEN_BYTES))
        tree.insert(key, range(next_block, next_block + 4))
        next_block += 4


@pytest.fixture(autouse=True)
def traced():
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


def traced_mb() -> float:
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 1e6


@pytest.mark.parametrize(
    ("build", "eviction"),
    [(long_sequences, "lru"), (short_branches, "cost"), (one_block_leaves, "lru")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_million_cached_tokens(build, eviction):
    before = traced_mb()
    tree = RadixTree(BLOCK, eviction=eviction)
    build(tree, 1_000_000)
    used = traced_mb() - before
    num_nodes = len(tree.nodes())
    assert tree.num_tokens >= 1_000_000
    assert used <= LIMIT_MB, f"{used:.1f} MB for {tree.num_tokens} tokens in {num_nodes} nodes ({eviction}), allowed {LIMIT_MB}"
    assert 1e6 * used / tree.num_tokens >= TOKEN_BYTES


def test_what_was_trimmed_is_released():
    """A long leaf that eviction has cut down to a block held on to all of its tokens, or to those of its path."""
    before = traced_mb()
    tree = RadixTree(BLOCK)
    long_sequences(tree, 500_000)
    full = traced_mb() - before
    while tree.num_blocks > 500:
        tree.evict(50)
    used = traced_mb() - before
    # The last evicted runs are remembered, for explain().
    assert used <= 0.15 * full + 1, f"{used:.2f} MB for {tree.num_blocks} blocks, {full:.2f} MB before the eviction"


def test_keys_of_evicted_leaves_do_not_pile_up():
    """A key that was removed from the sorted ones waits in them for a while; never more than a third of those that are there do."""
    tree = RadixTree(BLOCK)
    rng = np.random.default_rng(3)
    for i in range(4000):
        tree.insert(random_key(rng, BLOCK), [i])
    sorted_keys = tree.nodes()[0].sorted_keys
    assert sorted_keys is not None
    for left in (3000, 1000, 10):
        tree.evict(tree.num_blocks - left)
        assert left <= sum(map(len, sorted_keys._buckets)) <= left * 4 / 3 + 1
