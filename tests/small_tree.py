"""Small trees and the ids of their blocks, and how many functions an operation on one calls."""

from __future__ import annotations

from radixkv.tree import Lease, RadixTree

BLOCK = 16


def tokens(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


class Ids:
    """Fresh block ids, never the same twice."""

    def __init__(self) -> None:
        self.next = 0

    def __call__(self, num_tokens: int, block_size: int = BLOCK) -> list[int]:
        start, self.next = self.next, self.next - (-num_tokens // block_size)
        return list(range(start, self.next))


def lock(tree: RadixTree, prompt, namespace: tuple = (), limit: int | None = None) -> Lease:
    return tree.lock(tree.match_prefix(prompt, namespace, limit))


def counters(tree: RadixTree) -> tuple[int, ...]:
    return tree.num_blocks, tree.num_leased_blocks, tree.num_evictable_blocks, tree.num_tokens, tree.evicted_tokens, tree.num_leases


def crowd(num_leaves: int, eviction: str = "lru") -> RadixTree:
    tree = RadixTree(BLOCK, eviction)
    for i in range(num_leaves):
        tree.insert((i * 7919 % 1_000_003).to_bytes(4, "little") * BLOCK, [i])
    return tree
