"""One edge of the radix tree, the sorted keys of its children, and the walk along a key."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from radixkv.token_key import common_bytes, common_bytes_short

if TYPE_CHECKING:
    from radixkv.eviction_queue import Eviction

_BUCKET_SIZE = 512
# Of all leaves: most nodes are leaves, and a dict of its own takes each longer to make and to drop.
_NO_CHILDREN: Any = MappingProxyType({})
# Among more children than these a walk does not look for a trunk.
_MAX_TRUNK_SIBLINGS = 3


class SortedKeys:
    """Byte strings in order, in buckets, so that adding to a hundred thousand moves no more than a bucket.

    A removed key stays in its bucket at first: finding it there would mean to read keys all over the memory, at every eviction. Once more
    than a quarter of all keys are such, each removal sweeps a bucket.
    """

    __slots__ = ("_buckets", "_firsts", "_gone", "_num_keys", "_next_swept")

    def __init__(self, keys: Iterable[bytes]) -> None:
        keys = sorted(keys)
        self._buckets = [keys[i : i + _BUCKET_SIZE] for i in range(0, len(keys), _BUCKET_SIZE)]
        self._firsts = [bucket[0] for bucket in self._buckets]
        self._gone: set[bytes] = set()
        self._num_keys = len(keys)
        self._next_swept = 0

    def add(self, key: bytes) -> None:
        """Puts a new key in its place, or, if memory is short, raises and changes nothing."""
        if key in self._gone:
            self._gone.remove(key)
            return
        num_keys = self._num_keys + 1
        if not self._buckets:
            self._buckets, self._firsts, self._num_keys = [[key]], [key], num_keys
            return
        index = max(0, bisect_right(self._firsts, key) - 1)
        bucket = self._buckets[index]
        if len(bucket) >= 2 * _BUCKET_SIZE:
            halves = [bucket[:_BUCKET_SIZE], bucket[_BUCKET_SIZE:]]
            buckets = [*self._buckets[:index], *halves, *self._buckets[index + 1 :]]
            self._firsts = [bucket[0] for bucket in buckets]
            self._buckets = buckets
            index += key >= halves[1][0]
            bucket = buckets[index]
        insort(bucket, key)
        self._firsts[index] = bucket[0]
        self._num_keys = num_keys

    def remove(self, key: bytes) -> None:
        """Takes out a key that is there."""
        gone = self._gone
        gone.add(key)
        if 4 * len(gone) > self._num_keys:
            index = self._next_swept = (self._next_swept + 1) % len(self._buckets)
            swept = gone.intersection(self._buckets[index])
            self._buckets[index][:] = [kept for kept in self._buckets[index] if kept not in swept]
            self._forget(index, swept)

    def neighbours(self, key: bytes) -> list[bytes]:
        """The last key up to `key` and the first one after it, those that exist: one of them shares most with it."""
        while gone := self._gone.intersection(found := self._around(key)):
            index = bisect_right(self._firsts, gone_key := gone.pop()) - 1
            del self._buckets[index][bisect_left(self._buckets[index], gone_key)]
            self._forget(index, {gone_key})
        return found

    def _around(self, key: bytes) -> list[bytes]:
        """The neighbours of a key, those included that are gone."""
        found = []
        index = bisect_right(self._firsts, key) - 1
        after = 0
        if index >= 0:
            bucket = self._buckets[index]
            after = bisect_right(bucket, key)
            found.append(bucket[after - 1])
            if after < len(bucket):
                found.append(bucket[after])
                return found
        if index + 1 < len(self._buckets):
            found.append(self._buckets[index + 1][0])
        return found

    def _forget(self, index: int, gone: set[bytes]) -> None:
        """Those that were gone have left their bucket too."""
        self._gone -= gone
        self._num_keys -= len(gone)
        if self._buckets[index]:
            self._firsts[index] = self._buckets[index][0]
        else:
            del self._buckets[index], self._firsts[index]

    def to_list(self) -> list[bytes]:
        """All keys in order."""
        return [key for bucket in self._buckets for key in bucket if key not in self._gone]


class _WalkedSlots:
    """What a walk reads of a node: slots of a base come first, so that they lie in one line of the processor's caches."""

    __slots__ = ("edge", "trunk", "children")


class Node(_WalkedSlots):
    """A run of tokens, the blocks that hold their K/V, and what follows it.

    Attributes:
        edge: the tokens, as key bytes; it starts at a block border, and only a leaf may end inside a block.
        blocks: the ids of this node's own blocks, ceil(len(edge) / block bytes) of them; never its ancestors'.
        parent: None for the root of a namespace and for a node that left the tree.
        children: by the bytes of their first block (shorter for a leaf that ends inside its first block).
        sorted_keys: the keys of `children` in order, once there are two.
        trunk: of a few children the only one that has children; a walk tries it before it asks `children`. None for none.
        hits: admitted prompts whose reused prefix ended here or in what was below and is gone.
        locks: leases on this node plus children with locks; 0 means that it may be evicted.
        start: where the edge starts in the prefix, in bytes.
        queue: the eviction policy that it belongs to, its parent's.
        stamp: the logical time that its policy sorts by, as a rule that of its last use; what its children were used for is not in it.
        worth: what else the policy knows of its use; None for nothing.
        place: where the policy has it.
        older, newer: its neighbours in a policy that keeps its leaves in a ring; None where it is in none.
    """

    __slots__ = (
        "blocks", "parent", "sorted_keys", "hits", "locks", "start", "queue", "stamp", "worth", "place", "older", "newer"
    )  # fmt: skip

    queue: Eviction

    def __init__(self, edge: bytes, blocks: list[int], parent: Node | None) -> None:
        self.edge = edge
        self.blocks = blocks
        self.parent = parent
        self.children: dict[bytes, Node] = _NO_CHILDREN
        self.sorted_keys: SortedKeys | None = None
        self.trunk: Node | None = None
        self.hits = 0
        self.locks = 0
        self.stamp = 0
        self.worth: Any = None
        self.place: Any = 0
        self.older: Any = None
        self.newer: Any = None
        self.start = 0
        if parent is not None:
            self.start = parent.start + len(parent.edge)
            self.queue = parent.queue

    def add_child(self, key: bytes, child: Node) -> None:
        """Adds a child under a key that no child has, or, if memory is short, raises and changes nothing."""
        was_leaf = not self.children
        children = {} if was_leaf else self.children
        try:
            if self.sorted_keys is not None:
                self.sorted_keys.add(key)
            elif not was_leaf:
                self.sorted_keys = SortedKeys([*children, key])
            children[key] = child
            self.children = children
            self.find_trunk()
            if was_leaf and self.parent is not None:
                self.parent.find_trunk()
        except BaseException:
            children.pop(key, None)
            if was_leaf:
                self.children = _NO_CHILDREN
            self.sort_keys()
            self.find_trunk()
            raise

    def remove_child(self, key: bytes) -> None:
        """Removes the child under that key."""
        children, sorted_keys = self.children, self.sorted_keys
        del children[key]
        if sorted_keys is not None:
            sorted_keys.remove(key)
        if len(children) <= _MAX_TRUNK_SIBLINGS + 1:
            self.find_trunk()

    def sort_keys(self) -> None:
        """Makes the sorted keys anew from the children."""
        self.sorted_keys = SortedKeys(self.children) if len(self.children) > 1 else None

    def find_trunk(self) -> None:
        """Looks which child is the trunk. What is none any more, because it lost its children, may stay it: that costs time only."""
        # For as long as memory may be too short to look.
        self.trunk = trunk = None
        if len(self.children) <= 1 + _MAX_TRUNK_SIBLINGS:
            for child in self.children.values():
                if child.children:
                    if trunk is not None:
                        trunk = None
                        break
                    trunk = child
        self.trunk = trunk

    def nearest_child(self, key: bytes) -> tuple[Node | None, int]:
        """A child whose first block shares the longest prefix with `key`, and how many bytes that is; None if none does."""
        nearest, most = None, 0
        # The one before `key` comes first and wins a tie: it alone may be used up by the common prefix.
        for candidate in self.children if self.sorted_keys is None else self.sorted_keys.neighbours(key):
            common = common_bytes_short(candidate, key)
            if common > most:
                nearest, most = self.children[candidate], common
        return nearest, most

    def path_blocks(self) -> list[int]:
        """Ids of the blocks from the root to the end of this node."""
        path = []
        node: Node | None = self
        while node is not None:
            path.append(node.blocks)
            node = node.parent
        found: list[int] = []
        for blocks in reversed(path):
            found += blocks
        return found

    def split(self, num_blocks: int, block_bytes: int) -> Node:
        """Puts the first blocks into a new node above, which it returns. What is left is still this node, so leases on it stay right."""
        assert self.parent is not None
        border = num_blocks * block_bytes
        upper = Node(self.edge[:border], self.blocks[:num_blocks], self.parent)
        upper.locks = 1 if self.locks else 0
        edge, blocks, start = self.edge[border:], self.blocks[num_blocks:], self.start + border
        upper.children, key = {edge[:block_bytes]: self}, self.edge[:block_bytes]
        # From here on memory cannot be too short, but for finding the trunks.
        self.parent.children[key] = upper
        self.parent.trunk = None
        parent, self.parent = self.parent, upper
        self.edge, self.blocks, self.start = edge, blocks, start
        upper.find_trunk()
        parent.find_trunk()
        return upper


class Root(Node):
    """The empty edge at the top of one namespace."""

    __slots__ = ("namespace_key",)

    def __init__(self, namespace_key: tuple, queue: Eviction) -> None:
        super().__init__(b"", [], None)
        self.namespace_key = namespace_key
        self.queue = queue
        # Locked for good, so that it is never evicted and every walk upwards ends here.
        self.locks = 1


def walk(root: Node, key: bytes, end: int, block_bytes: int) -> tuple[Node, int, int]:
    """Follows key[:end] down from a root, or from the end of any node that ends at a block border.

    Returns:
        The last node that it enters, the byte of the whole prefix at which that node starts, and how many bytes of its edge match.
    """
    node, position, base = root, 0, root.start + len(root.edge)
    while position < end:
        # A lookup hashes a block, which takes longer than comparing it. Where the trunk is the wrong guess, a leaf is next: that is
        # one comparison too many per walk.
        trunk = node.trunk
        if trunk is not None and key.startswith(edge := trunk.edge, position):
            node = trunk
            position += len(edge)
            continue
        children = node.children
        if not children:
            break
        block = key[position : position + block_bytes]
        child = children.get(block)
        if child is None:
            nearest, matched = node.nearest_child(block)
            if nearest is not None:
                return nearest, nearest.start, min(matched, end - position)
            break
        edge = child.edge
        # An edge of one block is the child's key, which the lookup has compared.
        if (edge_bytes := len(edge)) > block_bytes and (child is trunk or not key.startswith(edge, position)):
            return child, child.start, min(common_bytes(edge, key, position), end - position)
        node = child
        position += edge_bytes
    return node, node.start, base + min(position, end) - node.start


def walk_on(node: Node, border: int, key: bytes, block_bytes: int) -> tuple[Node, int, int]:
    """Follows a key from a block border on, after so many bytes of the path of a node; returns what `walk` does."""
    while node.parent is not None and node.start >= border:
        node = node.parent
    piece = node.edge[border - node.start : border - node.start + len(key)]
    common = common_bytes(piece, key, 0)
    if border + common < node.start + len(node.edge):
        return node, node.start, border + common - node.start
    return walk(node, key[common:], len(key) - common, block_bytes)
