"""Block tables of requests that share prefixes."""

from __future__ import annotations

import numpy as np

# A tree of requests: (tokens, children), None for a request that ends there.
Tree = tuple[int, list["Tree"] | None]
SHARED_8K: list[Tree] = [(8192, [(256, None)] * 64)]
FEW_SHOT: list[Tree] = [(512, [(1500, [(200, None)] * 4)] * 4)]
BEST_OF_8: list[Tree] = [(1000, [(500, None)] * 8)] * 8


def forest(trees: list[Tree], block_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the block table, -1 past the end, and the lengths of requests that share whole blocks; rows and blocks in random order."""
    rows: list[tuple[list[int], int]] = []
    num_blocks = 0

    def grow(tree: Tree, blocks: list[int], num_tokens: int) -> None:
        nonlocal num_blocks
        tokens, children = tree
        num_tokens += tokens
        length = -(-num_tokens // block_size) if children is None else num_tokens // block_size
        fresh = max(0, length - len(blocks))
        blocks = blocks + list(range(num_blocks, num_blocks + fresh))
        num_blocks += fresh
        if children is None:
            rows.append((blocks, num_tokens))
        for child in children or []:
            grow(child, blocks, num_tokens)

    for tree in trees:
        grow(tree, [], 0)
    rng = np.random.default_rng(seed)
    names = rng.permutation(num_blocks)
    order = rng.permutation(len(rows))
    table = np.full((len(rows), max(len(blocks) for blocks, _ in rows) + 2), -1, dtype=np.int32)
    for row, place in enumerate(order):
        table[row, : len(rows[place][0])] = names[rows[place][0]]
    return table, np.array([rows[place][1] for place in order])
