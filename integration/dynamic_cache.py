"""K/V that transformers' own cache holds, put into the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import Cache

if TYPE_CHECKING:
    from radixkv.integration.handle import ModelCache


def insert_dynamic(handle: ModelCache, token_ids: Any, cache: Cache, priority: int | None) -> None:
    """Store the K/V of a cache that transformers filled; see `ModelCache.insert`."""
    if not isinstance(cache, Cache):
        raise TypeError(f"insert: cache must be a DynamicCache of transformers, got {type(cache).__name__}")
    ids = np.atleast_2d(np.asarray(token_ids.cpu() if isinstance(token_ids, torch.Tensor) else token_ids))
    num_stored = int(cache.get_seq_length())
    if not num_stored:
        raise ValueError("insert: the cache is empty")
    # Detached, or the pool would keep the graph of whatever computed them.
    layers = [(layer.keys.detach(), layer.values.detach()) for layer in cache.layers]
    expected = (len(ids), handle.shape.num_kv_heads, num_stored, handle.shape.head_dim)
    if num_stored > ids.shape[1]:
        raise ValueError(f"insert: the cache holds {num_stored} tokens, token_ids only {ids.shape[1]}")
    if len(layers) != handle.shape.num_layers or any(tuple(tensor.shape) != expected for layer in layers for tensor in layer):
        found = sorted({tuple(tensor.shape) for layer in layers for tensor in layer})
        raise ValueError(f"insert: expected {handle.shape.num_layers} layers of K and V {list(expected)}, got {len(layers)} of {found}")
    for layer, device in zip(layers, handle.shape.devices, strict=True):
        if any((t.dtype, t.device) != (handle.shape.dtype, device) for t in layer):
            raise ValueError(f"insert: the cache must be {handle.shape.dtype} on {device}")
    for row, row_ids in enumerate(ids[:, :num_stored]):
        keys, values = ([tensor[row].transpose(0, 1) for tensor in column] for column in zip(*layers, strict=True))
        handle.insert_computed(row_ids, keys, values, priority)
