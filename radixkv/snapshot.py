"""What of a cache is saved: the nodes of its trees, each token once, and where their K/V lies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radixkv.node import Node, Root, walk_on
from radixkv.pool import BlockPool
from radixkv.saved_nodes import SavedNodes
from radixkv.token_key import TOKEN_BYTES, namespace_key, namespace_of
from radixkv.tree import RadixTree

if TYPE_CHECKING:
    from radixkv.storage import CacheStorage


class Source(NamedTuple):
    """A pool, and the slots of the tokens that are saved from it, in the order of the file."""

    pool: BlockPool
    slots: list[np.ndarray]

    def add(self, node: Node, first: int) -> None:
        """The tokens of a node from its first-th on."""
        blocks, block_size = np.asarray(node.blocks, np.int64), self.pool.block_size
        self.slots.append((blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[first : len(node.edge) // TOKEN_BYTES])


class Snapshot:
    """The nodes of all namespaces of the present weights, and where their tokens' K/V lies."""

    def __init__(self, cache: CacheStorage) -> None:
        self._cache, self._tree = cache, cache.tree
        self._namespaces: list[tuple] = []
        # By their keys, because 1, 1.0 and True are equal to a dict.
        self._namespace_ids: dict[tuple, int] = {}
        self._columns: list[tuple[int, int, int, int, int]] = []
        self._worths: list[float] = []
        self._stamps: list[tuple[bool, float]] = []
        self._edges: list[bytes] = []
        # Of each node of a tree that was walked: its place among the saved ones, -1 for a root and for what need not be saved.
        self._places: dict[Node, int] = {}
        self.sources = [Source(cache.pool, [])]
        for node, namespace, position in self._walk(cache.tree):
            self._add(self.sources[0], node, namespace, position, self._places[self._parent(node)], 0)
        if cache.tier is not None:
            self.sources.append(Source(cache.tier.pool, []))
            # Of each node of the second tier: how many bytes of its prefix are in the pool, and the node in which they end.
            self._in_pool: dict[Node, tuple[int, Node | None]] = {}
            for node, namespace, position in self._walk(cache.tier.tree):
                self._add_beyond_pool(node, namespace, position)

    def nodes(self) -> SavedNodes:
        """As the file has them."""
        parents, positions, namespace_ids, lengths, hits = np.array(self._columns, np.int64).reshape(-1, 5).T
        order = sorted(range(len(self._stamps)), key=self._stamps.__getitem__)
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        worths = np.array(self._worths, np.float64)
        return SavedNodes(parents, positions, namespace_ids, lengths, ranks, hits, worths, b"".join(self._edges), self._namespaces)

    def _walk(self, tree: RadixTree) -> Iterator[tuple[Node, tuple, int]]:
        """The nodes of a tree, each after its parent, with their full namespaces and the position of their first token."""
        above: dict[Node, tuple[tuple, int]] = {}
        for node in tree.nodes():
            if isinstance(node, Root):
                namespace = namespace_of(node.namespace_key)
                if self._cache.is_current(namespace):
                    above[node], self._places[node] = (namespace, 0), -1
            elif (entry := above.get(self._parent(node))) is not None:
                namespace, position = entry
                above[node] = namespace, position + len(node.edge) // TOKEN_BYTES
                yield node, namespace, position

    def _add(self, source: Source, node: Node, namespace: tuple, position: int, parent: int, first: int) -> None:
        self._places[node] = len(self._columns)
        namespace_id = self._namespace_ids.setdefault(namespace_key(namespace), len(self._namespaces))
        if namespace_id == len(self._namespaces):
            self._namespaces.append(self._cache.to_saved(namespace))
        self._columns.append((parent, position + first, namespace_id, len(node.edge) // TOKEN_BYTES - first, node.hits))
        worth = node.queue.save_worth(node) if node.queue is self._tree.queue else None
        self._worths.append(np.nan if worth is None else worth)
        # What was evicted to the second tier was used before what was not.
        self._stamps.append((source is self.sources[0], node.stamp))
        self._edges.append(node.edge[first * TOKEN_BYTES :])
        source.add(node, first)

    def _add_beyond_pool(self, node: Node, namespace: tuple, position: int) -> None:
        """Saves those tokens of a node of the second tier that the pool does not have."""
        above = self._parent(node)
        known = 0
        place: Node | None
        if isinstance(above, Root):
            place = self._tree.roots().get(namespace_key(namespace))
        else:
            known, place = self._in_pool[above]
        if place is not None and known == node.start:
            place, start, matched = walk_on(place, node.start, node.edge, self._tree.block_size * TOKEN_BYTES)
            known = start + matched
        self._in_pool[node] = known, place
        if known == node.start + len(node.edge):
            self._places[node] = -1
            return
        parent = self._places[above]
        if known >= node.start and place is not None and not isinstance(place, Root):
            parent = self._places[place]
        self._add(self.sources[1], node, namespace, position, parent, max(0, known // TOKEN_BYTES - position))

    @staticmethod
    def _parent(node: Node) -> Node:
        assert node.parent is not None
        return node.parent
