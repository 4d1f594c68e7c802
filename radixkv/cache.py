"""`PrefixCache`: the pool and the tree together, and the way of a sequence through them: admit, compute, store."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixkv.admission import admit_rows
from radixkv.attention import Backend
from radixkv.errors import OutOfBlocks, out_of_blocks
from radixkv.events import Hit
from radixkv.eviction import PolicyMaker
from radixkv.host_tier import Victim, make_tier, path_of
from radixkv.meter import PromptMeter
from radixkv.node import Node
from radixkv.observe import Observed
from radixkv.pin import Pin, Pins
from radixkv.pool import BlockPool
from radixkv.rows import append_tokens, fork_row, hold_published, join_rows, let_go, make_writable, take_rows, truncate_row
from radixkv.sequence import TOKEN_BYTES, Batch, CallOptions, Sequence
from radixkv.stats import CacheStats, Counters
from radixkv.step import Step
from radixkv.step_maker import StepMaker
from radixkv.tree import Lease, RadixTree, token_key

if TYPE_CHECKING:
    from radixkv.persist import LoadReport, SaveReport


class PrefixCache(Observed):
    """Every token's K/V in a pool of blocks, found again by the longest cached prefix.

    All methods may be called from several threads; a step holds the lock from planning to commit, so a block is never read before it is
    written. What happened meanwhile is told to `on_event`'s callbacks when the lock has been let go of.

    Args:
        pool: where K/V lives; owned by this cache from now on.
        backend: the attention functions that read and write the pool.
        namespace: a tuple that every prefix of this cache carries.
        eviction: what goes first when blocks are wanted, see `RadixTree`.
        pin_budget: the share of the pool's blocks that `pin` may hold, 0 to 1.
        host_bytes: host memory for evicted blocks, see `HostTier`; 0: none, they are lost.

    Attributes:
        tier: the second tier; None: none.

    Raises:
        ValueError: eviction is none of the names, pin_budget no share, or host_bytes less than a block.
    """

    def __init__(
        self,
        pool: BlockPool,
        backend: Backend,
        namespace: tuple = (),
        eviction: str | PolicyMaker = "slru",
        pin_budget: float = 0.5,
        host_bytes: int = 0,
    ):
        self.pool = pool
        self.backend = backend
        self.namespace = tuple(namespace)
        super().__init__(RadixTree(pool.block_size, eviction))
        # Batches whose owner died come back through this queue: a finalizer may run in the middle of any operation, so it only appends.
        self.returned: deque[Batch] = deque()
        self._eviction = eviction
        self._pins = Pins(pin_budget)
        self._host_bytes = host_bytes
        self.tier = make_tier(pool, host_bytes)
        self._live: set[Batch] = set()
        self._counters = Counters()
        self.meter = PromptMeter(pool.device)
        self._weights_version = 0
        self._steps = StepMaker(pool, backend)

    # What a user calls ----------------------------------------------------------------------------------------------------------------

    def match_prefix(self, token_ids, namespace: tuple = (), priority: int | None = None) -> Lease:
        """Hold the longest cached prefix of a prompt.

        Args:
            token_ids: [n] token ids: list, tuple, numpy or torch integers.
            namespace: what to add to this cache's namespace.
            priority: from now on that of the prefix, and of what a generate() with it stores; the lowest is evicted first. None leaves
                it as it is, 0 at first. With eviction="priority" only.

        Returns:
            A lease of `.length` tokens (0 is fine) to pass as `generate(prefix_cache=...)`. The blocks stay until it is released: by
            `release()`, by the end of a `with` block, when an output that used it is inserted or dropped, or when it is dropped itself.

        Raises:
            ValueError: token_ids is not a flat run of token ids, namespace is not a tuple, or the policy takes no such priority.
        """
        key = token_key(token_ids)
        require_namespace("match_prefix", namespace)
        with self.lock:
            self._collect()
            self._counters.lookups += 1
            return self._lease(key, namespace, priority)

    def pin(self, token_ids, namespace: tuple = ()) -> Pin:
        """Keep the longest cached prefix of some tokens until it is unpinned; nothing is computed.

        Pinned blocks are never evicted and survive `clear()`. `invalidate()` lets go of all pins, and so does a move of the model.

        Args:
            token_ids: [n] token ids: list, tuple, numpy or torch integers.
            namespace: what to add to this cache's namespace.

        Returns:
            The pin, of `.length` tokens. It lasts until its `release()`, `unpin(pin)` or the end of a `with` block, even if it is dropped.

        Raises:
            ValueError: nothing of it is cached, token_ids is not a flat run of token ids, or namespace is not a tuple.
            OutOfBlocks: more than `pin_budget` of the pool would be pinned; nothing is changed.
        """
        key = token_key(token_ids)
        require_namespace("pin", namespace)
        with self.lock:
            self._collect()
            lease = self._lease(key, namespace)
            try:
                if not lease.length:
                    raise ValueError(
                        f"pin: nothing of these {len(key) // TOKEN_BYTES} tokens is cached in namespace {namespace}: "
                        "run generate() on them or insert() them first, and check with match_prefix()"
                    )
                return self._pins.hold(self, lease)
            except BaseException:
                lease.release()
                raise

    def unpin(self, pin: Pin) -> None:
        """Let a pinned prefix be evicted like any other. Nothing happens if that was done before.

        Raises:
            ValueError: it is no pin of this cache.
        """
        if not isinstance(pin, Pin) or not pin.is_of(self):
            raise ValueError(f"unpin: expected what pin() of this cache returned (see `pins`), got {pin!r}")
        with self.lock:
            self._pins.let_go(pin)

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The pins that are held, in the order in which they were made."""
        with self.lock:
            return self._pins.all()

    def stats(self) -> CacheStats:
        """A snapshot of the counters and of the pool."""
        with self.lock:
            self._collect()
            counters, evictable, history = self._counters, self.tree.num_evictable_blocks, self.tree.history
            return CacheStats(
                requests=counters.requests,
                hits=counters.hits,
                misses=counters.requests - counters.hits,
                prompt_tokens=counters.prompt_tokens,
                cached_tokens=counters.cached_tokens,
                computed_tokens=counters.computed_tokens,
                stock_calls=counters.stock_calls,
                evicted_tokens=history.evicted_tokens - counters.evicted_before,
                blocks_free=self.pool.num_free,
                blocks_cached=evictable,
                blocks_leased=self.pool.num_blocks - self.pool.num_free - evictable,
                blocks_pinned=self._pins.num_blocks,
                blocks_host=0 if self.tier is None else self.tier.tree.num_blocks,
                restored_tokens=0 if self.tier is None else self.tier.restored_tokens - counters.restored_before,
                lookups=counters.lookups,
                insertions=history.num_insertions - counters.insertions_before,
                stored_tokens=history.stored_tokens - counters.stored_before,
                evicted_blocks=history.evicted_blocks - counters.evicted_blocks_before,
                tree_tokens=self.tree.num_tokens,
            )

    def reset_stats(self) -> None:
        """Set all counters to zero; what is cached stays."""
        with self.lock:
            restored = 0 if self.tier is None else self.tier.restored_tokens
            history = self.tree.history
            self._counters = Counters(
                evicted_before=history.evicted_tokens,
                restored_before=restored,
                insertions_before=history.num_insertions,
                stored_before=history.stored_tokens,
                evicted_blocks_before=history.evicted_blocks,
            )

    def clear(self) -> None:
        """Drop every cached prefix that nobody holds, from host memory too."""
        with self.lock:
            self._clear("clear")

    def invalidate(self) -> None:
        """The model's weights changed: nothing cached so far is served again, and what nobody holds is dropped.

        All pins are let go. What a lease or a running sequence holds stays until it is released, and is the first to go then.

        A patched model sees for itself that its parameters were written or replaced, except for writes through `parameter.data`, which
        leave no trace: call this after those.
        """
        with self.lock:
            self._pins.let_go_of_all()
            self.tree.retire((("weights", self._weights_version),))
            self._weights_version += 1
            self._clear("weights")

    def save(self, path: str | os.PathLike[str], *, fingerprint: Mapping[str, object] | None = None) -> SaveReport:
        """Write every cached prefix to a file, in place of the one that is there.

        All namespaces are in it, partly filled blocks too, each token once. The file holds the tokens themselves: keep it as you keep the
        prompts. It is one of safetensors; at every moment, whatever is killed, the whole old one or the whole new one stands at `path`. No
        step runs while the pool is read, which takes as long as writing it; beside the pool a few megabytes are needed.

        Args:
            path: the file to write; its folder exists.
            fingerprint: facts that must be the same where the file is loaded: which weights, what for; anything that JSON can hold.
                One that is None where it is loaded is not compared.

        Returns:
            A report, also logged at level INFO.

        Raises:
            OSError: it could not be written; the old file is as it was.
            ValueError: a namespace holds other than str, int, float, bool, bytes, None and tuples of those, or the fingerprint something
                that JSON has no form for.
        """
        from radixkv.persist import save_cache

        return save_cache(self, path, lambda: fingerprint or {})

    def load(self, path: str | os.PathLike[str], *, fingerprint: Mapping[str, object] | None = None) -> LoadReport:
        """Add the prefixes of a file that `save` wrote to what is cached, all or, on an exception, none of them.

        Nothing is evicted: what was used last is loaded first, up to the free blocks, the last prefix in part. What was loaded counts as
        used now, in the order of its uses before. The block size may be another one than where the file was saved.

        Args:
            path: the file.
            fingerprint: what `save` was given.

        Returns:
            A report of what was loaded and what not, and whether that was faster than computing it; also logged at level INFO.

        Raises:
            OSError: it could not be read.
            ValueError: the file is damaged, of another format, or differs in dtype, shape, namespace or fingerprint (the message says how).
        """
        from radixkv.persist import load_cache

        return load_cache(self, path, lambda: fingerprint or {})

    def check(self) -> None:
        """Walk everything and assert conservation: free, cached, leased and running blocks are all blocks, each with its true count.

        Raises:
            AssertionError: an invariant does not hold; the message says which.
        """
        with self.lock:
            self._collect()
            self.tree.check()
            rows = [sequence for batch in self._live for sequence in batch.sequences]
            self.pool.check(self.tree.blocks(), *(row.blocks[row.num_leased :] for row in rows))
            if self.tier is not None:
                self.tier.check()

    # What the integration calls -------------------------------------------------------------------------------------------------------

    def full_namespace(self, namespace: tuple = ()) -> tuple:
        """The namespace that the tree sees: the weights' version, this cache's own, then the caller's, each in its place."""
        return (("weights", self._weights_version), ("cache", self.namespace), ("call", tuple(namespace)))

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock, with what was given back taken in; before and after, the device has done all that it was asked to."""
        with self.lock:
            self._collect()
            self._synchronize()
            yield
            self._synchronize()

    def replace_pool(self, pool: BlockPool, backend: Backend) -> None:
        """Start over, empty, on another pool.

        Raises:
            RuntimeError: sequences are running or outputs are held; nothing is changed.
        """
        with self.lock:
            self._collect()
            if self._live:
                raise RuntimeError("the model was moved or cast while outputs of generate() are held: insert or drop them first")
            tier = make_tier(pool, self._host_bytes)
            self._pins.let_go_of_all()
            self.tier = tier
            self.pool, self.backend = pool, backend
            self._replace_tree(RadixTree(pool.block_size, self._eviction))
            self._steps = StepMaker(pool, backend)
            self.meter = PromptMeter(pool.device)
            self._counters.restored_before = 0

    def count_stock_call(self) -> None:
        with self.lock:
            self._counters.stock_calls += 1

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
            keys: N prompts, int32 little-endian, none empty.
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
            _require_open(batch)
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
            _require_open(batch)
            sequences = [batch.sequences[row] for row in rows]
            if batch.step_rows != tuple(rows):
                batch.step_rows, batch.carried = tuple(rows), {}
            keys = np.asarray(token_ids, dtype="<i4").tobytes()
            for sequence, start in zip(sequences, range(0, len(keys), TOKEN_BYTES), strict=True):
                sequence.key += keys[start : start + TOKEN_BYTES]
            try:
                self._make_room(batch, sequences)
                self._count_computed(batch, len(sequences))
                with self._steps.decode(sequences, batch.carried, num_rows) as step:
                    yield step
            except BaseException:
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
            _require_open(batch)
            sequences = [batch.sequences[row] for row in rows]
            before = [sequence.num_tokens for sequence in sequences]
            batch.step_rows, batch.carried = (), {}
            try:
                num_found = append_tokens(self, batch, sequences, keys, num_logits)
                num_computed = sum(sequence.num_tokens - sequence.num_stored for sequence in sequences)
                self._count_computed(batch, num_computed)
                if is_prompt and batch.counted:
                    self._counters.prompt_tokens += num_found + num_computed
                    self._counters.cached_tokens += num_found
                with self._steps.prompt(sequences, {}) as step:
                    yield step
            except BaseException:
                for sequence, num_tokens in zip(sequences, before, strict=True):
                    truncate_row(self, sequence, num_tokens)
                raise
            for sequence in sequences:
                sequence.num_stored = sequence.num_tokens

    def truncate(self, batch: Batch, num_tokens: Seq[int]) -> None:
        """Take what lies past so many tokens off each row of a batch that is open; a row that is shorter stays as it is."""
        with self.lock:
            _require_open(batch)
            batch.may_share, batch.step_rows, batch.carried = True, (), {}
            for sequence, length in zip(batch.sequences, num_tokens, strict=True):
                truncate_row(self, sequence, length)

    def rearrange(self, batch: Batch, order: Seq[int]) -> None:
        """Let row i of an open batch become what row order[i] was. Rows that are named several times share their blocks from then on."""
        with self.lock:
            _require_open(batch)
            old = batch.sequences
            if list(order) == list(range(len(old))):
                return
            rows: dict[int, Sequence] = {}
            new: list[Sequence] = []
            try:
                for row in order:
                    new.append(fork_row(self, old[row]) if row in rows else rows.setdefault(row, old[row]))
            except BaseException:
                let_go(self, [sequence for sequence in new if all(sequence is not other for other in old)])
                raise
            batch.sequences, batch.may_share = new, True
            batch.step_rows, batch.carried = (), {}
            let_go(self, [sequence for row, sequence in enumerate(old) if row not in rows])

    def fork(self, batch: Batch) -> Batch:
        """A second batch with the rows of an open one, in the same blocks; both go their own ways from here."""
        with self.lock:
            self._collect()
            _require_open(batch)
            forked = Batch([], batch.namespace, batch.options, batch.counted)
            self._live.add(forked)
            try:
                for sequence in batch.sequences:
                    forked.sequences.append(fork_row(self, sequence))
            except BaseException:
                self._discard(forked)
                raise
            batch.may_share = forked.may_share = True
            return forked

    def join(self, batch: Batch, other: Batch) -> None:
        """Let the rows of another open batch become further rows of this one, after its own; the other one is closed then.

        Raises:
            ValueError: they differ in namespace or options, or the other one was admitted with a lease.
        """
        with self.lock:
            _require_open(batch)
            _require_open(other)
            join_rows(batch, other)
            self._discard(other)

    def part(self, batch: Batch, rows: Seq[int]) -> Batch:
        """Take rows out of an open batch; they become a batch of their own, to be stored or discarded."""
        with self.lock:
            _require_open(batch)
            parted = take_rows(batch, rows)
            self._live.add(parted)
            return parted

    def publish(self, batch: Batch, row: int) -> None:
        """Put what a running row has stored into the tree, where other prompts find it; the row goes on.

        Nothing happens to a row whose batch is not to be stored, or whose weights have changed since.
        """
        with self.lock:
            self._collect()
            _require_open(batch)
            sequence = batch.sequences[row]
            if not sequence.num_stored or not batch.options.store or self.is_stale(batch):
                return
            self._insert(sequence, batch.namespace, None)
            with suppress(OutOfBlocks):
                hold_published(self, batch, sequence)

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
                self._insert(sequence, batch.namespace, priority)
            self._discard(batch)

    def is_stale(self, batch: Batch) -> bool:
        """Whether a batch was computed with weights that have changed since."""
        return batch.namespace[0] != self.full_namespace()[0]

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

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, evicting what is needed and no more. The caller holds the lock.

        Raises:
            OutOfBlocks: not even evicting everything would do; nothing is evicted.
        """
        short = num_blocks - self.pool.num_free
        if short > 0:
            if short > self.tree.num_evictable_blocks:
                self._shrink_leases()
            evictable = self.tree.num_evictable_blocks
            if short > evictable:
                free, block_size = self.pool.num_free, self.pool.block_size
                raise out_of_blocks(num_blocks, block_size, free, evictable, self.pool.num_blocks - free - evictable, self._pins.num_blocks)
            self._evict(short)
        return self.pool.allocate(num_blocks)

    def known_prefix(self, key: bytes, namespace: tuple = ()) -> tuple[int, int]:
        """How many leading tokens of a prompt are cached, and how many of those are held, so that reusing them takes no block from others.

        Args:
            key: the prompt, int32 little-endian. namespace: what to add to this cache's own.
        """
        with self.lock:
            self._collect()
            match = self.tree.match_prefix(key, self.full_namespace(namespace))
            return match.length, match.held_length

    @property
    def num_allocatable(self) -> int:
        """Blocks that `allocate` can give as things are, without shortening the leases of running rows."""
        return self.pool.num_free + self.tree.num_evictable_blocks

    # Inside, under the lock -----------------------------------------------------------------------------------------------------------

    def _lease(self, key: bytes, namespace: tuple, priority: int | None = None) -> Lease:
        """Hold the longest cached prefix, what is in host memory included."""
        full_namespace = self.full_namespace(namespace)
        self.tree.require_priority("match_prefix", priority)
        if self.tier is not None:
            self.tier.restore(self, key, full_namespace, len(key) // TOKEN_BYTES)
        return self.tree.lock(self.tree.match_prefix(key, full_namespace), priority)

    def _evict(self, num_blocks: int) -> None:
        victims: dict[Node, Victim] = {}

        def note(node: Node) -> None:
            if node not in victims and not self.tree.is_stale(node):
                victims[node] = path_of(node)

        given_up = self.tree.evict(num_blocks, None if self.tier is None else note)
        try:
            if self.tier is not None:
                self.tier.store(list(victims.values()))
        finally:
            self.pool.release(given_up)

    def _clear(self, reason: str) -> None:
        self._collect()
        if self.tier is not None:
            self.tier.clear()
        self.pool.release(self.tree.clear(reason))

    def _collect(self) -> None:
        while self.returned:
            self._discard(self.returned.popleft())

    def _synchronize(self) -> None:
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)

    def _count_computed(self, batch: Batch, num_tokens: int) -> None:
        if batch.counted:
            self._counters.computed_tokens += num_tokens

    def _shrink_leases(self) -> None:
        """Let running rows hold whole blocks only: of a partly matched one they have their own copy by now."""
        for batch in self._live:
            for sequence in batch.sequences:
                leased_len = sequence.num_leased * self.pool.block_size
                if sequence.num_stored and sequence.lease is not None and sequence.lease.length > leased_len:
                    shorter = self.tree.lock(self.tree.match_prefix(bytes(sequence.key), batch.namespace, leased_len))
                    sequence.lease.release()
                    sequence.lease = shorter

    def _insert(self, sequence: Sequence, namespace: tuple, priority: int | None) -> None:
        """Move a row's stored tokens into the tree; afterwards the row holds only what the tree did not take."""
        if sequence.num_stored == 0:
            return
        if sequence.lease is not None:  # first, so that a leaf nobody else holds can grow in place
            sequence.lease.release()
            sequence.lease = None
        num_blocks = -(-sequence.num_stored // self.pool.block_size)
        key = bytes(sequence.key[: sequence.num_stored * TOKEN_BYTES])
        inserted = self.tree.insert(key, sequence.blocks[:num_blocks], namespace, priority)
        own = range(sequence.num_leased, len(sequence.blocks))
        unused = [sequence.blocks[i] for i in own if i < inserted.first_adopted or i >= num_blocks]
        sequence.blocks, sequence.num_leased = inserted.blocks, num_blocks
        self.pool.release(unused)
        self.pool.release(inserted.replaced)

    def _discard(self, batch: Batch) -> None:
        if batch.closed:
            return
        batch.closed, batch.carried = True, {}
        self._live.discard(batch)
        let_go(self, batch.sequences)
        if batch.lent is not None:
            batch.lent.give_back()

    def _make_room(self, batch: Batch, sequences: list[Sequence]) -> None:
        """Give rows that are one token longer the block for it, if it takes one."""
        if batch.may_share:
            make_writable(self, sequences)
            return
        full = [sequence for sequence in sequences if sequence.num_stored == len(sequence.blocks) * self.pool.block_size]
        for sequence, block in zip(full, self.allocate(len(full)), strict=True):
            sequence.blocks.append(block)

    def _count_requests(self, batch: Batch) -> None:
        counters, listener = self._counters, self.tree.history.listener
        if batch.lent is None:
            counters.lookups += len(batch.sequences)
        for sequence in batch.sequences:
            if sequence.lease is not None:
                sequence.lease.count_hit()
            if listener is not None and sequence.hit_len:
                listener(Hit(self.tree.tick(), batch.namespace, bytes(sequence.key), sequence.hit_len))
            counters.requests += 1
            counters.hits += 2 * sequence.hit_len >= sequence.num_tokens
            counters.prompt_tokens += sequence.num_tokens
            counters.cached_tokens += sequence.hit_len


def require_namespace(function: str, namespace: tuple) -> None:
    """Raise ValueError unless namespace is a tuple that can be looked up."""
    if not isinstance(namespace, tuple):
        raise ValueError(f"{function}: namespace must be a tuple, got {type(namespace).__name__}")
    try:
        hash(namespace)
    except TypeError as error:
        raise ValueError(f"{function}: namespace must hold hashable values only: {error}") from None


def _require_open(batch: Batch) -> None:
    if batch.closed:
        raise RuntimeError("this batch was already stored or dropped: start a new generate()")
