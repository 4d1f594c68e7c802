"""Eviction policies: each against an oracle that keeps every use and sorts, and what a user sees of them."""

from __future__ import annotations

import random
import sys
from collections import defaultdict

import pytest

import radixkv
from radixkv.eviction import POLICIES, CostQueue, policy_maker
from radixkv.eviction_queue import Eviction, HeapQueue
from radixkv.node import Node
from radixkv.tree import Lease, RadixTree
from tests.models import tiny_qwen2

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


@pytest.mark.parametrize("name", NAMES)
def test_every_choice_is_that_of_an_oracle_that_sorts(name):
    for seed in range(3):
        oracles: list[Oracle] = []

        def maker(block_size: int, oracles=oracles) -> Oracle:
            oracles.append(Oracle(block_size, name))
            return oracles[0]

        driver = Driver(seed, maker, takes_priority=name == "priority")
        for _ in range(1500):
            driver.step(lambda tree, num_blocks: tree.evict(num_blocks))
            driver.tree.check()
        assert oracles[0].num_choices > 500


@pytest.mark.parametrize("name", NAMES)
def test_many_blocks_at_once_are_those_that_would_go_one_by_one(name):
    gone: list[list[int]] = [[], []]

    def at_once(tree: RadixTree, num_blocks: int) -> None:
        gone[0] += tree.evict(num_blocks)

    def one_by_one(tree: RadixTree, num_blocks: int) -> None:
        for _ in range(num_blocks):
            gone[1] += tree.evict(1)

    drivers = [Driver(5, name, takes_priority=name == "priority") for _ in range(2)]
    for _ in range(2500):
        for driver, evict in zip(drivers, (at_once, one_by_one), strict=True):
            driver.step(evict)
    assert gone[0] == gone[1]
    assert len(gone[0]) > 500


@pytest.mark.parametrize("name", NAMES)
def test_leased_blocks_never_go(name):
    tree = RadixTree(BLOCK, name)
    tree.insert(range(12), [0, 1, 2])
    tree.insert(range(50, 62), [3, 4, 5])
    with tree.lock(tree.match_prefix(range(7))) as lease:
        assert lease.blocks == [0, 1]
        assert sorted(tree.evict(99)) == [2, 3, 4, 5]
        assert tree.evict(99) == []
    assert tree.evict(99) == [1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_of_evicting_does_not_grow_with_the_leaves(name):
    def calls_of_eviction(num_leaves: int) -> int:
        tree, calls = RadixTree(BLOCK, name), 0
        for i in range(num_leaves):
            tree.insert((i * 7919 % 1_000_003).to_bytes(4, "little") * BLOCK, [i])

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            tree.evict(64)
        finally:
            sys.setprofile(None)
        return calls

    small, large = calls_of_eviction(500), calls_of_eviction(20_000)
    assert small > 64
    assert large <= 1.05 * small


@pytest.mark.parametrize("name", ["lfu", "fifo", "priority", "cost"])
def test_old_entries_do_not_pile_up(name):
    tree = RadixTree(BLOCK, name)
    for i in range(20):
        tree.insert([i] * BLOCK, [i])
    for i in range(5000):
        tree.lock(tree.match_prefix([i % 20] * BLOCK)).release()
    tree.check()
    assert isinstance(tree.queue, HeapQueue) and len(tree.queue._heap) <= 2 * 20 + 64 + 1


# What each policy is for


def prompts_of(tree: RadixTree, *firsts: int) -> None:
    for first in firsts:
        tree.insert([first] * BLOCK, [first])


def use(tree: RadixTree, first: int, times: int = 1) -> None:
    for _ in range(times):
        tree.lock(tree.match_prefix([first] * BLOCK)).release()
        assert tree.num_leases == 0


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("lru", [2, 1, 3, 0]),
        ("lfu", [2, 3, 0, 1]),
        ("fifo", [0, 1, 2, 3]),
        ("slru", [2, 1, 3, 0]),  # two of four may be protected; 1 was pushed out of them when 3 was used, and 2 never was in
        ("priority", [2, 1, 3, 0]),
        ("cost", [2, 3, 0, 1]),
    ],
)
def test_the_same_uses_and_six_orders(name, order):
    tree = RadixTree(BLOCK, name)
    prompts_of(tree, 0, 1, 2, 3)
    for first, times in ((1, 8), (3, 1), (0, 2)):
        use(tree, first, times)
    assert tree.evict(9) == order


def test_slru_keeps_what_was_reused_from_what_never_was():
    """A scan of prompts that nobody repeats pushes out everything under LRU, and under SLRU only itself."""
    kept = {}
    for name in ("lru", "slru"):
        tree = RadixTree(BLOCK, name)
        prompts_of(tree, *range(10))
        for first in range(4):
            use(tree, first)
        for first in range(100, 140):
            tree.evict(1)
            prompts_of(tree, first)
        kept[name] = [first for first in range(10) if tree.match_prefix([first] * BLOCK).length]
    assert kept == {"lru": [], "slru": [0, 1, 2, 3]}


def test_priorities():
    tree = RadixTree(BLOCK, "priority")
    for first, priority in ((0, 5), (1, None), (2, -3), (3, 5)):
        tree.insert([first] * BLOCK, [first], priority=priority)
    lease = tree.lock(tree.match_prefix([1] * BLOCK), priority=7)
    assert lease.priority == lease.clone().priority == 7
    lease.release()
    tree.insert([3] * BLOCK, [9], priority=4)
    assert tree.evict(9) == [2, 3, 0, 1]


def test_a_prefix_has_the_highest_priority_of_what_was_below_it():
    tree = RadixTree(BLOCK, "priority")
    tree.insert([1] * BLOCK + [2] * BLOCK, [0, 1], priority=-2)
    tree.insert([1] * BLOCK + [3] * BLOCK, [0, 2], priority=-1)
    prompts_of(tree, 9)
    assert tree.evict(9) == [1, 2, 0, 9]


@pytest.mark.parametrize("priority", [True, 1.5, "high"])
def test_a_priority_is_an_int(priority):
    tree = RadixTree(BLOCK, "priority")
    with pytest.raises(ValueError, match="priority must be an int"):
        tree.insert([1], [0], priority=priority)
    assert tree.nodes() == []


def test_a_priority_that_nothing_would_heed_is_refused():
    tree = RadixTree(BLOCK)
    tree.insert([1], [0])
    with pytest.raises(ValueError, match="eviction='priority'"):
        tree.lock(tree.match_prefix([1]), priority=1)
    with pytest.raises(ValueError, match="eviction='priority'"):
        tree.insert([2], [1], priority=1)
    assert (tree.num_blocks, tree.num_leases) == (1, 0)


def test_cost_prefers_to_lose_few_tokens_and_shallow_ones():
    tree = RadixTree(BLOCK, "cost")
    tree.insert([1] * BLOCK, [0])
    tree.insert([2], [1])
    tree.insert([3] * BLOCK * 5000, range(10, 5010))
    assert tree.evict(1) == [1]
    assert tree.evict(1) == [0]
    assert tree.evict(2) == [5009, 5008]


@pytest.mark.parametrize("eviction", ["LRU", "", None, 3])
def test_a_wrong_name_lists_the_right_ones(eviction):
    for make in (lambda: RadixTree(BLOCK, eviction), lambda: radixkv.patch_model(tiny_qwen2(), eviction=eviction)):
        with pytest.raises(ValueError, match="'lru', 'lfu', 'fifo', 'slru', 'priority', 'cost'"):
            make()


# Stale namespaces


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
