"""`Occupants`: which threads have rows in a pool now, so that one that finds no room knows whether waiting for it can help."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Occupants:
    """Calls that have rows or are about to, each with its thread.

    A thread that has rows, of this call or of one around it, does not wait: two such threads would wait for each other.

    Attributes:
        num_departures: how often rows have left. Who asks for room reads it before.
    """

    def __init__(self) -> None:
        self.num_departures = 0
        self._condition = threading.Condition()
        self._threads: dict[int, int] = {}

    @contextmanager
    def staying(self, call: object) -> Iterator[None]:
        """A call may have rows inside of this block."""
        self.enter(call)
        try:
            yield
        finally:
            self.leave(call)

    def enter(self, call: object) -> None:
        """A call may have rows from now on; nothing changes if it had some before."""
        with self._condition:
            self._threads[id(call)] = threading.get_ident()

    def leave(self, call: object) -> None:
        """A call has no rows any more; nothing changes if it had none."""
        with self._condition:
            if self._threads.pop(id(call), None) is not None:
                self._depart()

    def withdraw(self, call: object) -> None:
        """A call that was about to have rows got none."""
        with self._condition:
            self._threads.pop(id(call), None)

    def give_back(self) -> None:
        """Rows of a call that has others have left."""
        with self._condition:
            self._depart()

    def may_make_room(self, call: object, since: int) -> bool:
        """Whether a call that gives back what it has may find room later, or now because rows have left since `num_departures` was that."""
        with self._condition:
            return self._may_make_room(call, since)

    def wait(self, call: object, since: int, seconds: float) -> bool:
        """Wait until rows leave, for some time at most; not at all if some have left since `num_departures` was that.

        Returns:
            Whether there was something to wait for, see `may_make_room`.
        """
        with self._condition:
            if not self._may_make_room(call, since):
                return False
            if self.num_departures == since:
                self._condition.wait(seconds)
            return True

    def _may_make_room(self, call: object, since: int) -> bool:
        if self.num_departures != since:
            return True
        others = [thread for key, thread in self._threads.items() if key != id(call)]
        return bool(others) and threading.get_ident() not in others

    def _depart(self) -> None:
        self.num_departures += 1
        self._condition.notify_all()
