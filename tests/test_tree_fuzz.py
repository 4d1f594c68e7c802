"""Random operations on the tree against a model that knows no tree: one dict of prefixes, searched by brute force."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from radixkv.pool import BlockPool
from radixkv.tree import Lease, RadixTree

NAMESPACES = [(), ("adapter", "a"), (("adapter", "a"), 1), (("adapter", "a"), True)]
# How often each operation is chosen, in stretches that let go of leases and in those that pile them up.
WEIGHTS = {
    "match": (3, 3),
    "insert": (8, 8),
    "request": (6, 6),
    "lock": (3, 6),
    "stale_lock": (1, 1),
    "clone": (1, 1),
    "release": (20, 1),
    "drop": (10, 1),
    "evict": (3, 3),
    "clear": (0.05, 0.05),
}
Place = tuple[int, tuple[int, ...]]  # (namespace index, the tokens up to the end of a block): where a block stands


@dataclass
class Entry:
    """A block that the tree should hold, and when it was last used itself."""

    block: int
    stamp: int = 0


@dataclass
class Model:
    """What the tree should hold, by place. Recency is per block; a block was used when anything below it was."""

    block_size: int
    entries: dict[Place, Entry] = field(default_factory=dict)
    locked: Counter[Place] = field(default_factory=Counter)
    clock: int = 0

    def parent(self, place: Place) -> Place:
        namespace, tokens = place
        return namespace, tokens[: (len(tokens) - 1) // self.block_size * self.block_size]

    def match_len(self, namespace: int, tokens: tuple[int, ...]) -> int:
        return max((common_len(tokens, known) for place, known in self.entries if place == namespace), default=0)

    def places_of(self, namespace: int, tokens: tuple[int, ...], blocks: list[int]) -> list[Place]:
        """Where the blocks of a prefix stand, after checking that each of them holds the right tokens."""
        place_of_block = {entry.block: place for place, entry in self.entries.items()}
        places = [place_of_block[block] for block in blocks]
        assert len(places) == -(-len(tokens) // self.block_size)
        for i, (owner, known) in enumerate(places):
            end = (i + 1) * self.block_size
            assert owner == namespace
            assert i * self.block_size < len(known) <= end
            assert known[: len(tokens)] == tokens[: len(known)][:end]
        return places

    def touch(self, place: Place) -> None:
        self.clock += 1
        self.entries[place].stamp = self.clock

    def remove(self, place: Place) -> int:
        entry = self.entries.pop(place)
        if (above := self.entries.get(self.parent(place))) is not None:
            above.stamp = max(above.stamp, entry.stamp)
        return entry.block

    def evict(self, num_blocks: int) -> list[int]:
        """The blocks that must go, in order: always the least recently used one that is unlocked and has nothing below."""
        gone: list[int] = []
        while len(gone) < num_blocks:
            parents = {self.parent(place) for place in self.entries}
            leaves = [place for place in self.entries if place not in parents and not self.locked[place]]
            if not leaves:
                break
            stamps = sorted(self.entries[place].stamp for place in leaves)
            assert len(set(stamps)) == len(stamps), "the model has a tie"
            gone.append(self.remove(min(leaves, key=lambda place: self.entries[place].stamp)))
        return gone


@dataclass
class Held:
    """A lease and what the model says that it holds."""

    lease: Lease
    places: list[Place]


class Fuzz:
    """Tree, pool and model driven through the same random operations; everything is compared after each."""

    def __init__(self, seed: int, block_size: int, num_blocks: int, vocabulary: int) -> None:
        self.random = random.Random(seed)
        self.block_size = block_size
        self.vocabulary = vocabulary
        self.tree = RadixTree(block_size)
        self.pool = BlockPool(num_blocks, num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, dtype=torch.float32, device="cpu")
        self.model = Model(block_size)
        self.held: list[Held] = []
        self.seen: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        self.evicted_tokens = 0
        self.log: list[object] = []
        self.counts: Counter[str] = Counter()

    def run(self, num_operations: int) -> None:
        for i in range(num_operations):
            # Leases pile up in every other stretch, until requests are refused for want of blocks.
            name = self.random.choices(list(WEIGHTS), [pair[i // 250 % 2] for pair in WEIGHTS.values()])[0]
            self.counts[name] += 1
            self.log.append((name, getattr(self, name)()))
            self.compare()

    def compare(self) -> None:
        tree, model = self.tree, self.model
        tree.check()
        blocks = tree.blocks()
        assert sorted(blocks) == sorted(entry.block for entry in model.entries.values())
        self.pool.check(blocks)
        assert self.pool.num_free + tree.num_evictable_blocks + tree.num_leased_blocks == self.pool.num_blocks
        assert tree.num_leased_blocks == sum(1 for place in model.entries if model.locked[place])
        assert tree.num_leases == sum(1 for held in self.held if held.places)
        assert tree.evicted_tokens == self.evicted_tokens
        for held in self.held:
            assert [model.entries[place].block for place in held.places] == held.lease.blocks

    def sequence(self) -> tuple[int, tuple[int, ...]]:
        """Tokens that often share a beginning with earlier ones, and seldom with the same namespace by chance only."""
        namespace, tokens = self.random.choice(self.seen[-40:])
        if self.random.random() < 0.15:
            namespace = self.random.randrange(len(NAMESPACES))
        kept = tokens if self.random.random() < 0.5 else tokens[: self.random.randint(0, len(tokens))]
        added = self.random.choice([0, 1, self.random.randint(0, self.block_size), self.random.randint(0, 4 * self.block_size)])
        tokens = kept + tuple(self.random.randrange(self.vocabulary) for _ in range(added))
        self.seen.append((namespace, tokens[: 10 * self.block_size]))
        return self.seen[-1]

    def match(self):
        namespace, tokens = self.sequence()
        limit = self.random.choice([None, self.random.randint(0, len(tokens) + 2)])
        found = self.tree.match_prefix(list(tokens), NAMESPACES[namespace], limit)
        assert found.length == self.model.match_len(namespace, tokens[:limit])
        return found.length

    def lock(self):
        namespace, tokens = self.sequence()
        limit = self.random.choice([None, self.random.randint(0, len(tokens))])
        return self.hold(namespace, tokens[:limit], self.tree.lock(self.tree.match_prefix(tokens, NAMESPACES[namespace], limit)))

    def stale_lock(self):
        """Between match and lock the tree changes: the lease holds what is still there, and no more than was matched."""
        namespace, tokens = self.sequence()
        found = self.tree.match_prefix(tokens, NAMESPACES[namespace])
        for change in self.random.choices([self.insert, self.evict, self.release, self.lock], k=2):
            change()
        return self.hold(namespace, tokens[: found.length], self.tree.lock(found))

    def hold(self, namespace: int, tokens: tuple[int, ...], lease: Lease):
        assert lease.length == self.model.match_len(namespace, tokens)
        assert lease.namespace == NAMESPACES[namespace]
        places = self.model.places_of(namespace, tokens[: lease.length], lease.blocks)
        self.model.locked.update(places)
        self.held.append(Held(lease, places))
        return lease.length, lease.blocks

    def clone(self):
        if self.held:
            held = self.random.choice(self.held)
            lease = held.lease.clone()
            self.model.locked.update(held.places)
            self.held.append(Held(lease, held.places))

    def release(self):
        self.let_go("release")

    def drop(self):
        self.let_go("drop")

    def let_go(self, how: str, index: int | None = None):
        if not self.held:
            return
        held = self.held.pop(self.random.randrange(len(self.held)) if index is None else index)
        if how == "release":
            held.lease.release()
            with pytest.raises(RuntimeError, match="released before"):
                held.lease.release()
        self.model.locked.subtract(held.places)
        if held.places:
            self.model.touch(held.places[-1])
        # When `held` goes out of scope here, a lease that was not released is collected.

    def insert(self):
        namespace, tokens = self.sequence()
        blocks = self.allocate(-(-len(tokens) // self.block_size))
        return None if blocks is None else self.store(namespace, tokens, blocks, num_leased=0)

    def request(self):
        """The life of a request: hold what is cached, compute the rest, store it; the lease goes before or after."""
        namespace, tokens = self.sequence()
        self.hold(namespace, tokens, self.tree.lock(self.tree.match_prefix(tokens, NAMESPACES[namespace])))
        lease = self.held[-1].lease
        num_leased = lease.length // self.block_size
        shared = lease.blocks[:num_leased]
        fresh = self.allocate(-(-len(tokens) // self.block_size) - num_leased)
        early = self.random.random() < 0.5
        if early or fresh is None:
            self.let_go("release", -1)
        if fresh is None:
            return None
        stored = self.store(namespace, tokens, shared + fresh, num_leased)
        if not early and self.random.random() < 0.8:
            self.let_go("release", -1)
        return stored

    def store(self, namespace: int, tokens: tuple[int, ...], blocks: list[int], num_leased: int):
        model, block_size = self.model, self.block_size
        known = model.match_len(namespace, tokens)
        first = len(blocks) if known == len(tokens) else known // block_size
        inserted = self.tree.insert(tokens, tuple(blocks), NAMESPACES[namespace])
        assert inserted.first_adopted == first
        assert inserted.blocks[first:] == blocks[first:]
        self.expect_replaced(namespace, tokens, known, inserted.replaced)
        for i in range(first, len(blocks)):
            model.entries[namespace, tokens[: (i + 1) * block_size]] = Entry(blocks[i])
        places = model.places_of(namespace, tokens, inserted.blocks)
        if places:
            model.touch(places[-1])
        self.pool.release(blocks[num_leased:first])
        self.pool.release(inserted.replaced)
        return inserted

    def expect_replaced(self, namespace: int, tokens: tuple[int, ...], known: int, replaced: list[int]) -> None:
        """A partly filled block gives way to a longer one if nobody holds it; it must, if it is the only one that matches best."""
        model = self.model
        place = (namespace, tokens[:known])
        entry = model.entries.get(place)
        may = entry is not None and known < len(tokens) and known % self.block_size > 0 and not model.locked[place]
        same_block = [other for other in model.entries if model.parent(other) == model.parent(place) and other[1][:known] == place[1]]
        if replaced:
            assert may and entry is not None and replaced == [entry.block]
            model.remove(place)
        else:
            assert not may or len(same_block) > 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        short = num_blocks - self.pool.num_free
        if short > 0:
            if short > self.tree.num_evictable_blocks:
                self.counts["refused"] += 1
                return None
            assert len(self.expect_evicted(short)) == short
        return self.pool.allocate(num_blocks)

    def evict(self):
        return self.expect_evicted(self.random.choice([0, 1, 2, self.random.randint(0, 20)]))

    def expect_evicted(self, num_blocks: int) -> list[int]:
        before = self.tree.num_tokens
        evicted = self.tree.evict(num_blocks)
        assert evicted == self.model.evict(num_blocks)
        self.evicted_tokens += before - self.tree.num_tokens
        self.pool.release(evicted)
        return evicted

    def clear(self):
        cleared = self.tree.clear()
        assert cleared == self.model.evict(len(self.model.entries))
        self.pool.release(cleared)
        return cleared

    def close(self) -> None:
        while self.held:
            self.let_go("release")
        self.compare()
        self.clear()
        self.compare()
        assert self.pool.num_free == self.pool.num_blocks
        assert self.tree.num_tokens == self.tree.num_blocks == 0


def common_len(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "vocabulary", "num_operations"),
    [
        pytest.param(1, 32, 2, 5000, id="block1: every border is a token"),
        pytest.param(4, 40, 2, 9000, id="block4: many branches inside one block"),
        pytest.param(4, 20, 3, 7000, id="block4: a pool that is always full"),
        pytest.param(16, 32, 2, 7000, id="block16: the smallest that a pool takes"),
    ],
)
def test_random_operations_agree_with_a_brute_force_model(block_size, num_blocks, vocabulary, num_operations):
    fuzz = Fuzz(seed=block_size + num_blocks, block_size=block_size, num_blocks=num_blocks, vocabulary=vocabulary)
    fuzz.run(num_operations)
    assert set(fuzz.counts) == {*WEIGHTS, "refused"}
    fuzz.close()


def test_the_same_operations_give_the_same_tree():
    """Two replicas that see the same operations evict the same blocks: no clock on the wall, no order by address."""
    first, second = (Fuzz(seed=7, block_size=4, num_blocks=48, vocabulary=2) for _ in range(2))
    for fuzz in (first, second):
        fuzz.run(1500)
    assert first.log == second.log
    assert shape(first.tree) == shape(second.tree)
    assert first.tree.num_blocks > 10


def shape(tree: RadixTree) -> list[tuple]:
    return [(node.edge, node.blocks, node.locks, node.stamp, list(node.children)) for node in tree.nodes()]
