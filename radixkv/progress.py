"""One progress bar for everything that may take longer than two seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

# What is done sooner shows nothing.
DELAY_SECONDS = 2.0
# Told how much more is done.
Advance = Callable[[int], object]


@contextmanager
def progress_bar(what: str, total: int, progress: bool | None, *, unit: str = "B") -> Iterator[Advance]:
    """Show on stderr how far some work is, once it has taken two seconds.

    tqdm draws it (`tqdm.auto`: a terminal's or a notebook's). Without tqdm, which only transformers brings, or stderr there is none.

    Args:
        what: names the work. total: how much there is to do. unit: of what is counted; "B" counts bytes.
        progress: False shows nothing; None shows it on a terminal and in a notebook; True wherever stderr goes.

    Yields:
        A function that is told how much more is done.
    """
    # A program without a terminal may have no stderr at all; tqdm would raise there.
    if progress is False or sys.stderr is None or getattr(sys.stderr, "closed", False):
        yield _ignore
        return
    try:
        tqdm = import_module("tqdm.auto").tqdm
    except ImportError:
        yield _ignore
        return
    scale = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    disable = None if progress is None else False
    with tqdm(total=total, desc=what, unit=unit, delay=DELAY_SECONDS, disable=disable, **scale) as bar:
        yield bar.update


def require_progress(function: str, progress: bool | None) -> None:
    """Raise ValueError unless `progress` is True, False or None."""
    if progress is not None and not isinstance(progress, bool):
        raise ValueError(f"{function}: progress must be True, False or None, got {progress!r}")


def _ignore(_: int) -> None:
    """What advances no bar."""
