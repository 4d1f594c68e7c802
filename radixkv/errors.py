"""Errors that are radixkv's own."""

from __future__ import annotations


class CommandError(Exception):
    """Something that the caller of a command (`python -m radixkv ...`) can mend, said in one sentence."""


class OutOfBlocks(RuntimeError):
    """The pool cannot give what a request needs; nothing was taken and nothing cached was lost."""


def out_of_blocks(
    needed: int, block_size: int, free: int, evictable: int | None = None, leased: int | None = None, pinned: int = 0
) -> OutOfBlocks:
    """Builds the error that names what is missing.

    Args:
        needed: blocks asked for.
        block_size: tokens per block.
        free: blocks that nobody holds.
        evictable: blocks that the tree would give up; None where the caller knows no tree.
        leased: blocks that leases and running sequences hold; None where the caller does not know.
        pinned: those of them that the user pinned.

    Returns:
        The exception, to be raised by the caller.
    """
    counts = [f"{free} free"]
    if evictable is not None:
        counts.append(f"{evictable} evictable")
    if leased is not None:
        counts.append(f"{leased} leased" + (f" ({pinned} of them pinned)" if pinned else ""))
    advice = "unpin something, raise num_blocks or lower max_new_tokens" if pinned else "raise num_blocks or lower max_new_tokens"
    return OutOfBlocks(f"need {needed} blocks of {block_size} tokens; {', '.join(counts)}: {advice}")
