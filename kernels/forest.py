"""Which leading runs of blocks the sequences of a decode step share, and which of them are worth an item of their own.

Sequences whose block tables begin alike form a forest. A run that several of them share can be read once for all, which costs each of
them a partial more; or each branch reads it as the beginning of its own next run. The choice is made from the leaves up, for every
place where a run that is still to be read can begin: cost = bytes moved, counted in keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Prices:
    """What is weighed, all in bytes of one key of one K/V head.

    Attributes:
        partial: writing and reading one partial. item: what one more item costs. shared_range, private_range: keys per partial.
    """

    partial: float
    item: float
    shared_range: int
    private_range: int


@dataclass(frozen=True)
class Run:
    """Keys that several sequences share, as one piece of work.

    Attributes:
        first_row, end_row: the sequences, as places in the forest's order. first_key, end_key: the keys.
        parent: index of the run that ends where this one begins; -1: none.
    """

    first_row: int
    end_row: int
    first_key: int
    end_key: int
    parent: int


@dataclass
class _Node:
    """Sequences that share their first `end` keys, and no others do."""

    first_row: int
    end: int
    children: list[_Node] = field(default_factory=list)
    end_row: int = 0
    live_from: int = 0
    # Where a run that ends with this node can begin, the ends of its ancestors.
    starts: list[int] = field(default_factory=list)
    # For each of them the least cost of all below, and whether the node's run is then an item.
    costs: list[float] = field(default_factory=list)
    cuts: list[bool] = field(default_factory=list)


def shared_runs(
    table: np.ndarray, lens: np.ndarray, live_from: np.ndarray, block_size: int, prices: Prices
) -> tuple[np.ndarray, list[Run]] | None:
    """Choose the runs that are read once for several sequences.

    Args:
        table: int32 `[num_seqs, max_blocks]`; what lies past a sequence's end is not looked at.
        lens: `[num_seqs]`, tokens. A sequence's last token is never shared.
        live_from: `[num_seqs]`, the first key that a sequence still sees.
        block_size, prices: of what is weighed.

    Returns:
        The order of the sequences in which those of a run are neighbours, and the runs, parents first; None where nothing is to be shared.
    """
    limits = np.minimum(np.maximum(lens - 1, 0) // block_size, table.shape[1])
    if len(lens) < 2 or not limits.any():
        return None
    first_blocks = table[:, 0][limits > 0].tolist()
    if len(set(first_blocks)) == len(first_blocks):
        return None
    rows = [row[:limit].tobytes() for row, limit in zip(np.ascontiguousarray(table), limits.tolist(), strict=True)]
    order = np.array(sorted(range(len(rows)), key=rows.__getitem__))
    roots = _build(_common_blocks(table, limits, order), block_size)
    nodes = _parents_first(roots, live_from[order])
    for node in reversed(nodes):
        _weigh(node, prices)
    runs = _collect(roots)
    return (order, runs) if runs else None


def _common_blocks(table: np.ndarray, limits: np.ndarray, order: np.ndarray) -> list[int]:
    """Return how many leading blocks each sequence of the order shares with the next one."""
    most = int(limits.max())
    ordered, limits = table[order, :most], limits[order]
    differ = np.empty((len(order) - 1, most + 1), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=differ[:, :most])
    differ[:, most] = True
    return np.minimum(differ.argmax(axis=1), np.minimum(limits[1:], limits[:-1])).tolist()


def _build(common: list[int], block_size: int) -> list[_Node]:
    """Return the roots of the forest of sequences whose neighbours have so many leading blocks in common."""
    roots: list[_Node] = []
    stack: list[_Node] = []
    for row, blocks in enumerate([*common, 0]):
        depth, first_row, closed = blocks * block_size, row, None
        while stack and stack[-1].end > depth:
            node = stack.pop()
            node.end_row, first_row = row + 1, node.first_row
            if closed is not None:
                node.children.append(closed)
            closed = node
        if depth and (not stack or stack[-1].end < depth):
            stack.append(_Node(first_row, depth))
        if closed is not None:
            (stack[-1].children if stack else roots).append(closed)
    return roots


def _parents_first(roots: list[_Node], live_from: np.ndarray) -> list[_Node]:
    """List the nodes, each after its parent, and fill in where their runs can begin."""
    nodes: list[_Node] = []
    pending = roots[::-1]
    for root in roots:
        root.starts = [0]
    windowed = bool(live_from.any())
    while pending:
        node = pending.pop()
        nodes.append(node)
        if windowed:
            node.live_from = int(live_from[node.first_row : node.end_row].min())
        starts = [*node.starts, node.end]
        for child in node.children:
            child.starts = starts
        pending += node.children
    return nodes


def _weigh(node: _Node, prices: Prices) -> None:
    """Fill in the node's costs and cuts; those of its children are known."""
    size = node.end_row - node.first_row
    leaves = size - sum(child.end_row - child.first_row for child in node.children)
    # What a sequence reads alone ends at its length wherever it begins, so only its beginning counts.
    leaf_price = leaves * (1 + prices.partial / prices.private_range)
    live_from, end = node.live_from, node.end
    below = [-leaf_price * max(start, live_from) for start in (*node.starts, end)]
    for child in node.children:
        below = [cost + more for cost, more in zip(below, child.costs, strict=True)]
    after = below.pop()
    for start, uncut in zip(node.starts, below, strict=True):
        keys = end - max(start, live_from)
        cut = after + keys + prices.item + size * prices.partial * max(1.0, keys / prices.shared_range)
        node.cuts.append(keys > 0 and cut < uncut)
        node.costs.append(cut if node.cuts[-1] else uncut)


def _collect(roots: list[_Node]) -> list[Run]:
    """List the runs that are items, parents first."""
    runs: list[Run] = []
    pending = [(root, 0, -1) for root in reversed(roots)]
    while pending:
        node, start, parent = pending.pop()
        level = len(node.starts)
        if node.cuts[start]:
            runs.append(Run(node.first_row, node.end_row, max(node.starts[start], node.live_from), node.end, parent))
            start, parent = level, len(runs) - 1
        pending += [(child, start, parent) for child in reversed(node.children)]
    return runs
