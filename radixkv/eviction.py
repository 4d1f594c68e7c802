"""The eviction policies: which leaf of a tree goes first when blocks are wanted, by the name that a user gives.

A tree by itself evicts by "lru", a cache by "slru", which found as much as any in bench/replay.py (seeds 0 to 2: 85.4 % of the
prompt tokens, "cost" 85.5 %, "lru" 84.3 %, "fifo" 83.9 %, "lfu" 74.4 %, Belady's optimum 89.5 %) and costs no more than "lru",
but for lease and release (1.1 times as much). Evicting costs the same however many leaves there are: O(1) per victim for "lru"
and "slru", O(log n), amortised, for the others. What one may write beside these is in eviction_queue.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log1p, log2

from radixkv.eviction_queue import Eviction, HeapQueue, LruQueue
from radixkv.node import Node
from radixkv.token_key import TOKEN_BYTES

_LN2 = 0.6931471805599453
_MAX_PRIORITY = 2**53


class SlruQueue(LruQueue):
    """Segmented LRU: what was leased since it was stored is protected, and goes after what never was.

    No more of the waiting leaves are protected than are not: beyond that the least recently used of them join the others, as if
    used now. A node's `worth` is whether it is protected.

    Source: Karedla, Love, Wherry: Caching strategies to improve disk system performance, Computer 27(3), 1994.
    """

    name = "slru"

    def __init__(self, block_size: int, clock: Iterator[int] | None = None) -> None:
        super().__init__(block_size, clock)
        self._protected = LruQueue(block_size, self.clock)
        # Protected leaves less others, never above 0 between two calls: each adds one at most, and a demotion takes off two.
        self._surplus = 0

    def add(self, leaf: Node) -> None:
        leaf.worth, surplus = False, self._surplus - 1
        LruQueue.add(self, leaf)
        self._surplus = surplus

    def renew(self, node: Node) -> None:
        LruQueue.touch(self._protected if node.worth else self, node)

    def touch(self, node: Node) -> None:
        node.stamp, node.worth = next(self.clock), True

    def restore(self, leaf: Node) -> None:
        leaf.worth, surplus = True, self._surplus + 1
        self._protected.add(leaf)
        self._surplus = surplus
        self._balance()

    def expose(self, leaf: Node) -> None:
        if leaf.worth:
            self._protected.expose(leaf)
            self._surplus += 1
            self._balance()
        else:
            LruQueue.expose(self, leaf)
            self._surplus -= 1

    def discard(self, node: Node) -> None:
        if not node.place:
            return
        if node.worth:
            self._protected.discard(node)
            self._surplus -= 1
        else:
            LruQueue.discard(self, node)
            self._surplus += 1
            if self._surplus > 0:
                self._balance()

    def absorb(self, parent: Node, child: Node) -> None:
        # For each victim, and a call of the base's would take as long as the rest.
        if child.stamp > parent.stamp:
            parent.stamp = child.stamp
        if child.worth:
            parent.worth = True

    def save_worth(self, node: Node) -> float:
        return float(bool(node.worth))

    def recall(self, node: Node, worth: float | None) -> None:
        if bool(worth) == bool(node.worth) or not node.place:
            node.worth = bool(worth)
            LruQueue.touch(self._protected if worth else self, node)
            return
        self.discard(node)
        if worth:
            self.restore(node)
        else:
            self.add(node)

    def first_of_others(self) -> Node | None:
        return self._protected.first()

    def nodes(self) -> list[Node]:
        return LruQueue.nodes(self) + self._protected.nodes()

    def _balance(self) -> None:
        if self._surplus > 0:
            leaf = self._protected.first()
            assert leaf is not None
            self._protected.discard(leaf)
            self._surplus -= 1
            self.add(leaf)


class FifoQueue(HeapQueue):
    """First stored, first to go, however often it was used since; a leaf that grows keeps its turn."""

    name = "fifo"

    def rank(self, leaf: Node) -> int:
        return leaf.stamp

    def renew(self, node: Node) -> None:
        pass

    def touch(self, node: Node) -> None:
        pass

    def restore(self, leaf: Node) -> None:
        self.expose(leaf)


class LfuQueue(HeapQueue):
    """Least frequently used first. A node's `worth` is how often it was stored or leased; a leaf that grows keeps its count."""

    name = "lfu"

    def rank(self, leaf: Node) -> int:
        return leaf.worth

    def count_use(self, node: Node) -> None:
        node.worth = (node.worth or 0) + 1

    def absorb(self, parent: Node, child: Node) -> None:
        super().absorb(parent, child)
        parent.worth = (parent.worth or 0) + child.worth

    def save_worth(self, node: Node) -> float | None:
        return node.worth

    def recall(self, node: Node, worth: float | None) -> None:
        super().recall(node, None if worth is None else int(worth))


class PriorityQueue(HeapQueue):
    """Lowest priority first, 0 where none was given. A node's `worth` is what it was last given, or more if it inherits more."""

    name = "priority"
    takes_priority = True

    def rank(self, leaf: Node) -> int:
        return leaf.worth

    def add(self, leaf: Node) -> None:
        leaf.worth = 0
        super().add(leaf)

    restore = HeapQueue.add

    def absorb(self, parent: Node, child: Node) -> None:
        super().absorb(parent, child)
        parent.worth = child.worth if parent.worth is None else max(parent.worth, child.worth)

    def save_worth(self, node: Node) -> float | None:
        # Those that no float has exactly are the highest or the lowest.
        return None if node.worth is None else float(max(-_MAX_PRIORITY, min(node.worth, _MAX_PRIORITY)))

    def recall(self, node: Node, worth: float | None) -> None:
        super().recall(node, None if worth is None else int(worth))

    def set_priority(self, node: Node, priority: int) -> None:
        node.worth = priority
        if node.place:
            self._push(node)


class CostQueue(HeapQueue):
    """Cheapest to lose first: the tokens of a leaf's last block, times what computing one costs there, times its expected reuse.

    A token costs 1 + depth / 8,192: with that many before it, attention costs as much as all else in Qwen2.5-0.5B. The expected
    reuse is the number of uses (stored, or leased), each counting half after as many uses of anything as `HALF_LIFE` times the
    leaves that wait. The order of two leaves does not change with time alone, so the sum is kept as its logarithm, a node's
    `worth`, on a scale that moves with the clock.

    Source: the decay: Lee et al.: LRFU: a spectrum of policies that subsumes the least recently used and least frequently used
    policies, IEEE Transactions on Computers 50(12), 2001, equation 2.
    """

    name = "cost"
    HALF_LIFE = 1.0
    DEPTH_OF_DOUBLE_COST = 8192

    def __init__(self, block_size: int, clock: Iterator[int] | None = None) -> None:
        super().__init__(block_size, clock)
        self._age = 0.0

    def rank(self, leaf: Node) -> float:
        end = (leaf.start + len(leaf.edge)) // TOKEN_BYTES
        return log2(self._tail_len(leaf) * (1 + end / self.DEPTH_OF_DOUBLE_COST)) + leaf.worth

    def count_use(self, node: Node) -> None:
        self._age += 1 / (self.HALF_LIFE * max(1, self._num_waiting))
        node.worth = _log2_of_sum(node.worth, self._age)

    def absorb(self, parent: Node, child: Node) -> None:
        super().absorb(parent, child)
        parent.worth = _log2_of_sum(parent.worth, child.worth)

    def save_worth(self, node: Node) -> float | None:
        return None if node.worth is None else node.worth - self._age

    def recall(self, node: Node, worth: float | None) -> None:
        super().recall(node, None if worth is None else worth + self._age)

    def trim(self, leaf: Node) -> None:
        self._push(leaf)

    def num_at_once(self, leaf: Node) -> int:
        # Of full blocks the one before is always the cheaper.
        return len(leaf.blocks) if self._tail_len(leaf) == self.block_size else 1

    def _tail_len(self, leaf: Node) -> int:
        """Tokens in the last block."""
        return len(leaf.edge) // TOKEN_BYTES - (len(leaf.blocks) - 1) * self.block_size


PolicyMaker = Callable[[int], Eviction]
POLICIES: tuple[type[Eviction], ...] = (LruQueue, LfuQueue, FifoQueue, SlruQueue, PriorityQueue, CostQueue)


def policy_maker(function: str, eviction: str | PolicyMaker) -> PolicyMaker:
    """What makes the policy of that name for a block size; a maker comes back as it is. Raises ValueError listing the names."""
    if callable(eviction):
        return eviction
    for policy in POLICIES:
        if policy.name == eviction:
            return policy
    raise ValueError(f"{function}: eviction must be one of {', '.join(repr(policy.name) for policy in POLICIES)}, got {eviction!r}")


def _log2_of_sum(a: float | None, b: float) -> float:
    """log2(2**a + 2**b), without either power; None stands for the logarithm of nothing."""
    if a is None:
        return b
    low, high = min(a, b), max(a, b)
    return high + log1p(2 ** (low - high)) / _LN2
