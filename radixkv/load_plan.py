"""What of a saved file goes where: the most recently used prefixes first, as many as free blocks take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from radixkv.token_key import TOKEN_BYTES
from radixkv.tree import RadixTree


@dataclass(frozen=True)
class SavedNodes:
    """Runs of tokens, each continuing the prefix of its parent, as a file has them.

    Attributes:
        parents: int64 [num_nodes], an earlier node or -1.
        positions: int64 [num_nodes], where each run begins in its prefix; what precedes it are the first tokens of its parent's prefix,
            of which it may leave the last ones out.
        namespace_ids: int64 [num_nodes], into `namespaces`, a parent's like its child's. lengths: int64 [num_nodes], tokens of each.
        ranks: int64 [num_nodes], the order of their last uses, the earliest first.
        tokens: the tokens of all nodes, in their order, as key bytes. namespaces: without the version of the weights.
    """

    NUM_COLUMNS: ClassVar[int] = 5

    parents: np.ndarray
    positions: np.ndarray
    namespace_ids: np.ndarray
    lengths: np.ndarray
    ranks: np.ndarray
    tokens: bytes
    namespaces: list[tuple]

    @classmethod
    def from_bytes(cls, columns: bytes, tokens: bytes, namespaces: list[tuple]) -> SavedNodes:
        """What `to_array` made. Raises ValueError for what no tree can be."""
        parents, positions, namespace_ids, lengths, ranks = np.frombuffer(columns, "<i8").reshape(-1, cls.NUM_COLUMNS).T.copy()
        inner = parents >= 0
        above = parents[inner]
        if (
            (parents < -1).any()
            or (parents >= np.arange(len(parents))).any()
            or (namespace_ids < 0).any()
            or (namespace_ids >= len(namespaces)).any()
            or (namespace_ids[inner] != namespace_ids[above]).any()
            or (positions[~inner] != 0).any()
            or (positions < 0).any()
            or (positions[inner] > positions[above] + lengths[above]).any()
            or (lengths < 1).any()
            or (lengths > len(tokens)).any()
            or int(lengths.sum()) * TOKEN_BYTES != len(tokens)
            or (np.frombuffer(tokens, "<i4") < 0).any()
        ):
            raise ValueError("its nodes are not those of a tree")
        return cls(parents, positions, namespace_ids, lengths, ranks, tokens, namespaces)

    def to_array(self) -> np.ndarray:
        """int64 [num_nodes, 5]."""
        return np.ascontiguousarray(np.stack([self.parents, self.positions, self.namespace_ids, self.lengths, self.ranks], 1), "<i8")

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @cached_property
    def links(self) -> list[tuple[int, int, int]]:
        """Per node its parent, its position, and its place in the file less that position; lists, which walks read in half the time."""
        offsets = np.cumsum(self.lengths) - self.lengths - self.positions
        return list(zip(self.parents.tolist(), self.positions.tolist(), offsets.tolist(), strict=True))

    def num_path_tokens(self, node: int) -> int:
        """Tokens from the top to the end of a node."""
        return int(self.positions[node] + self.lengths[node])

    def spans(self, node: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Where positions [begin, end) of the prefix of a node lie: (node, first, last + 1 in the file), from the end backwards."""
        links = self.links
        while node >= 0 and begin < end:
            parent, position, offset = links[node]
            if position < end:
                yield node, max(begin, position) + offset, end + offset
                end = position
            node = parent

    def key(self, node: int, end: int) -> bytes:
        """The first `end` tokens of the prefix that a node ends."""
        parts = [self.tokens[first * TOKEN_BYTES : last * TOKEN_BYTES] for _, first, last in self.spans(node, 0, end)]
        return b"".join(reversed(parts))

    def rows(self, node: int, begin: int, end: int) -> np.ndarray:
        """int64 [end - begin], where those positions of the prefix of a node lie in the file."""
        parts = [np.arange(first, last) for _, first, last in self.spans(node, begin, end)]
        return np.concatenate(parts[::-1])


@dataclass(frozen=True)
class PlannedPath:
    """A prefix to be inserted: the first `end` tokens of the one that a saved node ends.

    Attributes:
        first_block: the first block that is new; those before are in the tree by then. num_blocks: how many are new.
    """

    node: int
    end: int
    first_block: int
    num_blocks: int


@dataclass
class LoadPlan:
    """The prefixes to be inserted, in this order, and how many of the file's tokens were known and will be loaded."""

    nodes: SavedNodes
    paths: list[PlannedPath] = field(default_factory=list)
    num_known: int = 0
    num_loaded: int = 0

    def tokens(self, blocks: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the K/V of the new blocks comes from and goes to.

        Args:
            blocks: int64, the new blocks of all paths, one path after the other.
            block_size: of the pool.

        Returns:
            int64 arrays of equal length: tokens by their places in the file, and slots of the pool.
        """
        rows, slots, taken = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
        for path in self.paths:
            if path.num_blocks:
                begin = path.first_block * block_size
                rows.append(self.nodes.rows(path.node, begin, path.end))
                own = blocks[taken : taken + path.num_blocks]
                slots.append((own[:, None] * block_size + np.arange(block_size)).reshape(-1)[: path.end - begin])
            taken += path.num_blocks
        return np.concatenate(rows), np.concatenate(slots)


def plan_load(nodes: SavedNodes, namespaces: Sequence[tuple], tree: RadixTree, num_free: int) -> LoadPlan:
    """Choose what to load; nothing is changed.

    Args:
        nodes: of the file.
        namespaces: per namespace of the file, the one that the tree has in its place.
        tree: what is cached already.
        num_free: blocks that may be taken.
    """
    merged = _Merged(nodes, namespaces, tree)
    chosen = []
    state = np.zeros(nodes.num_tokens, np.int8)  # 0 left out, 1 known, 2 loaded
    whole = np.zeros(len(nodes.parents), bool)
    for node in np.argsort(-nodes.ranks, kind="stable").tolist():
        if whole[node]:
            continue
        num_tokens = nodes.num_path_tokens(node)
        key = nodes.key(node, num_tokens)
        cached, planned = merged.known(node, key)
        path = merged.path(node, num_tokens, max(cached, planned), num_free)
        if path.end > max(cached, planned):
            chosen.append(path)
            num_free -= path.num_blocks
            merged.insert(path, key)
        for part, first, last in nodes.spans(node, 0, max(path.end, planned, cached)):
            if whole[part]:
                break
            # What is before `cached` was there; positions and places run alike within a node.
            _, position, offset = nodes.links[part]
            border = min(max(first, cached + offset), last)
            state[first:border] = 1
            state[border:last][state[border:last] == 0] = 2
            whole[part] = last - offset - position == nodes.lengths[part]
    # The least recently used first, so that the order of their uses is again what it was.
    merged = _Merged(nodes, namespaces, tree)
    plan = LoadPlan(nodes, num_known=int((state == 1).sum()), num_loaded=int((state == 2).sum()))
    for path in reversed(chosen):
        key = nodes.key(path.node, path.end)
        path = merged.path(path.node, path.end, max(merged.known(path.node, key)), path.end)
        merged.insert(path, key)
        plan.paths.append(path)
    return plan


class _Merged:
    """A tree together with what is planned for it."""

    def __init__(self, nodes: SavedNodes, namespaces: Sequence[tuple], tree: RadixTree) -> None:
        self._nodes, self._namespaces, self._tree = nodes, namespaces, tree
        self._planned = RadixTree(tree.block_size)

    def known(self, node: int, key: bytes) -> tuple[int, int]:
        """How many of a prefix's tokens are in the tree, and how many are planned; a node says in which namespace."""
        index = int(self._nodes.namespace_ids[node])
        return self._tree.match_prefix(key, self._namespaces[index]).length, self._planned.match_prefix(key, (index,)).length

    def path(self, node: int, end: int, known: int, num_free: int) -> PlannedPath:
        """What inserting a prefix of which `known` tokens are there takes; it is cut to what fits in the free blocks."""
        block_size = self._tree.block_size
        if known >= end:
            return PlannedPath(node, end, -(-end // block_size), 0)
        first = known // block_size
        num_blocks = min(-(-end // block_size) - first, num_free)
        return PlannedPath(node, min(end, (first + num_blocks) * block_size), first, num_blocks)

    def insert(self, path: PlannedPath, key: bytes) -> None:
        """Plan to insert it; the key may go on beyond its end."""
        blocks = [0] * (path.first_block + path.num_blocks)
        self._planned.insert(key[: path.end * TOKEN_BYTES], blocks, (int(self._nodes.namespace_ids[path.node]),))
