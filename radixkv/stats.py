"""`CacheStats`, what a prefix cache has done and holds, and the counters behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# How many of the last requests a cache can tell of.
NUM_REQUESTS = 4096


@dataclass(frozen=True)
class CacheStats:
    """What a `PrefixCache` has done since it was made or `reset_stats()`, and what it holds now.

    Attributes:
        requests: rows admitted. hits: those that reused at least half of their prompt. misses: the others.
        prompt_tokens: tokens of the admitted prompts. cached_tokens: those of them that were not computed for their row.
        computed_tokens: packed rows given to the first layer, prompt and decode steps alike.
        stock_calls: calls that took the model's own path. evicted_tokens: cached tokens dropped to make room.
        blocks_free, blocks_cached, blocks_leased: free; in the tree and evictable; held by a lease or a running sequence. They add up to
            the pool. blocks_pinned: those of blocks_leased that a pin holds.
        blocks_host: blocks in host memory. restored_tokens: tokens that came back from there.
        lookups: prompts looked up in the tree, by generate() or `match_prefix`. insertions: sequences given to the tree to keep.
        stored_tokens: tokens of them that it did not have. evicted_blocks: blocks dropped to make room. tree_tokens: tokens that the tree
            holds now, each copy counted.
    """

    requests: int = 0
    hits: int = 0
    misses: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    stock_calls: int = 0
    evicted_tokens: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_leased: int = 0
    blocks_pinned: int = 0
    blocks_host: int = 0
    restored_tokens: int = 0
    lookups: int = 0
    insertions: int = 0
    stored_tokens: int = 0
    evicted_blocks: int = 0
    tree_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per request, 0 when there was none."""
        return self.hits / self.requests if self.requests else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Cached tokens per prompt token, 0 when there was none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class LoggedPrompt(NamedTuple):
    """What one prompt, or a further piece of one, reused.

    Attributes:
        step: the tree's logical time. time_s: seconds since 1970. num_requests: 1, or 0 for a piece that came later.
        num_tokens: of the prompt. num_reused: those of them that were not computed for it.
    """

    step: int
    time_s: float
    num_requests: int
    num_tokens: int
    num_reused: int


@dataclass
class Counters:
    """The running counts behind `CacheStats`."""

    requests: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    stock_calls: int = 0
    evicted_before: int = 0
    restored_before: int = 0
    lookups: int = 0
    insertions_before: int = 0
    stored_before: int = 0
    evicted_blocks_before: int = 0
