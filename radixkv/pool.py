"""The K/V storage: two tensors per layer, cut into blocks, and the list of the free ones.

A block is `block_size` consecutive positions of one sequence in every layer at once, so one id names the same row of
all tensors. Blocks are counted: whoever holds one (the tree, a running sequence) owns one reference, and a block whose
last reference is dropped is free again. Nothing here knows tokens.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from radixkv.errors import out_of_blocks

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CPU_MEMORY_FRACTION = 0.25
CPU_MAX_TOKENS = 65_536
GPU_MEMORY_FRACTION = 0.5


class BlockPool:
    """Blocks of K and V for all layers of one model.

    Args:
        num_blocks: how many blocks to reserve, at least 1.
        num_layers: layers that store K and V.
        num_kv_heads: K/V heads per layer.
        head_dim: elements per head.
        block_size: tokens per block, a power of two, at least 16.
        dtype: float32, float16 or bfloat16.
        device: where the tensors live, one device for all layers or one for each. On the CPU memory is reserved but not touched before it
            is written.

    Attributes:
        device: that of the first layer. devices: of each layer its own.
        keys: per layer, [num_blocks, num_kv_heads, block_size, head_dim], zeros at first.
        values: the same shape.

    Raises:
        ValueError: for a size, block_size or dtype outside the ranges above.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str | Sequence[torch.device | str],
    ) -> None:
        sizes = {"num_blocks": num_blocks, "num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"BlockPool: {name} must be an int of at least 1, got {size!r}")
        require_block_size("BlockPool", block_size)
        if dtype not in DTYPES:
            raise ValueError(f"BlockPool: dtype must be float32, float16 or bfloat16, got {dtype}")
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        single = isinstance(device, (str, torch.device))
        self.devices = [torch.device(device)] * num_layers if single else list(map(torch.device, device))  # type: ignore[arg-type]
        if len(self.devices) != num_layers:
            raise ValueError(f"BlockPool: device must be one for all {num_layers} layers or one for each, got {len(self.devices)}")
        self.device = self.devices[0]
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        # Tensors made in inference mode could not be written in place outside of it.
        with torch.inference_mode(False):
            try:
                self.keys = [_zeros(shape, dtype, device) for device in self.devices]
                self.values = [_zeros(shape, dtype, device) for device in self.devices]
            except (MemoryError, torch.OutOfMemoryError) as error:
                gib = 2 * num_layers * math.prod(shape) * dtype.itemsize / 2**30
                where = ", ".join(map(str, dict.fromkeys(self.devices)))
                raise MemoryError(f"BlockPool: num_blocks={num_blocks} needs {gib:,.1f} GiB on {where}: ask for fewer") from error
        # A stack whose top is the lowest id: a fresh pool hands out ascending runs and touches its memory from the start.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._counts = [0] * num_blocks

    @property
    def pools(self) -> list[tuple[Tensor, Tensor]]:
        """(K, V) of each layer, as `copy_blocks` takes them."""
        return list(zip(self.keys, self.values, strict=True))

    @property
    def block_bytes(self) -> int:
        """What one block takes, K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size * self.dtype.itemsize

    def seen_from(self, device: torch.device) -> BlockPool:
        """The same pool as the layers on one of its devices see it: `device` is that one, all else is shared."""
        seen = copy.copy(self)
        seen.device = device
        return seen

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes free blocks, in ascending runs where there are any; each then has one reference, the caller's.

        Args:
            num_blocks: how many, at least 0.

        Returns:
            Their ids. The slots hold whatever was last written there.

        Raises:
            OutOfBlocks: when fewer are free; none is taken.
        """
        if num_blocks < 0:
            raise ValueError(f"allocate: num_blocks must be at least 0, got {num_blocks}")
        first = len(self._free) - num_blocks
        if first < 0:
            raise out_of_blocks(num_blocks, self.block_size, len(self._free))
        block_ids = self._free[first:]
        del self._free[first:]
        block_ids.reverse()
        for block_id in block_ids:
            self._counts[block_id] = 1
        return block_ids

    def retain(self, block_ids: Iterable[int]) -> None:
        """Adds one reference to each block (to a block named twice, two).

        Raises:
            ValueError: when one is free or not of this pool; no count is changed.
        """
        block_ids = list(block_ids)
        for block_id in block_ids:
            self._require_held("retain", block_id)
        for block_id in block_ids:
            self._counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each block; those without any left are free again.

        Raises:
            ValueError: when one is free (a double free) or not of this pool; no count is changed.
        """
        block_ids = list(block_ids)
        counts = self._counts
        freed = []
        for position, block_id in enumerate(block_ids):
            try:
                self._require_held("release", block_id)
            except ValueError:
                for undone in block_ids[:position]:
                    counts[undone] += 1
                raise
            counts[block_id] -= 1
            if not counts[block_id]:
                freed.append(block_id)
        freed.sort(reverse=True)
        self._free += freed

    def reference_count(self, block_id: int) -> int:
        """How many hold the block; 0 when it is free. Raises ValueError for an id that is not of this pool."""
        if type(block_id) is not int or not 0 <= block_id < self.num_blocks:
            raise ValueError(f"reference_count: block id must be an int in 0..{self.num_blocks - 1}, got {block_id!r}")
        return self._counts[block_id]

    def check(self, *holders: Iterable[int]) -> None:
        """Walks the free list and the counts.

        Args:
            holders: the block ids of everybody who holds any (the tree's, each sequence's). When at least one is given,
                the references of every block must be exactly those listed: none leaked, none freed too early.

        Raises:
            AssertionError: with a sentence, on any violation.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is in the free list twice")
        for block_id, count in enumerate(self._counts):
            if count < 0 or (count == 0) != (block_id in free):
                raise AssertionError(f"block {block_id} has {count} references and is {'' if block_id in free else 'not '}in the free list")
        if not holders:
            return
        held = [0] * self.num_blocks
        for holder in holders:
            for block_id in holder:
                held[block_id] += 1
        for block_id, (count, listed) in enumerate(zip(self._counts, held, strict=True)):
            if count != listed:
                raise AssertionError(f"block {block_id} has {count} references, but its holders list it {listed} times")

    def _require_held(self, action: str, block_id: int) -> None:
        if type(block_id) is not int or not 0 <= block_id < self.num_blocks:
            raise ValueError(f"{action}: block id must be an int in 0..{self.num_blocks - 1}, got {block_id!r}")
        if not self._counts[block_id]:
            raise ValueError(f"{action}: block {block_id} is free, nobody holds it")


def require_block_size(function: str, block_size: int) -> None:
    """Raise ValueError unless block_size is a power of two of at least 16."""
    if type(block_size) is not int or block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"{function}: block_size must be a power of two and at least 16, got {block_size!r}")


def default_num_blocks(device: torch.device | str, bytes_per_block: int, block_size: int) -> int:
    """How many blocks a pool gets when the user does not say.

    CUDA and ROCm: half of the device memory that is free now. Elsewhere: a quarter of the memory that is available now,
    but no more than 65,536 tokens.

    Args:
        device: where the pool will live.
        bytes_per_block: K and V of one block in all layers.
        block_size: tokens per block.

    Returns:
        A number of blocks, at least 1.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return max(1, int(free_bytes * GPU_MEMORY_FRACTION) // bytes_per_block)
    fitting = int(_available_memory() * CPU_MEMORY_FRACTION) // bytes_per_block
    return max(1, min(fitting, CPU_MAX_TOKENS // block_size))


def describe_default(device: torch.device | str) -> str:
    """What `default_num_blocks` goes by on a device, in words."""
    if torch.device(device).type == "cuda":
        return f"{GPU_MEMORY_FRACTION:.0%} of the GPU memory that is free"
    return f"{CPU_MEMORY_FRACTION:.0%} of the memory that is available, at most {CPU_MAX_TOKENS:,} tokens"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zeroed pages, which it gives when they are first written; torch.zeros writes them all.
    if dtype == torch.float32:
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    return torch.from_numpy(np.zeros(shape, dtype=np.int16)).view(dtype)


def _available_memory() -> int:
    """Bytes that this process could still use, a container's limit included."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except OSError:
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))
