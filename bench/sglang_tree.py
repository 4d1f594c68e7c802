"""SGLang's radix tree in Python (0.5.23), for `bench/tree.py`, where the package is installed with what it imports."""

from __future__ import annotations

from array import array
from importlib.util import find_spec
from typing import Any

import torch


class SglangTree:
    """`RadixCache` without pools. It is asked for prepared keys, like ours, and answers like ours with a length and a node."""

    def __init__(self, block_size: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self._cache = RadixCache.create_simulated(page_size=block_size)
        self._make_key, self._match, self._insert = RadixKey, MatchPrefixParams, InsertParams

    def prepare(self, key: bytes, first_slot: int = 0) -> tuple[Any, torch.Tensor]:
        """A key in its own form, and the slots of as many tokens."""
        return self._make_key(array("q", array("i", key))), torch.arange(first_slot, first_slot + len(key) // 4)

    def insert(self, prepared: tuple[Any, torch.Tensor]) -> None:
        """Stores a prepared key."""
        self._cache.insert(self._insert(key=prepared[0], value=prepared[1]))

    def match_len(self, prepared: tuple[Any, torch.Tensor]) -> int:
        """How many tokens of a prepared key it knows."""
        return self._cache.match_prefix(self._match(key=prepared[0])).device_prefix_len


PEERS = [SglangTree] if find_spec("sglang") else []
