"""What a single sequence keeps on a CPU from step to step: its keys and values, gathered once.

A pool is read in blocks, so that attending costs a gather; a sequence that decodes alone would gather nearly the same every step. It keeps
what it gathered, writes each new token there as well as into the pool, and gathers anew only when a block begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# A single sequence that decodes keeps what it gathered of a layer's K and V up to this size each; beyond it, it gathers anew every step.
HELD_BYTES = 4 << 20


@dataclass
class Held:
    """The gathered K and V of one layer of one sequence, `[1, num_kv_heads, capacity, head_dim]`, num_keys of them written.

    last_keys and last_values are the sequence's last block in the pools, `[1, num_kv_heads, block_size, head_dim]`.
    """

    key: Tensor
    value: Tensor
    capacity: int
    num_keys: int
    last_keys: Tensor
    last_values: Tensor

    def append(self, key: Tensor, value: Tensor, position: Tensor, offset: Tensor) -> None:
        """Write the next token, here and into the pools.

        Args:
            key, value: `[1, num_kv_heads, 1, head_dim]`. position, offset: int64 [1], the token's in the sequence, and in its block.
        """
        self.key.index_copy_(2, position, key)
        self.value.index_copy_(2, position, value)
        self.last_keys.index_copy_(2, offset, key)
        self.last_values.index_copy_(2, offset, value)
        self.num_keys += 1

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """Attend `[1, num_heads, 1, head_dim]` to all keys, rounding as scaled_dot_product_attention does: it is what runs."""
        key, value = self.key.narrow(2, 0, self.num_keys), self.value.narrow(2, 0, self.num_keys)
        return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)


def gather_held(k_pool: Tensor, v_pool: Tensor, blocks: list[int], num_keys: int) -> Held:
    """Gather the blocks that hold the num_keys tokens of a sequence, `[num_blocks, num_kv_heads, block_size, head_dim]`."""
    num_blocks, num_kv_heads, block_size, head_dim = k_pool.shape
    rows = (torch.tensor(blocks) * num_kv_heads + torch.arange(num_kv_heads)[:, None]).flatten()
    key, value = (
        pool.view(num_blocks * num_kv_heads, block_size * head_dim).index_select(0, rows).view(1, num_kv_heads, -1, head_dim)
        for pool in (k_pool, v_pool)
    )
    return make_held(key, value, k_pool, v_pool, blocks[-1], num_keys)


def make_held(key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, last_block: int, num_keys: int) -> Held:
    """Keep gathered whole blocks `[1, num_kv_heads, capacity, head_dim]`; they leave room up to the end of the last one."""
    return Held(key, value, key.shape[2], num_keys, k_pool.narrow(0, last_block, 1), v_pool.narrow(0, last_block, 1))


def may_hold(num_keys: int, k_pool: Tensor) -> bool:
    """Whether so many keys are not too many to keep."""
    return num_keys * k_pool.shape[1] * k_pool.shape[3] * k_pool.element_size() <= HELD_BYTES
