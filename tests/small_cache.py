"""A prefix cache with no model: one layer, one head, K/V of zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from radixkv.attention import Backend
from radixkv.cache import PrefixCache
from radixkv.pool import BlockPool
from radixkv.token_key import token_key

BLOCK = 16
HEAD_DIM = 16


def small_cache(num_blocks: int = 64, **options: Any) -> PrefixCache:
    """A cache of num_blocks blocks of 16 tokens that evicts the least recently used; options are `PrefixCache`'s."""
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": HEAD_DIM}
    pool = BlockPool(num_blocks, block_size=BLOCK, dtype=torch.float32, device="cpu", **shape)
    return PrefixCache(pool, Backend("torch", num_heads=1, pool=pool), **{"eviction": "lru", **options})


def keep(cache: PrefixCache, tokens: Sequence[int]) -> None:
    """Stores a prefix."""
    zeros = torch.zeros(len(tokens), 1, HEAD_DIM)
    cache.insert_computed(tokens, [zeros], [zeros])


def ask(cache: PrefixCache, tokens: Sequence[int]) -> int:
    """What generate() does with a prompt of these tokens, but for the computing; returns how many it need not compute."""
    batch = cache.admit([bytes(token_key(tokens))], [1])
    with cache.prompt_step(batch) as step:
        step.begin()
        zeros = torch.zeros(1, 1, len(tokens) - batch.sequences[0].hit_len, HEAD_DIM)
        step.store(0, zeros, zeros)
    hit_len = batch.sequences[0].hit_len
    cache.store(batch)
    return hit_len
