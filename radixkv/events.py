"""What a cache tells those who listen: prefixes stored, evicted and hit, and the lock that says it once nothing is locked."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import numpy as np

logger = logging.getLogger("radixkv")


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One thing that happened to a prefix.

    Attributes:
        step: the tree's logical time, see `RadixTree.tick`; a count of uses, not of seconds.
        namespace: where the prefix lives, as the tree has it: in a `PrefixCache` the weights' version, the adapters of a model that has
            some switched on, the cache's own namespace and the call's.
        key: the prefix as `token_key` makes it, 4 bytes per token.
        num_tokens: how many of its tokens this is about; which ones, each kind of event says.
    """

    step: int
    namespace: tuple
    key: bytes
    num_tokens: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of the prefix, made anew on each call."""
        return tuple(np.frombuffer(self.key, "<i4").tolist())


@dataclass(frozen=True, slots=True)
class Stored(CacheEvent):
    """The tree took in the last `num_tokens` of the prefix's tokens; it had the others before."""


@dataclass(frozen=True, slots=True)
class Evicted(CacheEvent):
    """The tree gave up the last `num_tokens` of the prefix's tokens.

    Attributes:
        reason: "room" (another prefix needed it), "clear" (it was asked to), "weights" (the model's weights changed) or "pool" (the
            model was moved or cast).
    """

    reason: str = "room"


@dataclass(frozen=True, slots=True)
class Hit(CacheEvent):
    """A prompt was admitted, and the first `num_tokens` of its tokens need not be computed for it."""


class EventLog:
    """The events that are still to be told, and whom to tell.

    Events are told one at a time and in order, by whichever thread finds that there are some; one that finds another at it leaves its own
    to that one.
    """

    def __init__(self) -> None:
        self.pending: deque[CacheEvent] = deque()
        self._callbacks: dict[int, Callable[[CacheEvent], object]] = {}
        self._num_added = 0
        self._failed: set[int] = set()
        self._telling = threading.Lock()

    def add(self, callback: Callable[[CacheEvent], object]) -> Callable[[], None]:
        """Tells a callable from now on; returns the function that ends it (at once, in any thread; a second time it does nothing)."""
        self._num_added += 1
        number = self._num_added
        # A new dictionary, because another thread may be walking through the old one.
        self._callbacks = {**self._callbacks, number: callback}

        def remove() -> None:
            self._callbacks = {other: kept for other, kept in self._callbacks.items() if other != number}
            self._failed.discard(number)

        return remove

    @property
    def listener(self) -> Callable[[CacheEvent], None] | None:
        """Where events go; None while nobody listens, so that none are made."""
        return self.pending.append if self._callbacks else None

    def tell(self) -> None:
        """Hands every pending event to every callback. An exception of one is logged, once for each callback, and goes no further."""
        while self.pending and self._telling.acquire(blocking=False):
            try:
                while self.pending:
                    self._tell_one(self.pending.popleft())
            finally:
                self._telling.release()

    def _tell_one(self, event: CacheEvent) -> None:
        for number, callback in self._callbacks.items():
            try:
                callback(event)
            except Exception:
                if number not in self._failed:
                    self._failed.add(number)
                    logger.exception("on_event: a callback failed at %s; its later failures are not logged", type(event).__name__)


class EventLock:
    """A re-entrant lock that tells the log's pending events when its holder lets go of it altogether."""

    __slots__ = ("_depth", "_lock", "_log", "_pending")

    def __init__(self, log: EventLog) -> None:
        self._lock = threading.RLock()
        self._log = log
        self._pending = log.pending
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth or not self._pending:
            self._lock.release()
        else:
            self._lock.release()
            self._log.tell()
