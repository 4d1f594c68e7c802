"""A policy checked choice by choice against one that keeps every use and sorts, and random requests to check it with."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from radixkv.eviction import POLICIES, CostQueue, policy_maker
from radixkv.eviction_queue import Eviction
from radixkv.node import Node
from radixkv.tree import Lease, RadixTree

BLOCK = 4
NAMES = [policy.name for policy in POLICIES]


class Oracle(Eviction):
    """Forwards to a policy what the tree tells it, remembers all of it, and compares every choice with that of a sort.

    A use is (time, kind); a node that loses a child gets the child's uses too.
    """

    name = "oracle"

    def __init__(self, block_size: int, inner: str) -> None:
        self.inner = policy_maker("test", inner)(block_size)
        super().__init__(block_size, self.inner.clock)
        self.takes_priority = self.inner.takes_priority  # type: ignore[misc]
        self.uses: dict[Node, list[tuple[int, str]]] = defaultdict(list)
        self.waiting: dict[Node, None] = {}
        self.protected: set[Node] = set()
        self.demoted: dict[Node, int] = {}
        self.priorities: dict[Node, int] = {}
        self.ages: dict[int, float] = {}  # time of a use: how often half of everything had been forgotten by then
        self.age = 0.0
        self.time = 0
        self.num_choices = 0

    def use(self, node: Node, kind: str) -> None:
        self.time += 1
        self.uses[node].append((self.time, kind))
        self.demoted.pop(node, None)
        if kind in ("stored", "leased"):
            self.age += 1 / (CostQueue.HALF_LIFE * max(1, len(self.waiting)))
            self.ages[self.time] = self.age
        if kind == "leased":
            self.protected.add(node)

    def add(self, leaf: Node) -> None:
        self.use(leaf, "stored")
        self.priorities[leaf] = 0
        self.inner.add(leaf)
        self.waits(leaf)

    def renew(self, node: Node) -> None:
        self.use(node, "renewed")
        self.inner.renew(node)

    def touch(self, node: Node) -> None:
        assert node not in self.waiting
        self.use(node, "leased")
        self.inner.touch(node)

    def restore(self, leaf: Node) -> None:
        self.use(leaf, "leased")
        self.inner.restore(leaf)
        self.waits(leaf)

    def expose(self, leaf: Node) -> None:
        self.inner.expose(leaf)
        self.waits(leaf)

    def waits(self, leaf: Node) -> None:
        assert leaf not in self.waiting
        self.waiting[leaf] = None
        self.demote()

    def discard(self, node: Node) -> None:
        self.inner.discard(node)
        self.waiting.pop(node, None)
        self.demote()

    def absorb(self, parent: Node, child: Node) -> None:
        self.inner.absorb(parent, child)
        self.uses[parent] = sorted(self.uses[parent] + self.uses.pop(child))
        if child in self.demoted:
            self.demoted[parent] = max(self.demoted.pop(child), self.demoted.get(parent, 0))
        if child in self.protected:
            self.protected.add(parent)
        given = [self.priorities[node] for node in (parent, child) if node in self.priorities]
        self.priorities[parent] = max(given)

    def trim(self, leaf: Node) -> None:
        self.inner.trim(leaf)

    def num_at_once(self, leaf: Node) -> int:
        return self.inner.num_at_once(leaf)

    def set_priority(self, node: Node, priority: int) -> None:
        self.priorities[node] = priority
        self.inner.set_priority(node, priority)

    def demote(self) -> None:
        """At most half of those that wait are protected."""
        if self.inner.name != "slru":
            return
        while 2 * len(protected := [node for node in self.waiting if node in self.protected]) > len(self.waiting):
            oldest = min(protected, key=self.last_use)
            self.protected.remove(oldest)
            self.time += 1
            self.demoted[oldest] = self.time

    def last_use(self, node: Node, *kinds: str) -> int:
        times = [time for time, kind in self.uses[node] if not kinds or kind in kinds]
        return max([*times, *([] if kinds else [self.demoted.get(node, 0)])])

    def key(self, node: Node):
        recency = self.last_use(node)
        counted = [time for time, kind in self.uses[node] if kind in ("stored", "leased")]
        match self.inner.name:
            case "lru":
                return recency
            case "fifo":
                return self.last_use(node, "stored")
            case "lfu":
                return len(counted), recency
            case "slru":
                return node in self.protected, recency
            case "priority":
                return self.priorities[node], recency
            case "cost":
                depth = sum(len(above.edge) for above in path(node)) // 4
                tokens = depth - (len(list(path_blocks(node))) - 1) * self.block_size
                return tokens * (1 + depth / CostQueue.DEPTH_OF_DOUBLE_COST) * sum(2.0 ** (self.ages[time] - self.age) for time in counted)

    def first(self) -> Node | None:
        found = self.inner.first()
        if not self.waiting:
            assert found is None
            return None
        assert found in self.waiting
        self.num_choices += 1
        best = min(map(self.key, self.waiting))
        if self.inner.name == "cost":  # a float: the policy may see an order where the oracle sees the last bit only
            assert self.key(found) == pytest.approx(best, rel=1e-9)
        else:
            assert [node for node in self.waiting if self.key(node) == best] == [found]
        return found

    def nodes(self) -> list[Node]:
        nodes = self.inner.nodes()
        assert set(nodes) == set(self.waiting) and len(nodes) == len(self.waiting)
        if self.inner.name != "cost":
            assert nodes == sorted(self.waiting, key=self.key)
        return nodes


def path(node: Node):
    above: Node | None = node
    while above is not None:
        yield above
        above = above.parent


def path_blocks(node: Node) -> list[int]:
    return node.path_blocks()


class Driver:
    """Random requests on one tree, whose choices depend on the seed and nothing else."""

    def __init__(self, seed: int, eviction, takes_priority: bool) -> None:
        self.random = random.Random(seed)
        self.tree = RadixTree(BLOCK, eviction)
        self.takes_priority = takes_priority
        self.next_block = 0
        self.leases: list[Lease] = []
        self.seen: list[list[int]] = [[]]

    def prompt(self) -> list[int]:
        known = self.random.choice(self.seen[-30:])
        kept = known if self.random.random() < 0.6 else known[: self.random.randint(0, len(known))]
        prompt = kept + [self.random.randrange(2) for _ in range(self.random.choice([0, 1, 2, 9]))]
        self.seen.append(prompt[: 12 * BLOCK])
        return self.seen[-1]

    def priority(self) -> int | None:
        return self.random.choice([None, -1, 0, 2]) if self.takes_priority else None

    def step(self, evict) -> None:
        tree = self.tree
        match self.random.choices(["insert", "lock", "release", "evict", "clear", "retire"], [8, 5, 6, 4, 0.05, 0.03])[0]:
            case "insert":
                prompt, namespace = self.prompt(), (self.random.randrange(2),)
                num_blocks = -(-len(prompt) // BLOCK)
                tree.insert(prompt, range(self.next_block, self.next_block + num_blocks), namespace, self.priority())
                self.next_block += num_blocks
            case "lock":
                self.leases.append(tree.lock(tree.match_prefix(self.prompt(), (self.random.randrange(2),)), self.priority()))
            case "release" if self.leases:
                self.leases.pop(self.random.randrange(len(self.leases))).release()
            case "evict":
                evict(tree, self.random.choice([1, 2, 5]))
            case "clear":
                tree.clear()
            case "retire":
                tree.retire((self.random.randrange(2),))
