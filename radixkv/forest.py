"""The nodes of all namespaces of a radix tree, and every change of them with the counters that follow from it.

What a change is for, and which keys and leases it serves, is `RadixTree`'s to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from radixkv.eviction_queue import Eviction, LruQueue
from radixkv.history import History
from radixkv.node import Node, Root, walk


class Added(NamedTuple):
    """What `Forest.add` did.

    Attributes:
        node: where the key ends now, perhaps inside its edge.
        first_adopted: the given blocks from here on belong to the forest now; those before were known.
        replaced: blocks that it gave up for longer ones.
        edge_before: of a leaf that has grown; None for a new one, and where all was known.
    """

    node: Node
    first_adopted: int
    replaced: list[int]
    edge_before: bytes | None = None


class Forest:
    """Roots by `namespace_key`, and what is below them.

    Args:
        block_bytes: of the keys of one block.
        queue: the eviction policy of what is not stale.
        history: told what is given up.

    Attributes:
        roots: of the namespaces that hold something.
        num_blocks, num_bytes: blocks of all nodes, and bytes of their edges.
        version: another one after each change by which a `Match` may become wrong.
        stale_queue: where the leaves of stale namespaces wait, which go before all others.
    """

    def __init__(self, block_bytes: int, queue: Eviction, history: History) -> None:
        self.roots: dict[tuple, Root] = {}
        self.num_blocks = self.num_bytes = self.version = 0
        self.queue = queue
        self.stale_queue = LruQueue(queue.block_size, queue.clock)
        self._history = history
        self._block_bytes = block_bytes
        self._stale_roots: set[tuple] = set()

    def nodes(self) -> list[Node]:
        """All nodes with the roots, each after its parent."""
        found: list[Node] = list(self.roots.values())
        for node in found:
            found += node.children.values()
        return found

    def root_of(self, root_key: tuple) -> Root:
        """The root of a namespace; a new one, which is not kept before it has a child, if it holds nothing."""
        root = self.roots.get(root_key)
        return Root(root_key, self.queue) if root is None else root

    def cut(self, node: Node, num_bytes: int) -> Node:
        """Makes a node end with the block that holds its first num_bytes; returns the node that does."""
        num_blocks = -(-num_bytes // self._block_bytes)
        return node if num_blocks == len(node.blocks) else self._split(node, num_blocks)

    def node_at(self, node: Node, border: int) -> Node:
        """The node on the path of a given one that ends after so many bytes of it, whole blocks: found upwards, or made by a split."""
        while node.parent is not None and node.start >= border:
            node = node.parent
        return self._branch(node, border - node.start)

    def extend(self, found: tuple[Node, int, int], key: bytes, adopted: list[int], base: int = 0) -> Added:
        """Stores what a walk did not find. A leaf that nobody leases, and in which the walk ended, grows in place.

        Whatever may fail for want of memory comes before what it would leave half done, or is undone.

        Args:
            found: what `walk` returned for the key. It ended before the key does.
            key: the tokens after the first `base` bytes of the prefix, whole blocks.
            adopted: the blocks from the one on that holds the first new token; the forest's from now on.
            base: where the key begins.
        """
        node, start, matched = found
        first_adopted = (start + matched - base) // self._block_bytes
        version, num_blocks, num_bytes = self.version + 1, self.num_blocks + len(adopted), self.num_bytes
        if matched == len(node.edge) and not node.locks and not node.children and start >= base:
            edge, num_full = key[start - base :], matched // self._block_bytes
            added = Added(node, first_adopted, node.blocks[num_full:], node.edge)
            num_blocks, num_bytes = num_blocks - len(added.replaced), num_bytes + len(edge) - matched
            self._reshape(node, edge, num_full, adopted)
        else:
            parent = self._branch(node, first_adopted * self._block_bytes + base - start)
            leaf = Node(key[first_adopted * self._block_bytes :], adopted, parent)
            # A split has made the version another one meanwhile.
            version, num_bytes, added = self.version + 1, num_bytes + len(leaf.edge), Added(leaf, first_adopted, [])
            self._link(leaf, parent)
        self.version, self.num_blocks, self.num_bytes = version, num_blocks, num_bytes
        return added

    def fill(self, leaf: Node, edge: bytes) -> None:
        """Gives a leaf, leased or not, more tokens of its last block."""
        version, num_bytes = self.version + 1, self.num_bytes + len(edge) - len(leaf.edge)
        self._reshape(leaf, edge, len(leaf.blocks), [])
        self.version, self.num_bytes = version, num_bytes

    def retract(self, added: Added) -> None:
        """Takes back what `extend` did last; for when what comes after it fails."""
        node = added.node
        if added.edge_before is None:
            self._unlink(node)
            self.num_blocks -= len(node.blocks)
            self.num_bytes -= len(node.edge)
        else:
            num_kept = len(added.edge_before) // self._block_bytes
            self.num_blocks -= len(node.blocks) - num_kept - len(added.replaced)
            self.num_bytes -= len(node.edge) - len(added.edge_before)
            self._reshape(node, added.edge_before, num_kept, added.replaced)

    def add_below(self, anchor: Node, key: bytes, blocks: Sequence[int]) -> Added:
        """Stores what follows a node, which ends at a block border. What is there already is left as it is, its recency too."""
        base = anchor.start + len(anchor.edge)
        found = walk(anchor, key, len(key), self._block_bytes)
        if found[1] + found[2] == base + len(key):
            return Added(found[0], len(blocks), [])
        return self.extend(found, key, list(blocks[(found[1] + found[2] - base) // self._block_bytes :]), base)

    def give_up(self, num_blocks: int, victims: Callable[[Node], None] | None = None) -> list[int]:
        """Gives up blocks, see `RadixTree.evict`; the history has been told why. Where memory runs out, fewer than were wanted."""
        given_up: list[int] = []
        victim, parent = None, None
        remember, remove_leaf = self._history.give_up, self._remove_leaf
        try:
            while (missing := num_blocks - len(given_up)) > 0:
                victim = self.first_to_go() if self._stale_roots else self.queue.first()
                if victim is None:
                    break
                if victims is not None:
                    victims(victim)
                blocks = victim.blocks
                num_lost = len(blocks) if victim.queue.takes_whole_leaves else victim.queue.num_at_once(victim)
                if num_lost > missing:
                    num_lost = missing
                if num_lost == len(blocks):
                    remember(victim, 0)
                    given_up += blocks[::-1]
                    parent = victim.parent
                    remove_leaf(victim)
                    parent = None
                else:
                    self._trim_leaf(victim, len(blocks) - num_lost, given_up)
        except MemoryError:
            # Ids that are given up and told to nobody would be lost to the pool.
            if parent is not None and victim is not None:
                self._finish_removal(victim, parent)
        if given_up:
            self.version += 1
            self.num_blocks -= len(given_up)
        return given_up

    def first_to_go(self) -> Node | None:
        """The leaf that `give_up` would begin with; None if nothing can go."""
        if self._stale_roots and (victim := self.stale_queue.first()) is not None:
            return victim
        return self.queue.first()

    def retire(self, prefix_key: tuple) -> None:
        """Makes namespaces stale, see `RadixTree.retire`."""
        retired: list[Node] = []
        for key, root in self.roots.items():
            if key[: len(prefix_key)] == prefix_key and key not in self._stale_roots:
                self._stale_roots.add(key)
                retired.append(root)
        for node in retired:
            retired += node.children.values()
            node.queue.discard(node)
            node.queue = self.stale_queue
            if not node.locks and not node.children:
                # With a new stamp: by the old one an entry that it left behind in the policy would pass for one of a waiting leaf.
                node.queue.add(node)

    def _split(self, node: Node, num_blocks: int) -> Node:
        self.version += 1
        return node.split(num_blocks, self._block_bytes)

    def _branch(self, node: Node, num_bytes: int) -> Node:
        """The node that ends after the first num_bytes (whole blocks) of a node: itself, its parent, or made by a split."""
        if num_bytes == len(node.edge):
            return node
        if num_bytes:
            return self._split(node, num_bytes // self._block_bytes)
        assert node.parent is not None
        return node.parent

    def _link(self, leaf: Node, parent: Node) -> None:
        """Puts a new leaf in its place, or, if memory is short, raises and changes nothing."""
        try:
            parent.add_child(leaf.edge[: self._block_bytes], leaf)
            if isinstance(parent, Root):
                self.roots[parent.namespace_key] = parent
            parent.queue.discard(parent)
            leaf.queue.add(leaf)
        except BaseException:
            self._unlink(leaf)
            raise

    def _unlink(self, leaf: Node) -> None:
        parent, key = leaf.parent, leaf.edge[: self._block_bytes]
        assert parent is not None
        leaf.queue.discard(leaf)
        leaf.parent = None
        if parent.children.get(key) is leaf:
            parent.remove_child(key)
        if parent.children:
            return
        if isinstance(parent, Root):
            self.roots.pop(parent.namespace_key, None)
        elif not parent.locks and not parent.place:
            parent.queue.expose(parent)

    def _reshape(self, leaf: Node, edge: bytes, num_kept: int, tail: list[int]) -> None:
        """Gives a leaf another edge that begins with the same tokens, and other blocks after the first num_kept.

        If memory is short, it raises and changes nothing.
        """
        parent, edge_before, tail_before = leaf.parent, leaf.edge, leaf.blocks[num_kept:]
        assert parent is not None
        key_before, key = edge_before[: self._block_bytes], edge[: self._block_bytes]
        try:
            if key != key_before:
                parent.add_child(key, leaf)
                parent.remove_child(key_before)
            leaf.blocks[num_kept:] = tail
            leaf.edge = edge
            leaf.queue.renew(leaf)
        except BaseException:
            leaf.edge, leaf.blocks[num_kept:] = edge_before, tail_before
            if key != key_before and key in parent.children:
                parent.remove_child(key)
                if key_before not in parent.children:
                    parent.add_child(key_before, leaf)
            raise

    def _trim_leaf(self, leaf: Node, num_kept: int, given_up: list[int]) -> None:
        kept_bytes = num_kept * self._block_bytes
        self._history.give_up(leaf, kept_bytes)
        edge, blocks, num_bytes = leaf.edge[:kept_bytes], leaf.blocks[:num_kept], self.num_bytes - len(leaf.edge) + kept_bytes
        given_up += leaf.blocks[: num_kept - 1 : -1]
        leaf.edge, leaf.blocks, self.num_bytes = edge, blocks, num_bytes
        leaf.queue.trim(leaf)

    def _remove_leaf(self, leaf: Node) -> None:
        parent, queue, edge = leaf.parent, leaf.queue, leaf.edge
        assert parent is not None
        queue.discard(leaf)
        self.num_bytes -= len(edge)
        parent.remove_child(edge[: self._block_bytes])
        leaf.parent = None
        queue.absorb(parent, leaf)
        if leaf.hits:
            parent.hits += leaf.hits
        if not parent.children:
            self._lose_children(parent)

    def _lose_children(self, parent: Node) -> None:
        """A node has lost its last child."""
        self._history.lose_children(parent)
        if isinstance(parent, Root):
            self.roots.pop(parent.namespace_key, None)
            self._stale_roots.discard(parent.namespace_key)
        elif not parent.locks and not parent.place:
            parent.queue.expose(parent)

    def _finish_removal(self, leaf: Node, parent: Node) -> None:
        """Does what is left to do of a removal for which memory was too short, wherever that was."""
        leaf.queue.discard(leaf)
        key = leaf.edge[: self._block_bytes]
        if parent.children.get(key) is leaf:
            del parent.children[key]
        parent.sort_keys()
        parent.find_trunk()
        if leaf.parent is not None:
            leaf.parent = None
            leaf.queue.absorb(parent, leaf)
        if not parent.children:
            self._lose_children(parent)
        self.num_bytes = sum(len(node.edge) for node in self.nodes())
