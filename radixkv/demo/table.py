"""The table at the end of the demo, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEADER = ("part", "tokens computed, unpatched", "tokens computed, patched", "time, patched / unpatched", "reused", "answers")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    part: str
    stock_tokens: int
    patched_tokens: int
    stock_seconds: float
    patched_seconds: float
    reused: str
    answers: str

    def cells(self) -> tuple[str, ...]:
        ratio = f"{self.patched_seconds / self.stock_seconds:.2f}"
        return (self.part, f"{self.stock_tokens:,}", f"{self.patched_tokens:,}", ratio, self.reused, self.answers)


def render_table(rows: Sequence[Row]) -> str:
    """The rows under their header, columns aligned; numbers to the right."""
    lines = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    is_number = [1 <= column <= 3 for column in range(len(HEADER))]

    def join(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(cells, widths, is_number, strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 1) + (":" if right else "-") for width, right in zip(widths, is_number, strict=True)) + "|"
    return "\n".join([join(lines[0]), rule, *(join(line) for line in lines[1:])])
