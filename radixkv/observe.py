"""What a prefix cache tells of itself: why a prompt matched as it did, events, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from radixkv.events import CacheEvent, EventLock, EventLog
from radixkv.explain import Explanation, explain
from radixkv.metrics import metrics_of
from radixkv.token_key import require_namespace

if TYPE_CHECKING:
    from radixkv.host_tier import HostTier
    from radixkv.stats import CacheStats
    from radixkv.tree import RadixTree


class Observed:
    """The part of `PrefixCache` that can be looked at and listened to.

    Attributes:
        tree: which prefixes are cached. `tree()` is a picture of it, see `RadixTree.__call__`.
        lock: held by every operation; when it is let go of, `events` are told.
    """

    tier: HostTier | None

    def __init__(self, tree: RadixTree) -> None:
        self.tree = tree
        self.events = EventLog()
        self.lock = EventLock(self.events)
        tree.guard = self.lock

    def explain(self, token_ids: Any, namespace: tuple = (), *, num_logits: int = 1, tokenizer: Any = None) -> Explanation:
        """Say what of a prompt is cached, and why not more. It changes nothing: no recency, no counter.

        Whether it was evicted is known for the last 1,024 runs of evicted tokens of nodes that are gone, and as many of those that were
        shortened. Names of other namespaces are told: show explanations to whom you would show those.

        Args:
            token_ids: [n] token ids: list, tuple, numpy or torch integers.
            namespace: what to add to this cache's namespace.
            num_logits: how many of the last tokens are computed for their logits; generate() asks for 1.
            tokenizer: anything with `decode(ids)`, to show the tokens around a difference as text.

        Returns:
            The explanation, which prints as a paragraph. For a patched model it holds for the weights of its last call.

        Raises:
            ValueError: token_ids is not a flat run of token ids, namespace is not a tuple, or tokenizer decodes nothing.
        """
        require_namespace("explain", namespace)
        with self.lock:
            host_tree = None if self.tier is None else self.tier.tree
            return explain(self.tree, token_ids, self.full_namespace(namespace), num_logits, tokenizer, host_tree)

    def on_event(self, callback: Callable[[CacheEvent], object]) -> Callable[[], None]:
        """Call a function with everything that is stored, evicted and hit from now on.

        It is called with a `Stored`, `Evicted` or `Hit` of `radixkv.events`, in the order in which they happened, one at a time, once no
        lock is held, by the thread that caused it or by one that is telling others at that moment. So it may use the cache and even call
        generate(); but some generate() waits for it, so hand over to a queue what takes long. An exception that it raises is logged, the
        first one of each callback, and goes no further.

        Args:
            callback: takes one event; what it returns is ignored.

        Returns:
            A function that ends it.

        Raises:
            TypeError: callback cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"on_event: callback must be callable, got {type(callback).__name__}")
        with self.lock:
            remove = self.events.add(callback)
            self.tree.history.listener = self.events.listener

        def stop() -> None:
            with self.lock:
                remove()
                self.tree.history.listener = self.events.listener

        return stop

    def metrics(self) -> dict[str, int | float]:
        """The numbers under their Prometheus names; `radixkv.metrics.METRICS` says what each is, `render_metrics` writes them."""
        return metrics_of(self.stats())

    def full_namespace(self, namespace: tuple = ()) -> tuple:
        """See `PrefixCache`."""
        raise NotImplementedError

    def stats(self) -> CacheStats:
        """See `PrefixCache`."""
        raise NotImplementedError

    def _replace_tree(self, tree: RadixTree) -> None:
        """Another tree, empty, goes on with the counters and the listener; what the present one holds is gone."""
        self.tree.history.give_up_all(self.tree, "pool")
        tree.guard = self.lock
        tree.history.carry_on(self.tree.history)
        self.tree = tree
