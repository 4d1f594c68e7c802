"""Caches whose K/V tells which prefix each token stands at the end of, so that a misplaced one shows wherever it went."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from radixkv import BlockPool, PrefixCache
from radixkv.attention import Backend
from radixkv.node import Node, Root
from radixkv.token_key import namespace_of

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 2, 8
ROOT = Path(__file__).resolve().parent.parent


def make_cache(
    num_blocks: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    namespace: tuple = (),
    num_layers: int = NUM_LAYERS,
    eviction: str = "lru",
) -> PrefixCache:
    pool = BlockPool(
        num_blocks,
        num_layers=num_layers,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=block_size,
        dtype=dtype,
        device="cpu",
    )
    for tensor in [*pool.keys, *pool.values]:
        tensor.fill_(torch.nan)
    return PrefixCache(pool, Backend("torch", num_heads=4, pool=pool), namespace, eviction)


def kv_of(ids: np.ndarray, namespace: tuple, num_layers: int) -> np.ndarray:
    """uint8 [num_tokens, layers, 2, kv_heads, head_dim]: bytes that follow from all tokens up to each one."""
    state = np.uint64(crc32(repr(namespace).encode()))
    shape = (num_layers, 2, NUM_KV_HEADS, HEAD_DIM)
    offsets = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape) * np.uint64(0x9E3779B97F4A7C15)
    found = np.zeros((len(ids), *shape), np.uint8)
    with np.errstate(over="ignore"):
        for i, token in enumerate(ids):
            state = (state ^ np.uint64(token)) * np.uint64(0x100000001B3)
            mixed = (state + offsets) * np.uint64(0xD6E8FEB86659FD93)
            found[i] = (mixed >> np.uint64(56)).astype(np.uint8)
    return found


def store(cache: PrefixCache, ids: list[int] | np.ndarray, namespace: tuple = ()) -> None:
    """Put a prefix into the cache as a request would, with the K/V of `kv_of`."""
    ids = np.asarray(ids)
    data = torch.from_numpy(kv_of(ids, namespace, cache.pool.num_layers)).to(cache.pool.dtype)
    with cache.lock:
        batch = cache.admit([ids.astype("<i4").tobytes()], [1], counted=False)
        if namespace:
            cache.discard(batch)
            lease = cache.match_prefix(ids[:-1], namespace)
            batch = cache.admit([ids.astype("<i4").tobytes()], [1], lease, counted=False)
        with cache.prompt_step(batch) as step:
            step.begin()
            first = batch.sequences[0].hit_len
            for layer in range(cache.pool.num_layers):
                step.store(layer, data[first:, layer, 0].transpose(0, 1)[None], data[first:, layer, 1].transpose(0, 1)[None])
        cache.store(batch)


def path_of(node: Node) -> tuple[tuple, np.ndarray]:
    """The namespace that the user gave, and all tokens up to the end of a node."""
    edges = []
    while not isinstance(node, Root):
        edges.append(node.edge)
        assert node.parent is not None
        node = node.parent
    namespace = namespace_of(node.namespace_key)[-1][1]
    return namespace, np.frombuffer(b"".join(reversed(edges)), "<i4")


def contents(cache: PrefixCache) -> set[tuple[tuple, tuple[int, ...]]]:
    """Every cached prefix up to its last token as (namespace, tokens); raises where K/V is not that of its tokens to the bit."""
    cache.check()
    found = set()
    pool = cache.pool
    for node in cache.tree.nodes():
        if isinstance(node, Root):
            continue
        namespace, ids = path_of(node)
        num_own = len(node.edge) // 4
        expected = torch.from_numpy(kv_of(ids, namespace, pool.num_layers)[-num_own:]).to(pool.dtype)
        for layer, pair in enumerate(pool.pools):
            for which, tensor in enumerate(pair):
                rows = tensor[torch.tensor(node.blocks)].transpose(1, 2).reshape(-1, NUM_KV_HEADS, HEAD_DIM)
                assert torch.equal(rows[:num_own], expected[:, layer, which]), f"K/V of {len(ids)} tokens of namespace {namespace}"
        found.add((namespace, tuple(ids.tolist())))
    return found


def prefixes(cache: PrefixCache) -> set[tuple[tuple, tuple[int, ...]]]:
    """Every prefix of which a cache has all K/V: as `contents`, and every shorter one."""
    return {(namespace, ids[:end]) for namespace, ids in contents(cache) for end in range(1, len(ids) + 1)}


def ids_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length)


def filled(**settings) -> PrefixCache:
    """Two prompts that share 40 tokens, one that goes on from the first, one of its own, and one in another namespace."""
    cache = make_cache(**settings)
    first = ids_of(70, 1)
    store(cache, first)
    store(cache, [*first[:40], *ids_of(30, 2)])
    store(cache, [*first, *ids_of(21, 3)])
    store(cache, ids_of(33, 4))
    store(cache, first[:50], ("tenant", 1))
    return cache


def order_of_eviction(cache: PrefixCache) -> list[tuple[tuple, list[int]]]:
    """The prefixes whose ends eviction takes, in its order; afterwards nothing is cached."""
    gone = []
    while (victim := cache.tree.queue.first()) is not None:
        namespace, ids = path_of(victim)
        gone.append((namespace, ids.tolist()))
        cache.pool.release(cache.tree.evict(len(victim.blocks)))
    return gone


def run_python(code: str, *arguments: object, **options) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout
