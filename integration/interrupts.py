"""Ctrl-C, raised only where nothing is half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupts:
    """Inside a `with` block of the main thread Ctrl-C is noted, and raised by the next `check`; pressed again, it is raised at once.

    In other threads, and where the program has a handler of its own, nothing is changed.
    """

    def __init__(self) -> None:
        self._is_noted = False
        self._is_installed = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if one is noted."""
        if self._is_noted:
            self._is_noted = False
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_noted:
            raise KeyboardInterrupt
        self._is_noted = True
