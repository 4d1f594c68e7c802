"""The one exception that the command line turns into a sentence."""

from __future__ import annotations


class DemoError(Exception):
    """Something that the caller can mend, said in one sentence."""
