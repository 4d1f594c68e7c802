"""The radix tree by itself: match, insert, split, lock and release, evict. Each case checks its result, then times it.

Host times of one thread, no GPU involved. The tree holds 1,000 other sequences beside the one that is measured.
"""

from __future__ import annotations

import random

import pytest

from radixkv.tree import RadixTree, token_key

BLOCK = 16
LENGTHS = [512, 4096, 32_768]
NUM_SEQUENCES = 1000


def random_key(rng: random.Random, length: int) -> bytes:
    return token_key([rng.randrange(32_000) for _ in range(length)])


def filled(key: bytes) -> RadixTree:
    """A tree with one sequence of interest among short others."""
    rng = random.Random(0)
    tree = RadixTree(BLOCK)
    num_blocks = len(key) // 4 // BLOCK
    tree.insert(key, range(num_blocks))
    for i in range(NUM_SEQUENCES):
        tree.insert(random_key(rng, BLOCK), [num_blocks + i])
    return tree


@pytest.fixture(params=LENGTHS, ids=lambda length: f"{length} tokens")
def key(request) -> bytes:
    return random_key(random.Random(1), request.param)


def test_build_key(benchmark, key):
    tokens = [int.from_bytes(key[i : i + 4], "little") for i in range(0, len(key), 4)]
    assert benchmark(token_key, tokens) == key


def test_match_whole_edge(benchmark, key):
    tree = filled(key)
    found = benchmark(tree.match_prefix, key)
    assert found.length == len(key) // 4


def test_match_inside_edge(benchmark, key):
    """The query leaves the edge three tokens before its end."""
    tree = filled(key)
    query = key[:-12] + bytes(12)
    found = benchmark(tree.match_prefix, query)
    assert found.length == len(key) // 4 - 3


@pytest.mark.parametrize("num_siblings", [10, 10_000], ids=lambda n: f"{n} siblings")
def test_match_part_of_a_block(benchmark, num_siblings):
    """No child has the query's first block; the one that shares most of it is a neighbour in the sorted keys."""
    rng = random.Random(2)
    tree = RadixTree(BLOCK)
    siblings = [random_key(rng, BLOCK) for _ in range(num_siblings)]
    for i, sibling in enumerate(siblings):
        tree.insert(sibling, [i])
    query = siblings[num_siblings // 2][:44] + bytes(400)
    found = benchmark(tree.match_prefix, query)
    assert found.length == 11


def test_insert_new(benchmark, key):
    """Nothing of it is known: one new leaf."""
    blocks = list(range(1, 1 + len(key) // 4 // BLOCK))

    def setup():
        tree = RadixTree(BLOCK)
        tree.insert(bytes(64), [0])
        return (tree,), {}

    inserted = benchmark.pedantic(lambda tree: tree.insert(key, blocks), setup=setup, rounds=500, warmup_rounds=20)
    assert (inserted.first_adopted, inserted.blocks) == (0, blocks)


def test_insert_next_turn(benchmark, key):
    """A leaf grows in place by 32 tokens."""
    longer = key + random_key(random.Random(4), 32)
    blocks = list(range(len(longer) // 4 // BLOCK))

    def setup():
        tree = RadixTree(BLOCK)
        tree.insert(key, blocks[:-2])
        return (tree,), {}

    inserted = benchmark.pedantic(lambda tree: tree.insert(longer, blocks), setup=setup, rounds=500, warmup_rounds=20)
    assert (inserted.first_adopted, inserted.blocks) == (len(blocks) - 2, blocks)


def test_insert_known(benchmark, key):
    tree = filled(key)
    blocks = list(range(len(key) // 4 // BLOCK))
    inserted = benchmark(tree.insert, key, blocks)
    assert (inserted.first_adopted, inserted.blocks, inserted.replaced) == (len(blocks), blocks, [])


def test_split(benchmark, key):
    """A lease that ends in the middle of an edge."""
    half = len(key) // 8
    blocks = list(range(len(key) // 4 // BLOCK))

    def setup():
        tree = RadixTree(BLOCK)
        tree.insert(key, blocks)
        return (tree, tree.match_prefix(key, limit=half)), {}

    lease = benchmark.pedantic(lambda tree, found: tree.lock(found), setup=setup, rounds=500, warmup_rounds=20)
    assert lease.blocks == blocks[: half // BLOCK]


def test_lock_and_release(benchmark, key):
    """What a hit costs beside the match: taking the lease, giving it back, and the tree taking it in."""
    tree = filled(key)
    found = tree.match_prefix(key)
    held = tree.lock(found)
    assert (held.length, tree.num_leased_blocks) == (len(key) // 4, len(key) // 4 // BLOCK)
    held.release()
    assert tree.num_leased_blocks == 0

    def lock_and_release():
        tree.lock(found).release()

    benchmark(lock_and_release)
    assert tree.num_leased_blocks == 0 and tree.num_leases == 0


def test_blocks_of_a_lease(benchmark, key):
    tree = filled(key)
    lease = tree.lock(tree.match_prefix(key))
    blocks = benchmark(lambda: lease.blocks)
    assert blocks == list(range(len(key) // 4 // BLOCK))


@pytest.mark.parametrize("num_sequences", [1_000, 100_000], ids=lambda n: f"{n} sequences")
def test_evict_10k_tokens(benchmark, num_sequences):
    """625 blocks of 16 from sequences of 512 tokens: 20 leaves, whatever the number of the others."""
    rng = random.Random(5)
    num_blocks = 512 // BLOCK
    tail = random_key(rng, 512 - BLOCK)
    tree = RadixTree(BLOCK)
    order = list(range(num_sequences))
    rng.shuffle(order)
    for i in order:
        tree.insert(i.to_bytes(4, "little") * BLOCK + tail, range(i * num_blocks, (i + 1) * num_blocks))
    expected = [order[0] * num_blocks + offset for offset in range(num_blocks - 1, -1, -1)]
    first = tree.evict(10_000 // BLOCK)
    assert len(first) == 625 and first[:num_blocks] == expected
    evicted = benchmark.pedantic(tree.evict, args=(10_000 // BLOCK,), rounds=40)
    assert len(evicted) == 625
