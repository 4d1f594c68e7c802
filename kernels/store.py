"""Triton kernels that move keys and values: new rows into their slots, and blocks to blocks.

Source: the paged K/V cache of vLLM (arXiv 2309.06180), section 4.3, and its copy-on-write of blocks, section 4.4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.kernels.checks import check_copy, check_store
from radixkv.kernels.tiles import check_runs_here, last_axis_contiguous

# Elements that one program of copy_blocks moves per trip: 16 bytes per thread of 4 warps in 16 bit.
_COPY_TILE = 1024


@triton.jit(do_not_specialize=["stride_key_row", "stride_key_head", "stride_value_row", "stride_value_head"])
def _store_kernel(
    k_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    key_ptr,  # [num_rows, num_kv_heads, head_dim]
    value_ptr,  # [num_rows, num_kv_heads, head_dim]
    slots_ptr,  # [num_slots]
    source_rows_ptr,  # [num_slots] or None
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    slot = tl.load(slots_ptr + index)
    # int64, as everything that meets a stride.
    row = index.to(tl.int64) if source_rows_ptr is None else tl.load(source_rows_ptr + index).to(tl.int64)

    offs = tl.arange(0, TILE)
    heads = offs // HEAD_DIM
    offs_d = offs % HEAD_DIM
    # A slot of -1 belongs to padding: nothing is read and nothing is written.
    mask = offs < tl.where(slot >= 0, NUM_KV_HEADS * HEAD_DIM, 0)
    key = tl.load(key_ptr + row * stride_key_row + heads.to(tl.int64) * stride_key_head + offs_d, mask=mask, other=0.0)
    value = tl.load(value_ptr + row * stride_value_row + heads.to(tl.int64) * stride_value_head + offs_d, mask=mask, other=0.0)

    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    offs_pool = ((block * NUM_KV_HEADS + heads) * BLOCK_SIZE + offset) * HEAD_DIM + offs_d
    tl.store(k_ptr + offs_pool, key, mask=mask)
    tl.store(v_ptr + offs_pool, value, mask=mask)


def store_kv(k_pool: Tensor, v_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor, source_rows: Tensor | None = None) -> None:
    """Write rows of new keys and values into their slots.

    Args:
        k_pool, v_pool: one layer, `[num_blocks, num_kv_heads, block_size, head_dim]`; changed in place.
        key, value: new rows `[num_rows, num_kv_heads, head_dim]`, last axis contiguous.
        slots: int64 `[num_slots]`, block_id * block_size + offset; -1 writes nothing. No slot twice.
        source_rows: int32 `[num_slots]`, the row that goes to each slot; None: row i goes to slots[i].

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the tensors are on a CPU outside the interpreter.
    """
    check_store("store_kv", k_pool, v_pool, key, value, slots, source_rows)
    check_runs_here("store_kv", _store_kernel, k_pool)
    last_axis_contiguous("store_kv", "key", key)
    last_axis_contiguous("store_kv", "value", value)
    if slots.shape[0] == 0:
        return
    _, num_kv_heads, block_size, head_dim = k_pool.shape
    with torch.cuda.device_of(k_pool):
        _store_kernel[(slots.shape[0],)](
            k_pool,
            v_pool,
            key,
            value,
            slots,
            source_rows,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            TILE=triton.next_power_of_2(num_kv_heads * head_dim),
            num_warps=4,
            enable_fp_fusion=True,
        )


@triton.jit
def _copy_kernel(
    pools_ptr,  # [num_pools] addresses of pools [num_blocks, num_kv_heads, block_size, head_dim]
    src_ptr,  # [num_copies]
    dst_ptr,  # [num_copies]
    num_tokens_ptr,  # [num_copies]
    ELEMENT: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    copy = tl.program_id(0)
    head = tl.program_id(1) % NUM_KV_HEADS
    pool_ptr = tl.load(pools_ptr + tl.program_id(1) // NUM_KV_HEADS).to(tl.pointer_type(ELEMENT))
    src = tl.load(src_ptr + copy)
    dst = tl.load(dst_ptr + copy)

    # The first tokens of one head of one block are contiguous.
    count = tl.load(num_tokens_ptr + copy) * HEAD_DIM
    src_ptr = pool_ptr + (src * NUM_KV_HEADS + head) * (BLOCK_SIZE * HEAD_DIM)
    dst_ptr = pool_ptr + (dst * NUM_KV_HEADS + head) * (BLOCK_SIZE * HEAD_DIM)
    for start in range(0, count, TILE):
        offs = start + tl.arange(0, TILE)
        tl.store(dst_ptr + offs, tl.load(src_ptr + offs, mask=offs < count, other=0), mask=offs < count)


def copy_blocks(pools: Sequence[tuple[Tensor, Tensor]], src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
    """Copy the first num_tokens[i] slots of block src[i] to block dst[i], K and V of every layer, in one launch.

    Args:
        pools: per layer (k_pool, v_pool), all of one shape on one device; changed in place.
        src, dst: int64 `[num_copies]` block ids; no block is in dst twice or in both.
        num_tokens: int32 `[num_copies]`, 0 to block_size.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the tensors are on a CPU outside the interpreter.
    """
    check_copy("copy_blocks", pools, src, dst, num_tokens)
    first = pools[0][0]
    check_runs_here("copy_blocks", _copy_kernel, first)
    if src.shape[0] == 0:
        return
    _, num_kv_heads, block_size, head_dim = first.shape
    addresses = torch.tensor([pool.data_ptr() for pair in pools for pool in pair], dtype=torch.int64).to(first.device)
    with torch.cuda.device_of(first):
        _copy_kernel[(src.shape[0], addresses.shape[0] * num_kv_heads)](
            addresses,
            src,
            dst,
            num_tokens,
            # Bits are copied, whatever they mean.
            ELEMENT=tl.int16 if first.element_size() == 2 else tl.int32,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            TILE=_COPY_TILE,
            num_warps=4,
            enable_fp_fusion=True,
        )
