"""`CacheStorage`: the pool, the tree and the second tier as one room of blocks, and who holds which of them."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from radixkv.errors import out_of_blocks
from radixkv.eviction import PolicyMaker
from radixkv.host_tier import Victim, make_tier, path_of
from radixkv.meter import PromptMeter
from radixkv.node import Node
from radixkv.observe import Observed
from radixkv.occupants import Occupants
from radixkv.pin import Pins
from radixkv.pool import BlockPool
from radixkv.rows import let_go
from radixkv.sequence import TOKEN_BYTES, Batch, Sequence
from radixkv.several_devices import AnyBackend, make_steps
from radixkv.stats import NUM_REQUESTS, Counters
from radixkv.tree import Lease, RadixTree

logger = logging.getLogger("radixkv")


class CacheStorage(Observed):
    """Blocks that are free, cached, leased or owned by running rows: each is one of these at any time.

    What is told to `on_event`'s callbacks and what else the arguments are: see `PrefixCache`, which is made of this.
    """

    def __init__(
        self, pool: BlockPool, backend: AnyBackend, namespace: tuple, eviction: str | PolicyMaker, pin_budget: float, host_bytes: int
    ) -> None:
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
        # The last prompts, each in the order of `LoggedPrompt`; those with store=False leave no trace here either.
        self.request_log: deque[tuple[int, float, int, int, int]] = deque(maxlen=NUM_REQUESTS)
        self.meter = PromptMeter(pool.device)
        self._weights_version = 0
        # Why calls took the model's own path so far.
        self._stock_reasons: set[str] = set()
        self._steps = make_steps(pool, backend)
        self.occupants = Occupants()

    def full_namespace(self, namespace: tuple = ()) -> tuple:
        """The namespace that the tree sees: the weights' version, this cache's own, then the caller's, each in its place."""
        return (self._weights_part(), ("cache", self.namespace), ("call", tuple(namespace)))

    def is_current(self, namespace: tuple) -> bool:
        """Whether a full namespace is of the present weights."""
        return namespace[0] == self._weights_part()

    def to_saved(self, namespace: tuple) -> tuple:
        """A full namespace as a file has it: without what counts the changes of the weights."""
        return namespace[1:]

    def from_saved(self, namespace: tuple) -> tuple:
        """The full namespace that stands here for one of a file."""
        return (self._weights_part(), *namespace)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock, with what was given back taken in; before and after, the device has done all that it was asked to."""
        with self.lock:
            self._collect()
            self._synchronize()
            yield
            self._synchronize()

    def replace_pool(self, pool: BlockPool, backend: AnyBackend) -> None:
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
            self._steps = make_steps(pool, backend)
            self.meter = PromptMeter(pool.device)
            self._counters.restored_before = 0

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, evicting what is needed and no more. The caller holds the lock.

        Raises:
            OutOfBlocks: not even evicting everything would do; nothing is evicted.
        """
        short = num_blocks - self.pool.num_free
        if short > 0:
            if not self._can_free(short):
                self._shrink_leases()
            if not self._can_free(short):
                free, evictable, block_size = self.pool.num_free, self._num_freeable(), self.pool.block_size
                leased, pinned = self.pool.num_blocks - free - evictable, self._pins.num_blocks
                error = out_of_blocks(num_blocks, block_size, free, evictable, leased, pinned)
                logger.info("the pool cannot give what is asked for: %s", error)
                raise error
            while short > 0 and self.tree.num_evictable_blocks:  # again, if a block went that a row holds too
                self._evict(short)
                short = num_blocks - self.pool.num_free
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
    def num_computed(self) -> int:
        """Tokens computed so far, as the statistics count them; another number after each step of a request."""
        return self._counters.computed_tokens

    @property
    def num_allocatable(self) -> int:
        """Blocks that `allocate` can give as things are, without shortening the leases of running rows."""
        with self.lock:
            return self.pool.num_free + self._num_freeable()

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

    def _weights_part(self) -> tuple:
        return "weights", self._weights_version

    def _lease(self, key: bytes, namespace: tuple, priority: int | None = None) -> Lease:
        """Hold the longest cached prefix, what is in host memory included."""
        full_namespace = self.full_namespace(namespace)
        self.tree.require_priority("match_prefix", priority)
        if self.tier is not None:
            self.tier.restore(self, key, full_namespace, len(key) // TOKEN_BYTES)
        return self.tree.lock(self.tree.match_prefix(key, full_namespace), priority)

    def _can_free(self, num_blocks: int) -> bool:
        """Whether evicting would free so many."""
        num_held = sum(len(row.blocks) - row.num_leased for row in self._sharing_rows())
        return self.tree.num_evictable_blocks - num_held >= num_blocks or self._num_freeable() >= num_blocks

    def _sharing_rows(self) -> Iterator[Sequence]:
        """The rows that may hold blocks which the tree, or another row, holds too."""
        return (row for batch in self._live if batch.may_share or batch.shares_blocks for row in batch.sequences)

    def _num_freeable(self) -> int:
        """Blocks that evicting would free: not those that a row, which has been stored meanwhile, left to the tree and to another row."""
        held = Counter(block for row in self._sharing_rows() for block in row.blocks[row.num_leased :])
        also_cached = {block for block, count in held.items() if self.pool.reference_count(block) > count}
        if not also_cached:
            return self.tree.num_evictable_blocks
        evictable = (block for node in self.tree.nodes() if not node.locks for block in node.blocks)
        return self.tree.num_evictable_blocks - sum(block in also_cached for block in evictable)

    def _evict(self, num_blocks: int) -> None:
        victims: dict[Node, Victim] = {}

        def note(node: Node) -> None:
            if node not in victims and not self.tree.is_stale(node):
                victims[node] = path_of(node)

        is_first = not self.tree.history.evicted_blocks
        given_up = self.tree.evict(num_blocks, None if self.tier is None else note)
        try:
            if self.tier is not None:
                self.tier.store(list(victims.values()))
        finally:
            self.pool.release(given_up)
        # Logged last: a handler may raise.
        if is_first:
            num_blocks, policy = self.pool.num_blocks, self.tree.queue.name
            logger.info("the pool of %d blocks is full: from now on cached prefixes are evicted, policy %s", num_blocks, policy)
        logger.debug("evicted %d blocks", len(given_up))

    def _clear(self, reason: str) -> None:
        self._collect()
        if self.tier is not None:
            self.tier.clear()
        self.pool.release(self.tree.clear(reason))

    def _collect(self) -> None:
        while self.returned:
            self._discard(self.returned.popleft())

    def _synchronize(self) -> None:
        for device in dict.fromkeys(self.pool.devices):
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _shrink_leases(self) -> None:
        """Let running rows hold whole blocks only: of a partly matched one they have their own copy by now."""
        for batch in self._live:
            for sequence in batch.sequences:
                leased_len = sequence.num_leased * self.pool.block_size
                if sequence.num_stored and sequence.lease is not None and sequence.lease.length > leased_len:
                    shorter = sequence.lease.beginning(leased_len)
                    sequence.lease.release()
                    sequence.lease = shorter

    def _insert(self, batch: Batch, sequence: Sequence, priority: int | None) -> None:
        """Move a row's stored tokens into the tree; afterwards the row holds only what the tree did not take."""
        if sequence.num_stored == 0:
            return
        if batch.may_share:
            self._fill_cached(batch, sequence)
        if sequence.lease is not None:  # first, so that a leaf nobody else holds can grow in place
            sequence.lease.release()
            sequence.lease = None
        num_blocks = -(-sequence.num_stored // self.pool.block_size)
        key = bytes(sequence.key[: sequence.num_stored * TOKEN_BYTES])
        inserted = self.tree.insert(key, sequence.blocks[:num_blocks], batch.namespace, priority)
        own = range(sequence.num_leased, len(sequence.blocks))
        unused = [sequence.blocks[i] for i in own if i < inserted.first_adopted or i >= num_blocks]
        sequence.blocks, sequence.num_leased = inserted.blocks, num_blocks
        self.pool.release(unused)
        self.pool.release(inserted.replaced)

    def _fill_cached(self, batch: Batch, sequence: Sequence) -> None:
        """See that the first block that the tree would take of a row is not the tree's already.

        It is where a fork of the row was cut off inside of that block, and stored.
        """
        size = self.pool.block_size
        key = bytes(sequence.key[: sequence.num_stored * TOKEN_BYTES])
        match = self.tree.match_prefix(key, batch.namespace)
        first = match.length // size
        if match.length < sequence.num_stored and self.pool.reference_count(sequence.blocks[first]) > 1:
            self.tree.fill_block(key[: (first + 1) * size * TOKEN_BYTES], sequence.blocks[first], batch.namespace)

    def _discard(self, batch: Batch) -> None:
        if batch.closed:
            return
        batch.closed, batch.carried = True, {}
        self._live.discard(batch)
        let_go(self, batch.sequences)
        if batch.lent is not None:
            batch.lent.give_back()
