"""Which leaf goes first: least recently used, by a logical clock.

Leaves that were used wait in the order of their use. A node that lost its last child becomes a leaf with a stamp from
the past, so it waits in a heap beside them. Finding, moving and removing never looks at the other leaves.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from radixkv.node import Node

_NOWHERE, _USED, _EXPOSED = 0, 1, 2


class LruQueue:
    """The unlocked leaves of a tree, least recently used first. No wall clock, no ties."""

    def __init__(self) -> None:
        self._clock = 0
        self._used: OrderedDict[Node, None] = OrderedDict()
        # A node that leaves the heap leaves its entry behind. Only evictions add entries, and what is older than the leaf that
        # an eviction takes has come up before, so there are never more entries than the tree had nodes.
        self._exposed: list[tuple[int, int, Node]] = []

    def touch(self, node: Node) -> None:
        """Marks a node as used now, whether it waits here or not."""
        self._clock += 1
        node.stamp = self._clock
        if node.place == _USED:
            self._used.move_to_end(node)
        elif node.place == _EXPOSED:
            node.place = _USED
            self._used[node] = None

    def add(self, node: Node) -> None:
        """Takes in a leaf that is used now."""
        self._clock += 1
        node.stamp = self._clock
        node.place = _USED
        self._used[node] = None

    def expose(self, node: Node) -> None:
        """Takes in a node that has just become a leaf, at the time of its own last use."""
        node.place = _EXPOSED
        self._clock += 1
        heapq.heappush(self._exposed, (node.stamp, self._clock, node))

    def discard(self, node: Node) -> None:
        """Lets go of a node that is locked, has a child or is leaving the tree; nothing happens if it is not here."""
        if node.place == _USED:
            del self._used[node]
        node.place = _NOWHERE

    def first(self) -> Node | None:
        """The least recently used leaf, which stays where it is; None if there is none."""
        exposed = self._exposed
        while exposed and not _is_current(exposed[0]):
            heapq.heappop(exposed)
        used = next(iter(self._used), None)
        if exposed and (used is None or exposed[0][0] < used.stamp):
            return exposed[0][2]
        return used

    def nodes(self) -> list[Node]:
        """All that wait here, least recently used first (it sorts; for checks)."""
        return sorted([*self._used, *(entry[2] for entry in self._exposed if _is_current(entry))], key=lambda node: node.stamp)


def _is_current(entry: tuple[int, int, Node]) -> bool:
    stamp, _, node = entry
    return node.place == _EXPOSED and node.stamp == stamp
