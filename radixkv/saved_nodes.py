"""The nodes of a saved cache as a file has them: runs of tokens, each continuing its parent's, and what is known of their use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from radixkv.token_key import TOKEN_BYTES


@dataclass(frozen=True)
class SavedNodes:
    """Runs of tokens, each continuing the prefix of its parent, as a file has them.

    Attributes:
        parents: int64 [num_nodes], an earlier node or -1.
        positions: int64 [num_nodes], where each run begins in its prefix; what precedes it are the first tokens of its parent's prefix,
            of which it may leave the last ones out.
        namespace_ids: int64 [num_nodes], into `namespaces`, a parent's like its child's. lengths: int64 [num_nodes], tokens of each.
        ranks: int64 [num_nodes], the order of their last uses, the earliest first. hits: int64 [num_nodes], see `Node.hits`.
        worths: float64 [num_nodes], what the policy that the cache evicted by knew of their use, see `Eviction.save_worth`; nan: nothing.
        tokens: the tokens of all nodes, in their order, as key bytes. namespaces: without the version of the weights.
    """

    NUM_COLUMNS: ClassVar[int] = 6

    parents: np.ndarray
    positions: np.ndarray
    namespace_ids: np.ndarray
    lengths: np.ndarray
    ranks: np.ndarray
    hits: np.ndarray
    worths: np.ndarray
    tokens: bytes
    namespaces: list[tuple]

    @classmethod
    def from_bytes(cls, columns: bytes, worths: bytes, tokens: bytes, namespaces: list[tuple]) -> SavedNodes:
        """What `to_array`, `worths` and `tokens` were. Raises ValueError for what no tree can be."""
        parents, positions, namespace_ids, lengths, ranks, hits = np.frombuffer(columns, "<i8").reshape(-1, cls.NUM_COLUMNS).T.copy()
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
            or (hits < 0).any()
            or (np.frombuffer(tokens, "<i4") < 0).any()
        ):
            raise ValueError("its nodes are not those of a tree")
        found = np.frombuffer(worths, "<f8")
        if len(found) != len(parents) or np.isinf(found).any():
            raise ValueError("its nodes have no worths")
        return cls(parents, positions, namespace_ids, lengths, ranks, hits, found, tokens, namespaces)

    def to_array(self) -> np.ndarray:
        """int64 [num_nodes, 6]."""
        columns = [self.parents, self.positions, self.namespace_ids, self.lengths, self.ranks, self.hits]
        return np.ascontiguousarray(np.stack(columns, 1), "<i8")

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @cached_property
    def ends(self) -> list[int]:
        """Per node the tokens from the top to its end."""
        return (self.positions + self.lengths).tolist()

    @cached_property
    def links(self) -> list[tuple[int, int, int]]:
        """Per node its parent, its position, and its place in the file less that position; lists, which walks read in half the time."""
        offsets = np.cumsum(self.lengths) - self.lengths - self.positions
        return list(zip(self.parents.tolist(), self.positions.tolist(), offsets.tolist(), strict=True))

    def spans(self, node: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Where positions [begin, end) of the prefix of a node lie: (node, first, last + 1 in the file), from the end backwards."""
        links = self.links
        while node >= 0 and begin < end:
            parent, position, offset = links[node]
            if position < end:
                yield node, max(begin, position) + offset, end + offset
                end = position
            node = parent

    def key(self, node: int, begin: int, end: int) -> bytes:
        """The tokens at positions [begin, end) of the prefix that a node ends."""
        parts = [self.tokens[first * TOKEN_BYTES : last * TOKEN_BYTES] for _, first, last in self.spans(node, begin, end)]
        return b"".join(reversed(parts))

    def rows(self, node: int, begin: int, end: int) -> np.ndarray:
        """int64 [end - begin], where those positions of the prefix of a node lie in the file."""
        parts = [np.arange(first, last) for _, first, last in self.spans(node, begin, end)]
        return np.concatenate(parts[::-1])
