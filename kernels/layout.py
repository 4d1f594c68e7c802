"""What the kernels and the device prescribe to a step's item lists, and what they say about bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from radixkv.kernels.forest import Prices
from radixkv.kernels.ranges import Kernel

# A private range as short as this is worth its partials where there are fewer programs than are wanted.
FINE_RANGE = 256
# Bounds of the least keys of a shared range.
SHARED_RANGES = 512, 1024
# Bytes of partials beside those of K/V in private ranges of the least length.
_PARTIAL_SHARE = 0.06
# A key of a wide item takes the tensor cores of one multiprocessor this many times as long as a key of narrow items its share of memory.
_WIDE_KEY_TIME = 1.25


@dataclass(frozen=True)
class Layout:
    """What the kernels and the device prescribe to the item lists; `configs.layout_for` makes it.

    Attributes:
        group: query heads per K/V head.
        num_kv_heads, head_dim, block_size: of a pool.
        itemsize: bytes per element of a pool.
        narrow_entries: tokens per item of the narrow kernel, 1 or more.
        wide_rows: (token, query head) rows per item of the wide kernel, which may begin and end inside a token; a group above it
            gets no wide items.
        tile_kv: keys per loop trip; ranges begin at multiples of it, or at those of block_size where sequences branch.
        tile_q: query tokens per prefill tile.
        chunk: keys per range of the exact plan, and the growth that an item list of the default plan outlives.
        narrow_slots, wide_slots: programs of either kernel that run on the device at once.
    """

    group: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    block_size: int
    narrow_entries: int
    wide_rows: int
    tile_kv: int
    tile_q: int
    chunk: int
    narrow_slots: int
    wide_slots: int

    @cached_property
    def key_bytes(self) -> int:
        """K and V of one token and one K/V head."""
        return 2 * self.head_dim * self.itemsize

    @cached_property
    def partial_bytes(self) -> int:
        """One token's partial of one K/V head, fp32, written and read."""
        return 2 * self.group * (self.head_dim + 1) * 4

    @cached_property
    def partial_keys(self) -> float:
        """Keys that take as many bytes as a partial."""
        return self.partial_bytes / self.key_bytes

    @cached_property
    def private_range(self) -> int:
        """The least keys of a private range: partials are few beside K/V, but a short sequence is cut all the same."""
        fitting = -(-self.partial_keys / _PARTIAL_SHARE // self.tile_kv) * self.tile_kv
        return int(min(max(fitting, 2 * self.tile_kv), FINE_RANGE))

    @cached_property
    def prices(self) -> Prices:
        """What decides which runs are shared."""
        return Prices(self.partial_keys, self.tile_kv, SHARED_RANGES[0], self.private_range)

    @cached_property
    def narrow_kernel(self) -> Kernel:
        """What the narrow kernel takes for its work."""
        partial_time = self.partial_keys * self.num_kv_heads / self.narrow_slots
        return Kernel(self.num_kv_heads, self.narrow_slots, self.tile_kv, 1.0, self.tile_kv + self.partial_keys, partial_time)

    @cached_property
    def wide_kernel(self) -> Kernel:
        """What the wide kernel takes, in times of the narrow one."""
        partial_time = self.partial_keys * self.num_kv_heads / self.narrow_slots
        key_time = _WIDE_KEY_TIME * self.wide_slots / self.narrow_slots
        return Kernel(self.num_kv_heads, self.wide_slots, self.tile_kv, key_time, self.tile_kv, partial_time)

    def moved_bytes(self, num_keys: int, num_partials: int) -> int:
        """Bytes of so many keys and partials over all K/V heads of a layer."""
        return self.num_kv_heads * (num_keys * self.key_bytes + num_partials * self.partial_bytes)
