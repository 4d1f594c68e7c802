"""`Requests`: the way of a sequence through a cache: admitted, computed step by step, stored."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from time import time

import torch

from radixkv.admission import admit_rows
from radixkv.errors import OutOfBlocks
from radixkv.events import Hit
from radixkv.rows import append_tokens, let_go, take_filled_blocks, truncate_row
from radixkv.running import RunningRows, require_open
from radixkv.sequence import TOKEN_BYTES, Batch, CallOptions, Sequence
from radixkv.step import Step
from radixkv.tree import Lease, token_key

logger = logging.getLogger("radixkv")


class Requests(RunningRows):
    """What the integration calls: batches of rows over the blocks of a cache, and the counts of what they did.

    A step holds the lock from planning to commit, so a block is never read before it is written.
    """

    def require_usable(self, lease: Lease, namespace: tuple | None = None) -> None:
        """Raise ValueError unless `lease` is a live lease of this cache, with its present weights and in that namespace."""
        if not isinstance(lease, Lease):
            raise ValueError(f"prefix_cache must be a Lease from model.radixkv.match_prefix(), got {type(lease).__name__}")
        if lease.tree is not self.tree:
            raise ValueError("prefix_cache is a lease of another model's cache: call match_prefix() on this model's own handle")
        if lease.released:
            raise ValueError("prefix_cache was already released: call match_prefix() again, or keep the lease open in a `with` block")
        expected = self.full_namespace(namespace or ())
        if lease.namespace != expected:
            raise ValueError(
                f"prefix_cache is of namespace {lease.namespace}, this call is in {expected}: "
                "match the prefix in the namespace and with the weights that generate() uses"
            )

    def admit(
        self,
        keys: Seq[bytes],
        num_logits: Seq[int],
        lease: Lease | None = None,
        *,
        options: CallOptions = CallOptions(),  # noqa: B008 - frozen
        counted: bool = True,
    ) -> Batch:
        """Find what is known of each prompt, in the tree and in the other rows, and give every row its blocks.

        Args:
            keys: N prompts, int32 little-endian; an empty one is of a row whose tokens come later.
            num_logits: per prompt, how many of its last tokens must be computed because their logits are asked for (at least 1 always is).
            lease: use exactly this prefix for every row, in place of a search.
            options: of the call; the namespace is the lease's where there is one.
            counted: whether the rows count as requests.

        Returns:
            The batch; its next step is `prompt_step`. On an exception nothing is held.

        Raises:
            ValueError: a row does not begin with the lease's tokens.
            OutOfBlocks: the pool cannot hold the rows.
        """
        batch = Batch([Sequence(bytearray(key)) for key in keys], (), options, counted)
        try:
            with self.lock:
                self._collect()
                batch.namespace = self.full_namespace(options.namespace) if lease is None else lease.namespace
                self._live.add(batch)
                try:
                    admit_rows(self, batch, num_logits, lease, whole_blocks=False)
                except OutOfBlocks:
                    # A partly matched block is held while the row writes its own copy. In a pool this tight its tokens are computed again.
                    logger.debug("trying again with whole cached blocks only")
                    let_go(self, batch.sequences)
                    batch.sequences = [Sequence(bytearray(key)) for key in keys]
                    admit_rows(self, batch, num_logits, lease, whole_blocks=True)
                if lease is not None:
                    batch.lent = lease
                    lease.lend()
                if counted:
                    self._count_requests(batch)
        except BaseException:  # an interrupt while events are told included
            self.discard(batch)
            raise
        return batch

    @contextmanager
    def prompt_step(self, batch: Batch) -> Iterator[Step]:
        """The first step of a batch: compute what no row could reuse. Leaving the block normally commits it as stored."""
        with self.lock:
            require_open(batch)
            sequences = batch.sequences
            num_tokens = sum(sequence.num_tokens - sequence.hit_len for sequence in sequences)
            self._count_computed(batch, num_tokens)
            batch.step_rows = tuple(range(len(sequences)))
            with (
                self._steps.prompt(sequences, batch.carried) as step,
                self.meter.measure(num_tokens) if batch.counted else nullcontext(),
            ):
                yield step
            for sequence in sequences:
                sequence.num_stored = sequence.num_tokens

    @contextmanager
    def decode_step(self, batch: Batch, rows: Seq[int], token_ids: Seq[int], num_rows: int | None = None) -> Iterator[Step]:
        """Append one token to each of `rows` and compute it. Leaving the block normally commits it as stored.

        Args:
            batch: admitted, its prompt step done. rows: which of its rows. token_ids: one per row.
            num_rows: Triton only: rows of the step's tensors, those past the real ones empty, at addresses that stay for this number;
                for steps that are captured.

        Raises:
            OutOfBlocks: a row needs a block and none can be had; what the rows stored before stays.
        """
        with self.lock:
            self._collect()
            require_open(batch)
            sequences = [batch.sequences[row] for row in rows]
            if batch.step_rows != tuple(rows):
                batch.step_rows, batch.carried = tuple(rows), {}
            keys = struct.pack(f"<{len(token_ids)}i", *token_ids)
            for sequence, start in zip(sequences, range(0, len(keys), TOKEN_BYTES), strict=True):
                sequence.key += keys[start : start + TOKEN_BYTES]
            try:
                self._make_room(batch, sequences)
                self._count_computed(batch, len(sequences))
                with self._steps.decode(sequences, batch.carried, num_rows) as step:
                    yield step
            except BaseException:
                # Some layers may have kept what belongs to the token that is taken off.
                batch.step_rows, batch.carried = (), {}
                for sequence in sequences:
                    truncate_row(self, sequence, sequence.num_stored)
                raise
            for sequence in sequences:
                sequence.num_stored += 1

    @contextmanager
    def extend_step(
        self, batch: Batch, rows: Seq[int], keys: Seq[bytes], num_logits: Seq[int], *, is_prompt: bool
    ) -> Iterator[Step]:
        """Append several tokens to each of `rows` and compute those that are not cached. Leaving the block normally commits them as stored.

        Args:
            batch: admitted, its prompt step done. rows: which of its rows, each once. keys: the tokens of each, at least one.
            num_logits: per row, how many of its last tokens must be computed because their logits are asked for (at least 1 always is).
            is_prompt: whether the statistics count them as tokens of prompts.

        Raises:
            OutOfBlocks: as for `decode_step`.
        """
        with self.lock:
            self._collect()
            require_open(batch)
            sequences = [batch.sequences[row] for row in rows]
            before = [sequence.num_tokens for sequence in sequences]
            batch.step_rows, batch.carried = (), {}
            try:
                num_found, mates = append_tokens(self, batch, sequences, keys, num_logits)
                num_computed = sum(sequence.num_tokens - sequence.hit_len for sequence in sequences)
                self._count_computed(batch, num_computed)
                if is_prompt and batch.counted:
                    self._counters.prompt_tokens += num_found + num_computed
                    self._counters.cached_tokens += num_found
                    if batch.options.store:
                        self.request_log.append((self.tree.tick(), time(), 0, num_found + num_computed, num_found))
                with self._steps.prompt(sequences, {}) as step:
                    yield step
            except BaseException:
                for sequence, num_tokens in zip(sequences, before, strict=True):
                    truncate_row(self, sequence, num_tokens)
                # A row may have come to end in a block of the tree, of which it has no copy yet.
                batch.may_share = True
                raise
            for sequence in sequences:
                sequence.num_stored = sequence.num_tokens
            take_filled_blocks(self, sequences, mates)

    def store(self, batch: Batch, priority: int | None = None) -> None:
        """Put what the batch's rows stored into the tree and let go of everything they hold. A closed batch is left alone.

        Args:
            batch: whose steps are done. priority: see `match_prefix`; None takes that of the caller's lease.
        """
        self.tree.require_priority("insert", priority)
        with self.lock:
            if batch.closed:
                return
            if not batch.options.store or self.is_stale(batch):
                self._discard(batch)
                return
            if priority is None and batch.lent is not None:
                priority = batch.lent.priority
            for sequence in batch.sequences:
                self._insert(batch, sequence, priority)
            self._discard(batch)

    def discard(self, batch: Batch) -> None:
        """Let go of everything the batch's rows hold, storing nothing. A closed batch is left alone."""
        with self.lock:
            self._discard(batch)

    def insert_computed(self, token_ids, keys: Seq[torch.Tensor], values: Seq[torch.Tensor], priority: int | None = None) -> None:
        """Store K/V that somebody else computed.

        Args:
            token_ids: [n] token ids.
            keys, values: per layer [n, num_kv_heads, head_dim], rotated as the model's attention wants them.
            priority: see `match_prefix`.

        Raises:
            ValueError: the policy takes no such priority.
            OutOfBlocks: the pool cannot hold them.
        """
        self.tree.require_priority("insert", priority)
        key = token_key(token_ids)
        batch = self.admit([key], [1], counted=False)
        try:
            with self.prompt_step(batch) as step:
                step.begin()
                first = batch.sequences[0].hit_len
                for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
                    step.store(layer, k[first:].transpose(0, 1)[None], v[first:].transpose(0, 1)[None])
        except BaseException:
            self.discard(batch)
            raise
        self.store(batch, priority)

    def count_stock_call(self, reason: str) -> None:
        """Count a call that takes the model's own path, and say why in the log: the first time at level INFO, then at DEBUG."""
        with self.lock:
            self._counters.stock_calls += 1
            is_new = reason not in self._stock_reasons
            self._stock_reasons.add(reason)
        logger.log(logging.INFO if is_new else logging.DEBUG, "a call takes the model's own path: %s", reason)

    def _count_computed(self, batch: Batch, num_tokens: int) -> None:
        if batch.counted:
            self._counters.computed_tokens += num_tokens

    def _count_requests(self, batch: Batch) -> None:
        counters, listener = self._counters, self.tree.history.listener
        if batch.lent is None:
            counters.lookups += len(batch.sequences)
        log, now = self.request_log if batch.options.store else None, time()
        for sequence in batch.sequences:
            if sequence.lease is not None:
                sequence.lease.count_hit()
            if listener is not None and sequence.hit_len:
                listener(Hit(self.tree.tick(), batch.namespace, bytes(sequence.key), sequence.hit_len))
            counters.requests += 1
            counters.hits += 2 * sequence.hit_len >= max(1, sequence.num_tokens)
            counters.prompt_tokens += sequence.num_tokens
            counters.cached_tokens += sequence.hit_len
            if log is not None:
                log.append((self.tree.tick(), now, 1, sequence.num_tokens, sequence.hit_len))
