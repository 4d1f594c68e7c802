"""Which leading runs of blocks the sequences of a decode step share, and which of them are worth an item of their own.

Sequences whose block tables begin alike form a forest. A run that several of them share can be read once for all, which costs each of
them a partial more; or each branch reads it as the beginning of its own next run. The choice is made from the leaves up, for every
place where a run that is still to be read can begin: cost = bytes moved, counted in keys.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# At so many places at most is it looked whether rows are in order as they come.
_FEW_DEPTHS = 4


class Prices(NamedTuple):
    """What is weighed, all in bytes of one key of one K/V head.

    Attributes:
        partial: writing and reading one partial. item: what one more item costs. shared_range, private_range: keys per partial.
    """

    partial: float
    item: float
    shared_range: int
    private_range: int


class Run(NamedTuple):
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


class _Node:
    """Sequences that share their first `end` keys, and no others do.

    Attributes:
        first_row, end_row: the sequences, as places in the forest's order. alone: how many of them no child has.
        live_from: the first key that any of them still sees.
        starts: where a run that ends with this node can begin, the ends of its ancestors.
        costs: for each of them the least cost of all below, and for `end`. cuts: whether the node's run is then an item.
        start, run: the place in starts where the node's run does begin, and the index of the last run above; -1: none.
    """

    __slots__ = ("first_row", "end_row", "end", "alone", "children", "live_from", "starts", "costs", "cuts", "start", "run")

    def __init__(self, first_row: int, end: int):
        self.first_row, self.end = first_row, end
        self.end_row = self.alone = self.live_from = self.start = 0
        self.run = -1
        self.children: list[_Node] = []
        self.starts = [0]
        self.costs: list[float] = []
        self.cuts: list[bool] = []


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
    first_blocks = table[:, 0].tolist() if table.shape[1] else []
    if len(set(first_blocks)) == len(first_blocks):
        return None
    limits = np.minimum((np.maximum(lens, 1) - 1) // block_size, table.shape[1])
    if np.count_nonzero(limits) < len(limits):
        first_blocks = table[limits.nonzero()[0], 0].tolist()
        if len(set(first_blocks)) == len(first_blocks):
            return None
    order, common = _neighbours(table, limits)
    nodes = _build(common, block_size)
    if np.count_nonzero(live_from):
        ordered = live_from[order]
        for node in nodes:
            node.live_from = int(ordered[node.first_row : node.end_row].min())
    for node in reversed(nodes):
        starts = [*node.starts, node.end]
        for child in node.children:
            child.starts = starts
    for node in nodes:
        _weigh(node, prices)
    runs = _collect(nodes)
    return (order, runs) if runs else None


def _neighbours(table: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return an order of the sequences in which those that begin alike are neighbours, and how many blocks each shares with the next."""
    most = int(limits.max())
    order = np.arange(len(limits))
    # A copy without gaps, which is compared several times as fast. Each row ends with a number below 0 that no other has.
    rows = np.empty((len(limits), most + 1), np.int32)
    rows[:, :most] = table[:, :most]
    rows[order, limits] = ~order
    common = _common_blocks(rows)
    if not _is_order(rows, limits, common):
        # As strings of bytes, which are compared faster than one number after another.
        order = rows.view(f"V{rows.itemsize * (most + 1)}")[:, 0].argsort()
        common = _common_blocks(rows[order])
    return order, common


def _common_blocks(rows: np.ndarray) -> list[int]:
    """Return how many leading numbers each row shares with the next one, from which it differs somewhere."""
    return (rows[1:] != rows[:-1]).argmax(axis=1).tolist()


def _is_order(rows: np.ndarray, limits: np.ndarray, common: list[int]) -> bool:
    """Say whether all rows that begin alike are neighbours, as far as that shows at once: True is certain, False is not.

    It is so if wherever neighbours part, no two of the groups that part there go on with the same block.
    """
    depths = set(common)
    if len(depths) == 1:
        # All neighbours part at one place, which none of them ends before.
        column = rows[:, common[0]].tolist()
        return len(set(column)) == len(column)
    if len(depths) > _FEW_DEPTHS:
        return False
    shared, ends = [-1, *common], limits.tolist()
    for depth in depths:
        column = rows[:, depth].tolist()
        heads = [block for block, blocks, end in zip(column, shared, ends, strict=True) if blocks <= depth < end]
        if len(set(heads)) < len(heads):
            return False
    return True


def _build(common: list[int], block_size: int) -> list[_Node]:
    """Return the nodes of the forest of sequences whose neighbours have so many leading blocks in common, children first."""
    nodes: list[_Node] = []
    stack, last = [_Node(0, 0)], 0
    for row, blocks in enumerate([*common, 0]):
        if blocks == last:
            continue
        last, depth, first_row = blocks, blocks * block_size, row
        while stack[-1].end > depth:
            node = stack.pop()
            first_row, node.end_row = node.first_row, row + 1
            if stack[-1].end < depth:
                stack.append(_Node(first_row, depth))
            node.alone += row + 1 - first_row
            stack[-1].alone -= row + 1 - first_row
            stack[-1].children.append(node)
            nodes.append(node)
        if stack[-1].end < depth:
            stack.append(_Node(first_row, depth))
    return nodes


def _weigh(node: _Node, prices: Prices) -> None:
    """Fill in the node's costs and cuts; those of its children are known."""
    size, live_from, end = node.end_row - node.first_row, node.live_from, node.end
    # What a sequence reads alone ends at its length wherever it begins, so only its beginning counts.
    alone_price = node.alone * (1 + prices.partial / prices.private_range)
    starts = [max(start, live_from) for start in node.starts] if live_from else node.starts
    after = -alone_price * max(end, live_from)
    for child in node.children:
        after += child.costs[-1]
    for place, start in enumerate(starts):
        uncut = -alone_price * start
        for child in node.children:
            uncut += child.costs[place]
        keys = end - start
        cut = after + keys + prices.item + size * prices.partial * max(1.0, keys / prices.shared_range)
        node.cuts.append(keys > 0 and cut < uncut)
        node.costs.append(cut if node.cuts[-1] else uncut)


def _collect(nodes: list[_Node]) -> list[Run]:
    """List the runs that are items, parents first."""
    runs: list[Run] = []
    for node in reversed(nodes):
        start, run = node.start, node.run
        if node.cuts[start]:
            runs.append(Run(node.first_row, node.end_row, max(node.starts[start], node.live_from), node.end, run))
            start, run = len(node.starts), len(runs) - 1
        for child in node.children:
            child.start, child.run = start, run
    return runs
