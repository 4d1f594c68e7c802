"""Pins: prefixes that stay cached until the user says otherwise, within a share of the pool."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING

from radixkv.errors import OutOfBlocks
from radixkv.tree import Lease

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache


class Pin:
    """A cached prefix that is not evicted; made by `PrefixCache.pin`, and held by the cache even if the caller drops it.

    A context manager: leaving it lets go. `PrefixCache.invalidate()` lets go of every pin, because what it held is of no use then.

    Attributes:
        length: tokens of the prefix.
        tokens: the prefix as key bytes.
        namespace: where it lives.
        blocks: ids of its blocks, in token order.
        released: whether it was let go, by `release()`, by `unpin()` or by the cache.
    """

    __slots__ = ("length", "tokens", "namespace", "blocks", "released", "_cache", "_lease")

    def __init__(self, cache: PrefixCache, lease: Lease) -> None:
        self.length, self.tokens, self.namespace, self.blocks = lease.length, lease.tokens, lease.namespace, tuple(lease.blocks)
        self.released = False
        self._cache = cache
        self._lease = lease

    def release(self) -> None:
        """Lets the prefix be evicted like any other. Nothing happens if it was let go before."""
        self._cache.unpin(self)

    def is_of(self, cache: PrefixCache) -> bool:
        """Whether that cache made it."""
        return self._cache is cache

    def drop_lease(self) -> None:
        """What `Pins` does when it lets go."""
        self.released = True
        self._lease.release()

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Pin(length={self.length}, released={self.released})"


class Pins:
    """The pins of one cache. The caller holds the cache's lock.

    Args:
        budget: the share of the pool's blocks that may be pinned, 0 to 1.

    Raises:
        ValueError: budget is no number from 0 to 1.
    """

    def __init__(self, budget: float) -> None:
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 <= budget <= 1:
            raise ValueError(f"pin_budget must be a share of the pool from 0 to 1, got {budget!r}")
        self.budget = budget
        self._pins: dict[Pin, None] = {}
        # A block under two pins counts once. A leased block keeps its id whatever splits.
        self._num_pins: Counter[int] = Counter()

    @property
    def num_blocks(self) -> int:
        """Blocks that at least one pin holds."""
        return len(self._num_pins)

    def all(self) -> tuple[Pin, ...]:
        """The pins that are held, in the order in which they were made."""
        return tuple(self._pins)

    def hold(self, cache: PrefixCache, lease: Lease) -> Pin:
        """Turns a lease into a pin. Raises OutOfBlocks when the budget does not allow it; the lease is then the caller's still."""
        pin = Pin(cache, lease)
        num_new = sum(1 for block in pin.blocks if block not in self._num_pins)
        num_allowed = int(self.budget * cache.pool.num_blocks)
        if self.num_blocks + num_new > num_allowed:
            raise OutOfBlocks(
                f"pin: these {pin.length} tokens need {num_new} more blocks, {self.num_blocks} are pinned, and pin_budget={self.budget} "
                f"allows {num_allowed} of {cache.pool.num_blocks}: pin fewer tokens, unpin something or raise pin_budget"
            )
        self._pins[pin] = None
        self._num_pins.update(pin.blocks)
        return pin

    def let_go(self, pin: Pin) -> None:
        """Lets go of a pin; nothing happens if that was done before."""
        if pin.released:
            return
        del self._pins[pin]
        for block in pin.blocks:
            self._num_pins[block] -= 1
            if not self._num_pins[block]:
                del self._num_pins[block]
        pin.drop_lease()

    def let_go_of_all(self) -> None:
        for pin in self.all():
            self.let_go(pin)
