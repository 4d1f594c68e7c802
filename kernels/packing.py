"""Item lists as one buffer, so that they reach the device in one copy, at fixed places if their capacity is fixed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from radixkv.kernels.items import ItemLists
from radixkv.kernels.layout import Layout
from radixkv.kernels.ranges import MOST_ROUNDS


@dataclass(frozen=True)
class Capacity:
    """Fixed sizes of the tensors of a decode step's work, so that one can be copied into another's addresses.

    Attributes:
        num_tokens: tokens of the step.
        num_narrow, num_wide: items of either kernel; 0: it never runs.
        num_partials: partials, of which each entry writes one.
    """

    num_tokens: int
    num_narrow: int
    num_wide: int
    num_partials: int

    @classmethod
    def of(cls, lists: ItemLists) -> Capacity:
        """Return what these lists need."""
        return cls(len(lists.merge_tokens), len(lists.narrow), len(lists.wide), lists.num_partials)

    @classmethod
    def for_decode(cls, num_seqs: int, max_len: int, layout: Layout, *, exact: bool = False) -> Capacity:
        """Return what holds any decode step of up to num_seqs sequences of up to max_len tokens."""
        if exact:
            chunks = num_seqs * -(-max_len // layout.chunk)
            return cls(num_seqs, chunks, 0, chunks)
        ranges = num_seqs + MOST_ROUNDS * -(-layout.narrow_slots // layout.num_kv_heads)
        # Shared ranges are few, but each costs every sequence a partial; a tree that needs more is attended to flat.
        return cls(num_seqs, ranges + num_seqs, ranges, ranges + 8 * num_seqs)

    def holds(self, lists: ItemLists) -> bool:
        """Say whether these lists fit."""
        return (
            len(lists.merge_tokens) <= self.num_tokens
            and len(lists.narrow) <= self.num_narrow
            and len(lists.wide) <= self.num_wide
            and lists.num_partials <= self.num_partials
        )


def pack(lists: ItemLists, ends: np.ndarray | None, sizes: Capacity) -> tuple[np.ndarray, list[int], dict[str, tuple[int, ...]]]:
    """Lay out the tensors of a work in one buffer.

    Args:
        lists: what they hold. ends: `[num_tokens]`, the end of each token; None: there is no such tensor.
        sizes: what they have room for.

    Returns:
        The buffer, int32; the sizes of what is in it, tensors and gaps in turn; and the shapes of the tensors, by name.
    """
    none = np.zeros(0, np.int32)
    # (name, array, rows that its tensor has at least)
    parts = (
        ("narrow", lists.narrow, sizes.num_narrow),
        ("wide", lists.wide, sizes.num_wide),
        ("entry_tokens", lists.entry_tokens, sizes.num_partials),
        ("entry_partials", lists.entry_partials, sizes.num_partials),
        ("merge_tokens", lists.merge_tokens, sizes.num_tokens),
        ("merge_ranges", lists.merge_ranges, sizes.num_tokens + 1),
        ("prefill_tiles", lists.prefill_tiles, 0),
        ("ends", none if ends is None else ends, 0),
        ("narrow_count", none, 1),
        ("wide_count", none, 1),
        ("merge_count", none, 1),
    )
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: list[int] = []
    begins: list[int] = []
    total = 0
    for name, array, least in parts:
        shape = shapes[name] = (max(len(array), least), *array.shape[1:])
        size = math.prod(shape)
        begins.append(total)
        # Each begins at a multiple of 16 bytes.
        pieces += size, -size % 4
        total += size + -size % 4
    host = np.zeros(total, dtype=np.int32)
    for (_, array, _), begin in zip(parts, begins, strict=True):
        if array.size:
            host[begin : begin + array.size] = array.ravel()
    for begin, count in zip(begins[-3:], (len(lists.narrow), len(lists.wide), len(lists.merge_tokens)), strict=True):
        host[begin] = count
    return host, pieces, shapes
