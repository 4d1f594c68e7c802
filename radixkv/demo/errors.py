"""The one exception that the command line turns into a sentence."""

from __future__ import annotations

from radixkv.errors import CommandError


class DemoError(CommandError):
    """Something that the caller can mend, said in one sentence."""
