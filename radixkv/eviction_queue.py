"""The interface of an eviction policy, and the two structures that policies keep their leaves in.

The tree says what happens to its nodes; a policy keeps the unlocked leaves in the order in which they are to go. All of
them share three rules. Time is a logical clock, so nothing ties and replicas agree. What was used counts for everything
above it: a node that loses a child inherits what the child was used for. And no call looks at the other leaves: O(1) in a
`LruQueue`, O(log n), amortised, in a `HeapQueue`.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar

from radixkv.node import Node

_NOWHERE, _USED = 0, 1


class Eviction(ABC):
    """The order in which the unlocked leaves of one tree go.

    Args:
        block_size: of the tree.
        clock: logical time, to be shared by policies whose stamps must not tie; None for one of its own.

    Attributes:
        name: what a user calls it.
        takes_priority: whether `set_priority` means anything to it.
        takes_whole_leaves: whether all blocks of the first leaf go before any other leaf's would: what has a `num_at_once` of its own
            says itself how many do.

    Of a node a policy writes `stamp`, `worth`, `place`, `older` and `newer`; `place` is falsy for a node that does not wait here.
    """

    name: ClassVar[str]
    takes_priority: ClassVar[bool] = False

    def __init__(self, block_size: int, clock: Iterator[int] | None = None) -> None:
        self.block_size = block_size
        self.clock = count(1) if clock is None else clock
        self.takes_whole_leaves = type(self).num_at_once is Eviction.num_at_once

    @abstractmethod
    def add(self, leaf: Node) -> None:
        """A leaf was stored; it waits from now on."""

    @abstractmethod
    def renew(self, node: Node) -> None:
        """What is known was stored again, or a waiting leaf has grown in place; it waits if it did."""

    @abstractmethod
    def touch(self, node: Node) -> None:
        """A lease has ended on a node that is still locked or has children, and so does not wait."""

    @abstractmethod
    def restore(self, leaf: Node) -> None:
        """The last lease on a leaf has ended; it waits from now on."""

    @abstractmethod
    def expose(self, leaf: Node) -> None:
        """An unlocked node has lost its last child, or a lease that leaves no trace: it waits from now on, and this is no use of it."""

    @abstractmethod
    def discard(self, node: Node) -> None:
        """A node is locked, has a child or is leaving the tree; nothing happens if it does not wait."""

    @abstractmethod
    def first(self) -> Node | None:
        """The leaf to go next, which stays where it is; None if none waits."""

    @abstractmethod
    def nodes(self) -> list[Node]:
        """All that wait, in the order in which they would go if nothing else happened (it sorts; for checks)."""

    def num_at_once(self, leaf: Node) -> int:
        """How many blocks from the end of the first leaf go before any other leaf's would."""
        return len(leaf.blocks)

    def absorb(self, parent: Node, child: Node) -> None:
        """A child leaves the tree: whoever used it used all above it."""
        if child.stamp > parent.stamp:
            parent.stamp = child.stamp

    def trim(self, leaf: Node) -> None:  # noqa: B027 - most policies have nothing to do here
        """A waiting leaf has lost blocks from its end, not all of them."""

    def save_worth(self, node: Node) -> float | None:
        """A node's `worth`, as it is saved with a cache; None for nothing."""
        return None

    def recall(self, node: Node, worth: float | None) -> None:
        """A node was loaded from a file: it was used last now, and is worth what `save_worth` said, if that was of the same policy."""
        self.renew(node)

    def set_priority(self, node: Node, priority: int) -> None:  # noqa: B027
        """The user gave a priority to a node; only with `takes_priority`."""


class LruQueue(Eviction):
    """Least recently used first.

    Leaves that were used wait in the order of their use. A node that lost its last child becomes a leaf with a stamp from
    the past, so it waits in a heap beside them.
    """

    name = "lru"

    def __init__(self, block_size: int, clock: Iterator[int] | None = None) -> None:
        super().__init__(block_size, clock)
        # No leaf, but where the ring of those that were used begins and ends: `newer` is the least recently used of them. Each node has
        # its own links, so that taking one out reads its neighbours only, and no table of all.
        self._ends = Node(b"", [], None)
        self._ends.older = self._ends.newer = self._ends
        # A node that leaves the heap leaves its entry behind, until it comes up or half of all are such.
        self._exposed: list[tuple[int, int, Node]] = []
        self._num_exposed = 0

    def add(self, leaf: Node) -> None:
        leaf.stamp = next(self.clock)
        self._link(leaf)

    def touch(self, node: Node) -> None:
        node.stamp = next(self.clock)
        if node.place:
            # This class's own: a policy built on it may do more when a leaf stops to wait, and this one does not.
            LruQueue.discard(self, node)
            self._link(node)

    def recall(self, node: Node, worth: float | None) -> None:
        LruQueue.touch(self, node)

    renew = touch
    restore = add

    def expose(self, leaf: Node) -> None:
        entry = (leaf.stamp, next(self.clock), leaf)
        heapq.heappush(self._exposed, entry)
        leaf.place = entry
        self._num_exposed += 1
        if len(self._exposed) > 2 * self._num_exposed + 64:
            self._exposed = [entry for entry in self._exposed if _is_current(entry)]
            heapq.heapify(self._exposed)

    def discard(self, node: Node) -> None:
        if node.place == _USED:
            older, newer = node.older, node.newer
            older.newer = newer
            newer.older = older
            node.older = node.newer = None
        elif node.place:
            self._num_exposed -= 1
        node.place = _NOWHERE

    def first(self) -> Node | None:
        used, exposed = self._ends.newer, self._exposed
        if exposed:
            while exposed and not _is_current(exposed[0]):
                heapq.heappop(exposed)
            if exposed and (used is self._ends or exposed[0][0] < used.stamp):
                return exposed[0][2]
        return self.first_of_others() if used is self._ends else used

    def first_of_others(self) -> Node | None:
        """What goes when none of these leaves waits: nothing, unless a policy has others beside them."""
        return None

    def nodes(self) -> list[Node]:
        waiting = [entry[2] for entry in self._exposed if _is_current(entry)]
        used = self._ends.newer
        while used is not self._ends:
            waiting.append(used)
            used = used.newer
        return sorted(waiting, key=lambda node: node.stamp)

    def _link(self, leaf: Node) -> None:
        ends = self._ends
        newest = ends.older
        leaf.place, leaf.older, leaf.newer = _USED, newest, ends
        newest.newer = ends.older = leaf


class HeapQueue(Eviction):
    """What the policies with an order of their own share: the lowest `rank` first, the least recently used of equals.

    A leaf whose rank changes gets a new entry, and the old one stays in the heap until it comes up or half of all are such.
    """

    def __init__(self, block_size: int, clock: Iterator[int] | None = None) -> None:
        super().__init__(block_size, clock)
        self._heap: list[tuple[Any, int, int, Node]] = []
        self._num_waiting = 0

    @abstractmethod
    def rank(self, leaf: Node) -> Any:
        """What a waiting leaf is sorted by before its stamp."""

    def count_use(self, node: Node) -> None:  # noqa: B027
        """A node was stored for the first time or a lease on it has ended: make that part of its `worth`."""

    def add(self, leaf: Node) -> None:
        leaf.stamp = next(self.clock)
        self.count_use(leaf)
        self.expose(leaf)

    def renew(self, node: Node) -> None:
        node.stamp = next(self.clock)
        if node.place:
            self._push(node)

    def touch(self, node: Node) -> None:
        node.stamp = next(self.clock)
        self.count_use(node)

    restore = add

    def recall(self, node: Node, worth: float | None) -> None:
        node.stamp = next(self.clock)
        if worth is not None or not node.place:
            node.worth = worth
        if node.place:
            self._push(node)

    def expose(self, leaf: Node) -> None:
        num_waiting = self._num_waiting + 1
        self._push(leaf)
        self._num_waiting = num_waiting

    def discard(self, node: Node) -> None:
        if node.place:
            node.place = _NOWHERE
            self._num_waiting -= 1

    def first(self) -> Node | None:
        heap = self._heap
        while heap and heap[0][3].place is not heap[0]:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def nodes(self) -> list[Node]:
        return [entry[3] for entry in sorted(entry for entry in self._heap if entry[3].place is entry)]

    def _push(self, leaf: Node) -> None:
        entry = (self.rank(leaf), leaf.stamp, next(self.clock), leaf)
        heapq.heappush(self._heap, entry)
        leaf.place = entry
        if len(self._heap) > 2 * self._num_waiting + 64:
            self._heap = [entry for entry in self._heap if entry[3].place is entry]
            heapq.heapify(self._heap)


def _is_current(entry: tuple[int, int, Node]) -> bool:
    return entry[2].place is entry
