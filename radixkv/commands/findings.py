"""What a check of the doctor found, and how a broken check becomes a finding of its own."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

# "note" tells of something that nothing here needs; the last two make the doctor's exit status 1.
State = Literal["ok", "note", "missing", "failed"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's list.

    Attributes:
        section, name: what was looked at. state: how it is. detail: what was found, in a sentence. fix: the command that mends it, or "".
    """

    section: str
    name: str
    state: State
    detail: str
    fix: str = ""

    @property
    def is_good(self) -> bool:
        return self.state in ("ok", "note")


@dataclass(frozen=True)
class Check:
    """Something to look at; `look` returns what it found, or raises, which is a finding too."""

    section: str
    name: str
    look: Callable[[], Iterable[Finding]]

    def run(self, debug: bool) -> list[Finding]:
        """Look, and turn an exception into a failed finding; with debug its traceback goes to stderr."""
        try:
            return list(self.look())
        except Exception as error:
            if debug:
                traceback.print_exc(file=sys.stderr)
            return [Finding(self.section, self.name, "failed", one_line(error))]


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
