"""Tokens as text that is safe to print: one line, no control characters, of a bounded length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MAX_CHARACTERS = 60

Decoder = Callable[[Sequence[int]], str]


def decoder_of(function: str, tokenizer: Any) -> Decoder | None:
    """What turns ids into quoted text by a tokenizer's `decode`; None without a tokenizer. ValueError for something else."""
    if tokenizer is None:
        return None
    if not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"{function}: tokenizer must have a decode(ids) method, got {type(tokenizer).__name__}")

    def decode(ids: Sequence[int]) -> str:
        return f'"{as_text(tokenizer.decode(list(ids)))}"' if len(ids) else '""'

    return decode


def as_text(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """Text with every character that is not printable written as an escape, cut to a length (an ellipsis says so)."""
    # What is cut off need not be escaped first, and a prompt may be long.
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: max_characters + 1])
    return escaped if len(escaped) <= max_characters else escaped[: max_characters - 1] + "…"
