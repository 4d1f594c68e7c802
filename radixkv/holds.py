"""The holds that leases have on nodes of a tree, counted."""

from __future__ import annotations

from collections import deque

from radixkv.node import Node


class Holds:
    """How many leases are out, and how many blocks they protect.

    Attributes:
        returned: of leases that were released or dropped and that were not yet taken in, the node, and whether it counts as used.
            Appending is all that a lease does with it.
        num_leases, num_blocks: as of the last `take_in`.
    """

    def __init__(self) -> None:
        self.returned: deque[tuple[Node, bool]] = deque()
        self.num_leases = 0
        self.num_blocks = 0

    def add(self, node: Node) -> None:
        """One more hold on a node and all above it."""
        num_leases, num_blocks = self.num_leases + 1, self.num_blocks
        held: Node | None = node
        while held is not None and not held.locks:
            num_blocks += len(held.blocks)
            held = held.parent
        node.queue.discard(node)
        # Now that memory can no longer be short. A node with locks is already counted by its parent, and so on upwards.
        self.num_leases, self.num_blocks = num_leases, num_blocks
        held = node
        while held is not None:
            held.locks += 1
            if held.locks > 1:
                break
            held = held.parent

    def take_in(self) -> None:
        """Ends the holds that have come back."""
        while self.returned:
            # It stays in the queue until nothing can fail any more.
            node, is_used = self.returned[0]
            num_leases, num_blocks = self.num_leases - 1, self.num_blocks
            held: Node | None = node
            while held is not None and held.locks == 1:
                num_blocks -= len(held.blocks)
                held = held.parent
            is_free = node.locks == 1 and not node.children
            if is_used:
                (node.queue.restore if is_free else node.queue.touch)(node)
            elif is_free:
                node.queue.expose(node)
            self.returned.popleft()
            self.num_leases, self.num_blocks = num_leases, num_blocks
            held = node
            while held is not None:
                held.locks -= 1
                if held.locks:
                    break
                held = held.parent
