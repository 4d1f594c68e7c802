"""What happens to rows of a batch between their prompt and their end, besides growing by a token: more tokens, a cut, a copy.

Nothing here copies K/V but the one block that a row is about to write to while others read it (copy on write). The caller holds the lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from radixkv.sequence import TOKEN_BYTES, Batch, Sequence, runs_of_mate
from radixkv.token_key import common_bytes

if TYPE_CHECKING:
    from radixkv.storage import CacheStorage

Mates = dict[int, Sequence]


def append_tokens(
    cache: CacheStorage, batch: Batch, sequences: Seq[Sequence], keys: Seq[bytes], num_logits: Seq[int]
) -> tuple[int, Mates]:
    """Make rows ready for a step that computes some tokens more, at their ends; what of those is cached they need not compute.

    Args:
        cache: where to look and to take blocks from. batch: whose rows they are.
        sequences: rows whose tokens are all stored. keys: the tokens of each, at least one, int32 little-endian.
        num_logits: per row, how many of its last tokens must be computed for their logits; at least 1 always is.

    Returns:
        How many of the tokens need not be computed, and what `take_filled_blocks` wants to know after the step.

    Raises:
        OutOfBlocks: the pool cannot hold them. The rows have the tokens all the same, `truncate_row` takes them off.
    """
    before = [sequence.num_tokens for sequence in sequences]
    for sequence, key, kept in zip(sequences, keys, num_logits, strict=True):
        sequence.key += key
        sequence.jumps += 1
        sequence.shared_runs = []
        limit = sequence.num_tokens - max(1, kept)
        if limit > sequence.num_stored and batch.options.reuse:
            _reach_further(cache, batch, sequence, limit)
        sequence.hit_len = sequence.num_stored
    mates: Mates = {}
    if batch.options.reuse and len(sequences) > 1:
        mates = _share_new(sequences, num_logits, cache.pool.block_size)
        batch.shares_blocks |= bool(mates)
    make_writable(cache, sequences, mates)
    return sum(sequence.hit_len - length for sequence, length in zip(sequences, before, strict=True)), mates


def _share_new(sequences: Seq[Sequence], num_logits: Seq[int], block_size: int) -> Mates:
    """Note which of the rows' new tokens other rows of the step compute.

    A row takes from one that has no more tokens stored than itself, so that all that it has not the other one computes, or has from a
    third one, in this step.
    """
    mates: Mates = {}
    order = sorted(range(len(sequences)), key=lambda row: sequences[row].num_stored)
    for i, row in enumerate(order):
        sequence = sequences[row]
        stored = bytes(sequence.key[: sequence.num_stored * TOKEN_BYTES])
        limit, best, most = sequence.num_tokens - max(1, num_logits[row]), None, sequence.num_stored
        for other in order[:i]:
            mate = sequences[other]
            if mate.num_tokens > most and mate.key.startswith(stored):
                common = min(limit, common_bytes(mate.key, sequence.key, 0) // TOKEN_BYTES)
                if common > most:
                    best, most = other, common
        if best is None:
            continue
        mate = mates[row] = sequences[best]
        sequence.shared_runs = runs_of_mate(mate, best, sequence.num_stored, most)
        sequence.hit_len = most
        # The block in which the row's own tokens end stays its own: if the step fails, they are still there.
        sequence.first_shared = len(sequence.blocks)
        sequence.first_private = max(sequence.first_shared, most // block_size)
    return mates


def make_writable(cache: CacheStorage, sequences: Seq[Sequence], mates: Mates | None = None) -> bool:
    """Give each row blocks for the tokens that are not stored yet, none of which anybody else reads.

    Args:
        cache: where to take blocks from. sequences: the rows.
        mates: of some rows, by number, the row whose blocks they take from first_shared up to first_private, which is none or stands
            before them; see `_share_new`.

    Returns:
        Whether a block had to be copied, so that what was kept of a row's blocks is of no use any more.

    Raises:
        OutOfBlocks: the pool cannot hold them; nothing is changed.
    """
    block_size, pool = cache.pool.block_size, cache.pool
    mates = mates or {}
    taken: Counter[int] = Counter()
    copied, num_new = [], []
    for row, sequence in enumerate(sequences):
        index, num_live = divmod(sequence.num_stored, block_size)
        copies = False
        if num_live:
            block = sequence.blocks[index]
            # Of several rows that leave a block, the last one keeps it.
            copies = index < sequence.num_leased or pool.reference_count(block) - taken[block] > 1
            if copies and index >= sequence.num_leased:
                taken[block] += 1
        copied.append(copies)
        num_given = sequence.first_private if row in mates else len(sequence.blocks)
        num_new.append(max(0, -(-sequence.num_tokens // block_size) - num_given))
    fresh = iter(cache.allocate(sum(copied) + sum(num_new)))
    copies_to_do: list[tuple[int, int, int]] = []
    left: list[int] = []
    # A row that another one takes blocks from gets its own before.
    for row in [*(row for row in range(len(sequences)) if row not in mates), *mates]:
        sequence = sequences[row]
        if copied[row]:
            index, num_live = divmod(sequence.num_stored, block_size)
            block, private = sequence.blocks[index], next(fresh)
            copies_to_do.append((block, private, num_live))
            sequence.blocks[index] = private
            sequence.jumps += 1
            if index < sequence.num_leased:
                sequence.num_leased = index
            else:
                left.append(block)
        if row in mates:
            shared = mates[row].blocks[sequence.first_shared : sequence.first_private]
            pool.retain(shared)
            sequence.blocks += shared
        sequence.blocks += [next(fresh) for _ in range(num_new[row])]
    copy_live_slots(cache, copies_to_do)
    pool.release(left)
    return bool(copies_to_do)


def take_filled_blocks(cache: CacheStorage, sequences: Seq[Sequence], mates: Mates) -> None:
    """After a step: in place of the full blocks that a row had before it, take those of the row that computed the rest.

    Then all blocks of what is common are one row's, which attention reads once for all, and the row's own ones are free.
    """
    for row, mate in mates.items():
        sequence = sequences[row]
        index = min(sequence.first_shared, sequence.hit_len // cache.pool.block_size) - 1
        while index >= sequence.num_leased and sequence.blocks[index] != mate.blocks[index]:
            cache.pool.retain([mate.blocks[index]])
            own, sequence.blocks[index] = sequence.blocks[index], mate.blocks[index]
            cache.pool.release([own])
            index -= 1


def copy_live_slots(cache: CacheStorage, copies: Seq[tuple[int, int, int]]) -> None:
    """Copy the first slots of blocks in all layers, in one launch for each device: (from, to, how many) of each."""
    if copies:
        src, dst, counts = (torch.tensor(column).to(cache.pool.device) for column in zip(*copies, strict=True))
        cache.backend.copy_blocks(cache.pool.pools, src, dst, counts.to(torch.int32))


def truncate_row(cache: CacheStorage, sequence: Sequence, num_tokens: int) -> None:
    """Take the tokens from `num_tokens` on off a row."""
    if num_tokens >= sequence.num_tokens:
        return
    num_blocks = -(-num_tokens // cache.pool.block_size)
    surplus = sequence.blocks[max(num_blocks, sequence.num_leased) :]
    del sequence.blocks[num_blocks:]
    del sequence.key[num_tokens * TOKEN_BYTES :]
    sequence.num_leased = min(sequence.num_leased, num_blocks)
    sequence.first_private = min(sequence.first_private, num_blocks)
    sequence.num_stored = min(sequence.num_stored, num_tokens)
    sequence.hit_len = min(sequence.hit_len, num_tokens)
    sequence.cached_len = min(sequence.cached_len, num_tokens)
    sequence.shared_runs = []
    sequence.jumps += 1
    cache.pool.release(surplus)


def fork_row(cache: CacheStorage, sequence: Sequence) -> Sequence:
    """A second row with the same tokens, in the same blocks."""
    lease = None if sequence.lease is None else sequence.lease.clone()
    cache.pool.retain(sequence.blocks[sequence.num_leased :])
    return replace(sequence, key=bytearray(sequence.key), lease=lease, blocks=list(sequence.blocks), shared_runs=[])


def take_rows(batch: Batch, rows: Seq[int]) -> Batch:
    """A batch of its own of some rows of an open one, which loses them."""
    taken = set(rows)
    parted = replace(batch, sequences=[batch.sequences[row] for row in rows], lent=None, step_rows=(), carried={})
    batch.sequences = [sequence for row, sequence in enumerate(batch.sequences) if row not in taken]
    batch.step_rows, batch.carried = (), {}
    return parted


def join_rows(batch: Batch, other: Batch) -> None:
    """Let the rows of another open batch become further rows of a batch; the other one has none then."""
    if (batch.namespace, batch.options, batch.counted) != (other.namespace, other.options, other.counted) or other.lent is not None:
        raise ValueError("join: only batches that were admitted alike, without a lease, can become one")
    for sequence in other.sequences:
        sequence.shared_runs = []  # name rows of the batch that was
    batch.sequences, other.sequences = batch.sequences + other.sequences, []
    batch.may_share |= other.may_share
    batch.shares_blocks |= other.shares_blocks
    batch.step_rows, batch.carried = (), {}


def hold_published(cache: CacheStorage, batch: Batch, sequence: Sequence) -> None:
    """Let a row whose stored tokens were just put into the tree go on from there, its last block its own again.

    Raises:
        OutOfBlocks: there is no block for that; the next step that writes to the row asks for it again.
    """
    key = bytes(sequence.key[: sequence.num_stored * TOKEN_BYTES])
    sequence.lease = lease = cache.tree.lock(cache.tree.match_prefix(key, batch.namespace))
    sequence.blocks = lease.blocks
    sequence.num_leased = sequence.first_private = len(sequence.blocks)
    sequence.jumps += 1
    may_share, batch.may_share = batch.may_share, True
    batch.step_rows, batch.carried = (), {}
    make_writable(cache, [sequence])
    batch.may_share = may_share


def let_go(cache: CacheStorage, sequences: Seq[Sequence]) -> None:
    """Give back everything that rows hold; their tokens stay."""
    for sequence in sequences:
        # Out of the row first: whatever interrupts this, nothing is released twice.
        own, lease = sequence.blocks[sequence.num_leased :], sequence.lease
        sequence.blocks, sequence.lease, sequence.num_leased = [], None, 0
        cache.pool.release(own)
        if lease is not None:
            lease.release()


def _reach_further(cache: CacheStorage, batch: Batch, sequence: Sequence, limit: int) -> None:
    """Take a longer cached prefix than the row has stored, if there is one."""
    key = bytes(sequence.key)
    if batch.lent is not None:  # that prefix and no other
        limit = min(limit, batch.lent.length)
        if not key.startswith(batch.lent.tokens[: limit * TOKEN_BYTES]):
            return  # the row was cut off before its end, and went on in another way
    elif cache.tier is not None:
        cache.tier.restore(cache, key, batch.namespace, limit)
    match = cache.tree.match_prefix(key, batch.namespace, limit)
    if match.length <= sequence.num_stored:
        return
    lease = cache.tree.lock(match)
    lease.leaves_trace = batch.options.store
    let_go(cache, [sequence])
    sequence.lease, sequence.blocks = lease, lease.blocks
    sequence.num_leased = sequence.first_private = len(sequence.blocks)
    sequence.num_stored = sequence.cached_len = lease.length
