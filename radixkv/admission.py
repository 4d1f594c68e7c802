"""Admission of a batch: what of each prompt is known, in the tree and in the rows beside it, and which blocks each row gets."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import TYPE_CHECKING

from radixkv.rows import copy_live_slots
from radixkv.sequence import TOKEN_BYTES, Batch, Sequence, runs_of_mate
from radixkv.token_key import common_bytes
from radixkv.tree import Lease

if TYPE_CHECKING:
    from radixkv.storage import CacheStorage


def admit_rows(cache: CacheStorage, batch: Batch, num_logits: Seq[int], lease: Lease | None, *, whole_blocks: bool) -> None:
    """Fill in the rows of a batch: their leases, what they share, and their block tables. The caller holds the lock.

    Args:
        cache: where to look and to take blocks from.
        batch: rows with nothing but their key; changed in place, and left half done on an exception.
        num_logits: per row, how many of its last tokens must be computed for their logits; at least 1 always is.
        lease: use exactly this prefix for every row, in place of a search.
        whole_blocks: reuse no partly matched block. Such a block is held while the row fills its own copy of it.

    Raises:
        ValueError: a row does not begin with the lease's tokens.
        OutOfBlocks: the pool cannot hold the rows.
    """
    sequences = batch.sequences
    limits = [max(0, sequence.num_tokens - max(1, kept)) for sequence, kept in zip(sequences, num_logits, strict=True)]
    for row, sequence in enumerate(sequences):
        if lease is None:
            limit = limits[row] if batch.options.reuse else 0
            sequence.lease = _search(cache, bytes(sequence.key), limit, batch.namespace, whole_blocks)
        elif sequence.key.startswith(lease.tokens[: len(sequence.key)]):  # of a prompt that comes in chunks this may be the first
            sequence.lease = lease.clone()
        else:
            raise ValueError(f"prefix_cache: row {row} of input_ids does not begin with the {lease.length} tokens of the lease")
        sequence.lease.leaves_trace = batch.options.store
        _take_leased(sequence, limits[row], cache.pool.block_size)
    if cache.tier is not None and lease is None and batch.options.reuse and not whole_blocks:
        # What one row brought back from host memory, a row before it may want too.
        for row, sequence in enumerate(sequences):
            _look_again(cache, batch, sequence, limits[row])
    # In sorted order the best batch-mate of a row is the one before it.
    order = sorted(range(len(sequences)), key=lambda row: sequences[row].key)
    for mate, row in pairwise(order) if batch.options.reuse else ():
        _share(sequences, row, mate, limits[row], cache.pool.block_size)
    batch.shares_blocks |= any(sequence.first_private > sequence.num_leased for sequence in sequences)
    _give_blocks(cache, [sequences[row] for row in order])


def _search(cache: CacheStorage, key: bytes, limit: int, namespace: tuple, whole_blocks: bool) -> Lease:
    if cache.tier is not None and not whole_blocks:
        cache.tier.restore(cache, key, namespace, limit)
    match = cache.tree.match_prefix(key, namespace, limit)
    if whole_blocks:
        block_size = cache.pool.block_size
        match = cache.tree.match_prefix(key, namespace, match.length // block_size * block_size)
    return cache.tree.lock(match)


def _look_again(cache: CacheStorage, batch: Batch, sequence: Sequence, limit: int) -> None:
    match = cache.tree.match_prefix(bytes(sequence.key), batch.namespace, limit)
    if sequence.lease is not None and match.length > sequence.lease.length:
        shorter, sequence.lease = sequence.lease, cache.tree.lock(match)
        sequence.lease.leaves_trace = batch.options.store
        shorter.release()
        _take_leased(sequence, limit, cache.pool.block_size)


def _take_leased(sequence: Sequence, limit: int, block_size: int) -> None:
    assert sequence.lease is not None
    sequence.cached_len = sequence.hit_len = min(sequence.lease.length, limit)
    sequence.num_leased = sequence.first_private = sequence.cached_len // block_size
    sequence.blocks = sequence.lease.blocks[: sequence.num_leased]


def _share(sequences: list[Sequence], row: int, mate: int, limit: int, block_size: int) -> None:
    """Note which of a row's tokens, beyond the cached ones, its mate or the mate's own mates compute in this step."""
    sequence, other = sequences[row], sequences[mate]
    common = min(common_bytes(sequence.key, other.key, 0) // TOKEN_BYTES, limit)
    # What the mate found in the tree and this row may not take (whole blocks only, below its limit) nobody computes in this step.
    if common <= sequence.hit_len or other.cached_len > sequence.cached_len:
        return
    # So the runs begin where this row's own match ends, or before.
    sequence.shared_runs = runs_of_mate(other, mate, sequence.cached_len, common)
    sequence.hit_len = common
    sequence.first_private = common // block_size


def _give_blocks(cache: CacheStorage, ordered: list[Sequence]) -> None:
    """Complete the block tables: blocks shared with the row before, then new ones, the live part of a cached block copied first."""
    block_size = cache.pool.block_size
    needed = [-(-sequence.num_tokens // block_size) - sequence.first_private for sequence in ordered]
    fresh = iter(cache.allocate(sum(needed)))
    copies: list[tuple[int, int, int]] = []
    for i, (sequence, num_new) in enumerate(zip(ordered, needed, strict=True)):
        if sequence.first_private > sequence.num_leased:
            shared = ordered[i - 1].blocks[sequence.num_leased : sequence.first_private]
            cache.pool.retain(shared)
            sequence.blocks += shared
        sequence.blocks += [next(fresh) for _ in range(num_new)]
        partial = sequence.cached_len % block_size
        if partial and sequence.first_private == sequence.num_leased:
            assert sequence.lease is not None
            copies.append((sequence.lease.blocks[sequence.num_leased], sequence.blocks[sequence.num_leased], partial))
    copy_live_slots(cache, copies)
