"""`HostTier`: host memory behind the pool, where evicted blocks go and from where a hit brings them back.

It is a pool and a tree of its own. A prefix that is evicted is copied here from its beginning, so that what is here is always a prefix; a
block is in the pool, here, or in both, and in a tree only once all of it is copied. On CUDA host memory is pinned and the copies are
asynchronous: they run in the order of the device's stream, as does whatever later writes into the blocks that they read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from radixkv.node import Node, Root
from radixkv.pool import BlockPool
from radixkv.token_key import TOKEN_BYTES, namespace_of
from radixkv.tree import RadixTree

if TYPE_CHECKING:
    from radixkv.storage import CacheStorage


class Victim(NamedTuple):
    """A prefix whose last blocks are being evicted: its namespace, its tokens as key bytes, and its blocks in the pool, in token order."""

    namespace: tuple
    key: bytes
    blocks: list[int]


class HostTier:
    """The second tier of one pool.

    Args:
        pool: the first tier.
        max_bytes: host memory for K and V, at least one block of all layers.

    Attributes:
        stored_tokens, restored_tokens: tokens copied here, and back, so far.

    Raises:
        ValueError: max_bytes is not an int, or less than a block.
    """

    def __init__(self, pool: BlockPool, max_bytes: int):
        if type(max_bytes) is not int or max_bytes < pool.block_bytes:
            raise ValueError(
                f"host_bytes must be an int of at least one block of all layers, {pool.block_bytes} bytes, or 0 for none, got {max_bytes!r}"
            )
        self._device_pool = pool
        self.pool = BlockPool(
            max_bytes // pool.block_bytes,
            num_layers=pool.num_layers,
            num_kv_heads=pool.num_kv_heads,
            head_dim=pool.head_dim,
            block_size=pool.block_size,
            dtype=pool.dtype,
            device="cpu",
        )
        # The devices whose copies are asynchronous.
        self._async_devices = [device for device in dict.fromkeys(pool.devices) if device.type == "cuda"]
        if self._async_devices:
            with torch.inference_mode(False):
                self.pool.keys = [keys.pin_memory() for keys in self.pool.keys]
                self.pool.values = [values.pin_memory() for values in self.pool.values]
        self.tree = RadixTree(pool.block_size)
        self.stored_tokens = self.restored_tokens = 0
        # Of each device the last copy; one that is issued on another stream waits for it.
        self._copied: dict[torch.device, torch.cuda.Event] = {}

    def store(self, victims: list[Victim]) -> None:
        """Copy what is not here yet of prefixes that are being evicted; their blocks may be released afterwards.

        What is here and least recently used gives way. Of a prefix that is longer than this tier, its beginning is kept.
        """
        for victim in victims:
            with self.tree.lock(self.tree.match_prefix(victim.key, victim.namespace)) as known:
                num_known = known.length // self.pool.block_size
                room = self.pool.num_free + self.tree.num_evictable_blocks
                num_blocks = min(len(victim.blocks), num_known + room)
                key = victim.key[: num_blocks * self.pool.block_size * TOKEN_BYTES]
                if len(key) <= known.length * TOKEN_BYTES:
                    continue
                new = self._allocate(num_blocks - num_known)
                try:
                    self._copy(self._device_pool, victim.blocks[num_known:num_blocks], self.pool, new)
                    blocks = known.blocks[:num_known] + new
                except BaseException:
                    self.pool.release(new)
                    raise
            # The hold is gone, so that a leaf that ends here grows in place.
            _insert(self.tree, self.pool, key, blocks, num_known, victim.namespace)
            self.stored_tokens += len(key) // TOKEN_BYTES - num_known * self.pool.block_size

    def restore(self, cache: CacheStorage, key: bytes, namespace: tuple, limit: int) -> None:
        """Bring back into the cache's pool and tree what is here of a prompt beyond what the pool has; nothing if there is no room.

        Args:
            cache: whose second tier this is. key: the prompt. namespace: the full one. limit: tokens that may be reused at most.
        """
        found = self.tree.match_prefix(key, namespace, limit)
        known = cache.tree.match_prefix(key, namespace, limit)
        if found.length <= known.length:
            return
        block_size = self.pool.block_size
        first, end = known.length // block_size, -(-found.length // block_size)
        # Both are held while room is made, which may evict from the one and, by that, from the other.
        with self.tree.lock(found) as here, cache.tree.lock(known) as there:
            if here.length < found.length or there.length < known.length or end - first > cache.num_allocatable:
                return
            new = cache.allocate(end - first)
            try:
                self._copy(self.pool, here.blocks[first:end], self._device_pool, new)
                blocks = there.blocks[:first] + new
            except BaseException:
                cache.pool.release(new)
                raise
        _insert(cache.tree, cache.pool, key[: found.length * TOKEN_BYTES], blocks, first, namespace)
        self.restored_tokens += found.length - first * block_size

    def clear(self) -> None:
        """Drop everything."""
        self.pool.release(self.tree.clear())

    def check(self) -> None:
        """Walk everything, as `PrefixCache.check` does.

        Raises:
            AssertionError: an invariant does not hold.
        """
        self.tree.check()
        self.pool.check(self.tree.blocks())

    def _allocate(self, num_blocks: int) -> list[int]:
        short = num_blocks - self.pool.num_free
        if short > 0:
            self.pool.release(self.tree.evict(short))
        return self.pool.allocate(num_blocks)

    def _copy(self, source: BlockPool, source_blocks: list[int], target: BlockPool, target_blocks: list[int]) -> None:
        """Copy blocks of all layers from one pool to the other. Host blocks are copied run by run, which needs no buffer between."""
        streams = {device: torch.cuda.current_stream(device) for device in self._async_devices}
        for device, event in self._copied.items():
            streams[device].wait_event(event)
        runs = list(_runs(source_blocks, target_blocks))
        for source_layers, target_layers in ((source.keys, target.keys), (source.values, target.values)):
            for source_tensor, target_tensor in zip(source_layers, target_layers, strict=True):
                for source_first, target_first, length in runs:
                    target_run = target_tensor.narrow(0, target_first, length)
                    target_run.copy_(source_tensor.narrow(0, source_first, length), non_blocking=bool(streams))
        self._copied = {device: stream.record_event() for device, stream in streams.items()}


def make_tier(pool: BlockPool, host_bytes: int) -> HostTier | None:
    """The second tier of a pool, None where host_bytes is 0; raises as `HostTier`."""
    return None if type(host_bytes) is int and host_bytes == 0 else HostTier(pool, host_bytes)


def path_of(node: Node) -> Victim:
    """The prefix that ends with a node."""
    edges, blocks = [node.edge], node.path_blocks()
    above = node.parent
    while above is not None:
        edges.append(above.edge)
        root, above = above, above.parent
    assert isinstance(root, Root)
    return Victim(namespace_of(root.namespace_key), b"".join(reversed(edges)), blocks)


def _insert(tree: RadixTree, pool: BlockPool, key: bytes, blocks: list[int], first_own: int, namespace: tuple) -> None:
    """Give blocks to a tree, those before first_own are the tree's own already, and release what it does not take."""
    inserted = tree.insert(key, blocks, namespace)
    pool.release(blocks[first_own : max(first_own, inserted.first_adopted)])
    pool.release(inserted.replaced)


def _runs(source: list[int], target: list[int]) -> list[tuple[int, int, int]]:
    """Pairs of ids as (first source, first target, length) of runs that ascend together."""
    runs: list[tuple[int, int, int]] = []
    for one, other in zip(source, target, strict=True):
        if runs:
            first, target_first, length = runs[-1]
            if one == first + length and other == target_first + length:
                runs[-1] = (first, target_first, length + 1)
                continue
        runs.append((one, other, 1))
    return runs
