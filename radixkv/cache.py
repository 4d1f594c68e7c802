"""`PrefixCache`: what a user calls of a prefix cache. Its blocks are in storage.py, the way of a sequence through them in requests.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.eviction import PolicyMaker
from radixkv.pin import Pin
from radixkv.pool import BlockPool
from radixkv.progress import require_progress
from radixkv.requests import Requests
from radixkv.sequence import TOKEN_BYTES
from radixkv.several_devices import AnyBackend
from radixkv.stats import CacheStats, Counters
from radixkv.token_key import require_namespace
from radixkv.tree import Lease, token_key

if TYPE_CHECKING:
    from radixkv.persist import LoadReport, SaveReport


class PrefixCache(Requests):
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
        tokenizer: the user's to set: what `report` decodes with where none is given.

    Raises:
        ValueError: eviction is none of the names, pin_budget no share, or host_bytes less than a block.
    """

    tokenizer: Any = None

    def __init__(
        self,
        pool: BlockPool,
        backend: AnyBackend,
        namespace: tuple = (),
        eviction: str | PolicyMaker = "slru",
        pin_budget: float = 0.5,
        host_bytes: int = 0,
    ):
        super().__init__(pool, backend, namespace, eviction, pin_budget, host_bytes)

    def __repr__(self) -> str:
        # Without the lock: a debugger shows it while another thread computes.
        pool = self.pool
        return (
            f"<{type(self).__name__}: {self.tree.num_tokens:,} tokens cached, "
            f"{pool.num_free:,} of {pool.num_blocks:,} blocks of {pool.block_size} tokens free>"
        )

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

    def save(
        self, path: str | os.PathLike[str], *, fingerprint: Mapping[str, object] | None = None, progress: bool | None = True
    ) -> SaveReport:
        """Write every cached prefix to a file, in place of the one that is there.

        All namespaces are in it, partly filled blocks too, each token once, with the order of their uses and what the eviction policy
        knows of them. Leases and pins are not: they are of this process, and what they hold is saved like the rest; pin it again where it
        is loaded. The file holds the tokens themselves: keep it as you keep the prompts. It is one of safetensors; at every moment,
        whatever is killed, the whole old one or the whole new one stands at `path`. No step runs while the pool is read, which takes as
        long as writing it; beside the pool a few megabytes are needed.

        Args:
            path: the file to write; its folder exists.
            fingerprint: facts that must be the same where the file is loaded: which weights, what for; anything that JSON can hold.
                One that is None where it is loaded is not compared.
            progress: whether to show a progress bar where it takes longer than two seconds; None: only on a terminal or in a notebook.

        Returns:
            A report, also logged at level INFO.

        Raises:
            OSError: it could not be written; the old file is as it was.
            ValueError: a namespace holds other than str, int, float, bool, bytes, None and tuples of those, or the fingerprint something
                that JSON has no form for.
        """
        from radixkv.persist import save_cache

        require_progress("save", progress)
        return save_cache(self, path, lambda: fingerprint or {}, progress)

    def load(
        self, path: str | os.PathLike[str], *, fingerprint: Mapping[str, object] | None = None, progress: bool | None = True
    ) -> LoadReport:
        """Add the prefixes of a file that `save` wrote to what is cached, all or, on an exception, none of them.

        Nothing is evicted: what was used last is loaded first, up to the free blocks, the last prefix in part. What was loaded counts as
        used now, in the order of its uses before; counts, segments and priorities come back where the policy is the same as where the file
        was saved. The block size may be another one than where the file was saved.

        Args:
            path: the file.
            fingerprint: what `save` was given.
            progress: as in `save`.

        Returns:
            A report of what was loaded and what not, and whether that was faster than computing it; also logged at level INFO.

        Raises:
            OSError: it could not be read.
            ValueError: the file is damaged, of another format, or differs in dtype, shape, namespace or fingerprint (the message says how).
        """
        from radixkv.persist import load_cache

        require_progress("load", progress)
        return load_cache(self, path, lambda: fingerprint or {}, progress)

    def report(self, path: str | os.PathLike[str], *, tokenizer: Any = None, max_nodes: int = 10_000) -> Path:
        """Write one HTML file that shows the cache as it is now: the tree, to fold and search, the pool, hits and evictions over time.

        It is for the owner of the cache: all namespaces are in it, with the text of prompts. Keep it as you keep the prompts. It needs no
        network and asks nothing of anyone, and what a prompt says stays text in it, HTML and script included. Writing it changes nothing,
        no recency and no counter, and holds the lock only while what is shown is copied. At every moment, whatever is killed, the whole
        old file or the whole new one stands at `path`.

        Of the requests the last 4,096 are drawn (those with store=False are counted only), of what was evicted the last 1,024 calls, and
        the last 1,024 runs of evicted tokens of nodes that are gone and as many of those that were shortened.

        Args:
            path: the file to write; its folder exists.
            tokenizer: anything with `decode(ids)`, to show tokens as text; None takes the attribute `tokenizer`, and without one shows ids.
            max_nodes: how many nodes are shown, those with the most tokens at and below them; the rest is counted.

        Returns:
            The path.

        Raises:
            OSError: it could not be written; the old file is as it was.
            ValueError: max_nodes is not an int of at least 1, or tokenizer decodes nothing.
        """
        from radixkv.report import write_report

        return write_report(self, path, self.tokenizer if tokenizer is None else tokenizer, max_nodes)
