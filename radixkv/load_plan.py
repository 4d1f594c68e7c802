"""What of a saved file goes where: the most recently used prefixes first, as many as free blocks take.

The file's nodes are gone through from the top to the bottom, each from where its parent ended: no prefix is looked up or built as a whole,
so that the time follows from the tokens, however deep the tree is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixkv.forest import Forest
from radixkv.node import Node, walk, walk_on
from radixkv.saved_nodes import SavedNodes
from radixkv.token_key import TOKEN_BYTES, namespace_key
from radixkv.tree import RadixTree


@dataclass(frozen=True)
class PlannedRun:
    """Tokens to be stored below what is there by then.

    Attributes:
        nodes: the saved nodes that it goes through, each the parent of the next; it ends in the last one or at its end.
        above: the parent of the first, -1 for none. begin: where the run starts, a block border at or before that node's position.
        end: where it ends. first_block: the first of its prefix's blocks that is new. num_blocks: how many are; with 0 all is there.
    """

    nodes: tuple[int, ...]
    above: int
    begin: int
    end: int
    first_block: int
    num_blocks: int


@dataclass(frozen=True)
class LoadPlan:
    """The runs to be stored, in this order.

    Attributes:
        known: per saved node how many tokens of its prefix are cached already. places: where they end in the tree; None if there are none.
        reached: how many tokens of its prefix will be there; 0 for a node that no run goes through.
        num_known, num_loaded: how many of the file's tokens were known and will be loaded.
    """

    nodes: SavedNodes
    runs: list[PlannedRun]
    known: list[int]
    places: list[Node | None]
    reached: list[int]
    num_known: int
    num_loaded: int

    def tokens(self, blocks: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the K/V of the new blocks comes from and goes to.

        Args:
            blocks: int64, the new blocks of all runs, one run after the other.
            block_size: of the pool.

        Returns:
            int64 arrays of equal length: tokens by their places in the file, and slots of the pool.
        """
        rows, slots, taken = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
        for run in self.runs:
            if run.num_blocks:
                begin = run.first_block * block_size
                rows.append(self.nodes.rows(run.nodes[-1], begin, run.end))
                own = blocks[taken : taken + run.num_blocks]
                slots.append((own[:, None] * block_size + np.arange(block_size)).reshape(-1)[: run.end - begin])
            taken += run.num_blocks
        return np.concatenate(rows), np.concatenate(slots)


def plan_load(nodes: SavedNodes, namespaces: Sequence[tuple], tree: RadixTree, num_free: int) -> LoadPlan:
    """Choose what to load; nothing is changed.

    Args:
        nodes: of the file.
        namespaces: per namespace of the file, the one that the tree has in its place.
        tree: what is cached already.
        num_free: blocks that may be taken.
    """
    known, places = _find_known(nodes, namespaces, tree)
    chosen = _Chosen(nodes, known, tree.block_size, num_free)
    for node in np.argsort(-nodes.ranks, kind="stable").tolist():
        chosen.add(node)
    reached, positions = np.array(chosen.reached, np.int64), nodes.positions
    num_known = np.clip(np.array(known, np.int64) - positions, 0, nodes.lengths)
    num_new = np.maximum(reached - positions - num_known, 0)
    return LoadPlan(nodes, chosen.runs, known, places, chosen.reached, int(num_known.sum()), int(num_new.sum()))


def _find_known(nodes: SavedNodes, namespaces: Sequence[tuple], tree: RadixTree) -> tuple[list[int], list[Node | None]]:
    """Per saved node how much of its prefix is cached, and where that ends."""
    roots = [tree.roots().get(namespace_key(namespace)) for namespace in namespaces]
    namespace_ids, block_size, ends = nodes.namespace_ids.tolist(), tree.block_size, nodes.ends
    known: list[int] = []
    places: list[Node | None] = []
    for node, (parent, position, _) in enumerate(nodes.links):
        place: Node | None = roots[namespace_ids[node]] if parent < 0 else places[parent]
        num_known = 0 if parent < 0 else known[parent]
        if place is not None and num_known >= position:
            begin = position // block_size * block_size
            key = nodes.key(node, begin, ends[node])
            place, start, matched = walk_on(place, begin * TOKEN_BYTES, key, block_size * TOKEN_BYTES)
            num_known = (start + matched) // TOKEN_BYTES
        known.append(num_known)
        places.append(place)
    return known, places


class _Chosen:
    """What was chosen so far, as a forest of its own."""

    def __init__(self, nodes: SavedNodes, known: list[int], block_size: int, num_free: int) -> None:
        self.runs: list[PlannedRun] = []
        self.reached = [0] * len(known)
        self._nodes, self._known, self._num_free = nodes, known, num_free
        self._block_size, self._block_bytes = block_size, block_size * TOKEN_BYTES
        self._namespace_ids = nodes.namespace_ids.tolist()
        self._forest: Forest = RadixTree(block_size).forest
        self._places: list[Node | None] = [None] * len(known)
        # For these or for what is above them there was no room; there will be none.
        self._left_out = [False] * len(known)

    def add(self, node: int) -> None:
        """Chooses a saved node, after what of the nodes above it is not chosen yet."""
        nodes, ends = self._nodes, self._nodes.ends
        chain = []
        above = node
        while above >= 0 and self.reached[above] < ends[above] and not self._left_out[above]:
            chain.append(above)
            above = nodes.links[above][0]
        is_room = above < 0 or not self._left_out[above]
        group: list[int] = []
        for each in reversed(chain):
            group.append(each)
            # Where a node ends inside a block of this size, what follows it is stored together with it.
            if is_room and (ends[each] % self._block_size == 0 or each == node):
                is_room = self._choose(tuple(group))
                if is_room:
                    group = []
        for each in group:
            self._left_out[each] = True

    def _choose(self, group: tuple[int, ...]) -> bool:
        """Plans a run through nodes whose parent is chosen, as far as there is room; returns whether there was enough."""
        nodes, block_size, last = self._nodes, self._block_size, group[-1]
        above, position, _ = nodes.links[group[0]]
        begin, end = position // block_size * block_size, nodes.ends[last]
        key = nodes.key(last, begin, end)
        place = self._forest.root_of((self._namespace_ids[last],)) if above < 0 else self._places[above]
        assert place is not None
        anchor = self._forest.node_at(place, begin * TOKEN_BYTES)
        _, start, matched = walk(anchor, key, len(key), self._block_bytes)
        there = max(self._known[last], (start + matched) // TOKEN_BYTES)
        first_block, num_blocks = there // block_size, 0
        if there < end:
            num_blocks = min(-(-end // block_size) - first_block, self._num_free)
            there = max(there, min(end, (first_block + num_blocks) * block_size))
        self._num_free -= num_blocks
        if there > begin:
            self.runs.append(PlannedRun(group, above, begin, there, first_block, num_blocks))
            added = self._forest.add_below(anchor, key[: (there - begin) * TOKEN_BYTES], [0] * -(-(there - begin) // block_size))
            anchor = added.node
        for each in group:
            self._places[each] = anchor
            self.reached[each] = min(there, nodes.ends[each])
        return there == end
