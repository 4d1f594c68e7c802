"""Trees to be timed, and how: every figure next to the bare comparison of the same bytes, in the same order, in the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np

from radixkv.token_key import TOKEN_BYTES
from radixkv.tree import RadixTree

NUM_KEYS = 1000
OTHER_LEN = 64
VOCABULARY = 32_000


@dataclass
class Crowd:
    """A tree, and keys to ask it for.

    Attributes:
        queries: keys in shuffled order. edges: per query the same bytes elsewhere in memory, as the tree has them.
        next_block: ids from here on are not in the tree.
    """

    tree: RadixTree
    queries: list[bytes]
    edges: list[bytes]
    next_block: int


def random_keys(rng: np.random.Generator, num_keys: int, length: int) -> list[bytes]:
    """Keys of `length` random tokens."""
    return [rng.integers(0, VOCABULARY, length, dtype=np.int32).tobytes() for _ in range(num_keys)]


def copy_bytes(key: bytes) -> bytes:
    """The same bytes elsewhere in memory; a slice of all of them would be the same object."""
    return bytes(bytearray(key))


def fill(tree: RadixTree, keys: Sequence[bytes], next_block: int = 0) -> int:
    """Inserts keys whose blocks are all new; returns the next free id."""
    for key in keys:
        num_blocks = -(-len(key) // TOKEN_BYTES // tree.block_size)
        tree.insert(key, range(next_block, next_block + num_blocks))
        next_block += num_blocks
    return next_block


def crowd(num_sequences: int, length: int, block_size: int) -> Crowd:
    """NUM_KEYS sequences of `length` tokens among short ones, num_sequences in all, that were stored in random order."""
    rng = np.random.default_rng(num_sequences + length)
    queries = random_keys(rng, NUM_KEYS, length)
    edges = [copy_bytes(key) for key in queries]
    others = random_keys(rng, num_sequences - NUM_KEYS, OTHER_LEN)
    tree = RadixTree(block_size)
    stored = [*edges, *others]
    next_block = fill(tree, [stored[i] for i in rng.permutation(len(stored))])
    order = rng.permutation(NUM_KEYS)
    return Crowd(tree, [queries[i] for i in order], [edges[i] for i in order], next_block)


def nothing() -> None:
    """What is compared with nothing is timed beside this."""


def time_cycles(
    benchmark: Any, operation: Callable[[Any], object], items: Sequence[Any], beside: Callable[[], object] = nothing, rounds: int = 15
) -> tuple[float, float]:
    """Times an operation on all items, one after the other, each round right after one of `beside`.

    Args:
        benchmark: pytest-benchmark's fixture; its figures are per round, ours in its extra_info per item.
        operation: what is timed. items: what it is called with. beside: what it is compared with; it goes through the items too.
        rounds: how many of both.

    Returns:
        us per item of both, the fastest round of each.
    """
    besides: list[int] = []

    def run_beside() -> None:
        started = perf_counter_ns()
        beside()
        besides.append(perf_counter_ns() - started)

    def run() -> None:
        for item in items:
            operation(item)

    benchmark.pedantic(run, setup=run_beside, rounds=rounds, warmup_rounds=1)
    us, beside_us = benchmark.stats.stats.min * 1e6 / len(items), min(besides) / 1e3 / len(items)
    benchmark.extra_info["us_each"] = round(us, 3)
    if beside is not nothing:
        benchmark.extra_info.update(beside_us_each=round(beside_us, 3), ratio=round(us / beside_us, 2))
    return us, beside_us


def time_once_each(benchmark: Any, operation: Callable[[Any], object], items: Sequence[Any], rounds: int = 10) -> float:
    """Times an operation that can be done once per item: each round takes the next share of the items. us per item, the fastest round."""
    share = len(items) // rounds
    shares = iter([items[i * share : (i + 1) * share] for i in range(rounds)])

    def run(items: Sequence[Any]) -> None:
        for item in items:
            operation(item)

    benchmark.pedantic(run, setup=lambda: ((next(shares),), {}), rounds=rounds)
    us = benchmark.stats.stats.min * 1e6 / share
    benchmark.extra_info["us_each"] = round(us, 3)
    return us
