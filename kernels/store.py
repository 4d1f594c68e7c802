"""Triton kernels that move keys and values: new rows into their slots, rotated on the way if asked, and blocks to blocks.

Source: the paged K/V cache of vLLM (arXiv 2309.06180), section 4.3, and its copy-on-write of blocks, section 4.4; rotation, RoFormer
(arXiv 2104.09864), section 3.4.2, over halves as in GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.kernels.checks import check_copy, check_rope_store, check_store
from radixkv.kernels.tiles import cast, check_runs_here, is_interpreted, last_axis_contiguous

# Elements that one program of copy_blocks moves per trip: 16 bytes per thread of 4 warps in 16 bit.
_COPY_TILE = 1024


@triton.jit
def _row_offsets(row, stride_row, stride_head, DIM: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the first DIM elements of each head of a row lie; with ALIGNED strides several are loaded at once."""
    offs = tl.arange(0, TILE)
    # int64, as everything that meets a stride.
    begins = row.to(tl.int64) * stride_row + (offs // DIM).to(tl.int64) * stride_head
    if ALIGNED:
        begins = tl.multiple_of(begins, 8)
    return begins + offs % DIM


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
    ALIGNED: tl.constexpr,
):
    index = tl.program_id(0)
    slot = tl.load(slots_ptr + index)
    row = index if source_rows_ptr is None else tl.load(source_rows_ptr + index)

    # A slot of -1 belongs to padding: nothing is read and nothing is written.
    offs = tl.arange(0, TILE)
    mask = offs < tl.where(slot >= 0, NUM_KV_HEADS * HEAD_DIM, 0)
    key_offs = _row_offsets(row, stride_key_row, stride_key_head, HEAD_DIM, TILE, ALIGNED)
    value_offs = _row_offsets(row, stride_value_row, stride_value_head, HEAD_DIM, TILE, ALIGNED)
    key = tl.load(key_ptr + key_offs, mask=mask, other=0.0)
    value = tl.load(value_ptr + value_offs, mask=mask, other=0.0)

    pool_rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + offs // HEAD_DIM) * BLOCK_SIZE + slot % BLOCK_SIZE
    offs_pool = pool_rows * HEAD_DIM + offs % HEAD_DIM
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
            ALIGNED=_all_aligned(key, value),
            num_warps=4,
            enable_fp_fusion=True,
        )


@triton.jit
def _rotate_half(this, other, cos, sin, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """this * cos + other * sin of fp32, both products and the sum rounded to dtype, as PyTorch rounds them one by one."""
    along = cast(this * cos, dtype, INTERPRET).to(tl.float32)
    across = cast(other * sin, dtype, INTERPRET).to(tl.float32)
    return cast(along + across, dtype, INTERPRET)


@triton.jit
def _rotate_row(
    x_ptr,  # [num_tokens, num_heads, head_dim]
    cos_ptr,  # [num_tokens, head_dim]
    sin_ptr,  # [num_tokens, head_dim]
    row,
    stride_x_row,
    stride_x_head,
    stride_cos_row,
    stride_sin_row,
    live,
    NUM_HEADS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return both halves of all heads of one row, rotated, and the mask of what is real and live."""
    mask = tl.arange(0, TILE) < tl.where(live, NUM_HEADS * HALF_DIM, 0)
    x_ptr += _row_offsets(row, stride_x_row, stride_x_head, HALF_DIM, TILE, ALIGNED)
    cos_begin = row.to(tl.int64) * stride_cos_row
    sin_begin = row.to(tl.int64) * stride_sin_row
    if ALIGNED:
        cos_begin = tl.multiple_of(cos_begin, 8)
        sin_begin = tl.multiple_of(sin_begin, 8)
    offs_d = tl.arange(0, TILE) % HALF_DIM
    cos_ptr += cos_begin + offs_d
    sin_ptr += sin_begin + offs_d
    first = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF_DIM, mask=mask, other=0.0).to(tl.float32)
    cos_first = tl.load(cos_ptr, mask=mask, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr, mask=mask, other=0.0).to(tl.float32)
    cos_second = tl.load(cos_ptr + HALF_DIM, mask=mask, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_ptr + HALF_DIM, mask=mask, other=0.0).to(tl.float32)
    rotated_first = _rotate_half(first, -second, cos_first, sin_first, DTYPE, INTERPRET)
    rotated_second = _rotate_half(second, first, cos_second, sin_second, DTYPE, INTERPRET)
    return rotated_first, rotated_second, mask


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        *(f"stride_{tensor}_{axis}" for tensor in ("out", "query", "key", "value") for axis in ("row", "head")),
        "stride_cos_row",
        "stride_sin_row",
    ]
)
def _rope_store_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    k_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    query_ptr,  # [num_tokens, num_heads, head_dim]
    key_ptr,  # [num_tokens, num_kv_heads, head_dim]
    value_ptr,  # [num_tokens, num_kv_heads, head_dim]
    cos_ptr,  # [num_tokens, head_dim]
    sin_ptr,  # [num_tokens, head_dim]
    slots_ptr,  # [num_slots]
    source_rows_ptr,  # [num_slots] or None
    num_tokens,
    stride_out_row,
    stride_out_head,
    stride_query_row,
    stride_query_head,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    stride_cos_row,
    stride_sin_row,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_QUERY: tl.constexpr,
    TILE_KEY: tl.constexpr,
    ALIGNED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    # The first programs rotate a query row each, the others fill a slot each.
    if tl.program_id(0) < num_tokens:
        row = tl.program_id(0)
        query_first, query_second, query_mask = _rotate_row(
            query_ptr, cos_ptr, sin_ptr, row, stride_query_row, stride_query_head, stride_cos_row, stride_sin_row,
            True, NUM_HEADS, HALF_DIM, TILE_QUERY, out_ptr.dtype.element_ty, ALIGNED, INTERPRET,
        )  # fmt: skip
        query_offs = _row_offsets(row, stride_out_row, stride_out_head, HALF_DIM, TILE_QUERY, ALIGNED)
        tl.store(out_ptr + query_offs, query_first, mask=query_mask)
        tl.store(out_ptr + query_offs + HALF_DIM, query_second, mask=query_mask)
    else:
        index = tl.program_id(0) - num_tokens
        slot = tl.load(slots_ptr + index)
        source_row = index if source_rows_ptr is None else tl.load(source_rows_ptr + index)
        # A slot of -1 belongs to padding: nothing is read and nothing is written.
        key_first, key_second, key_mask = _rotate_row(
            key_ptr, cos_ptr, sin_ptr, source_row, stride_key_row, stride_key_head, stride_cos_row, stride_sin_row,
            slot >= 0, NUM_KV_HEADS, HALF_DIM, TILE_KEY, k_ptr.dtype.element_ty, ALIGNED, INTERPRET,
        )  # fmt: skip
        value_offs = _row_offsets(source_row, stride_value_row, stride_value_head, HALF_DIM, TILE_KEY, ALIGNED)
        value_first = tl.load(value_ptr + value_offs, mask=key_mask, other=0.0)
        value_second = tl.load(value_ptr + value_offs + HALF_DIM, mask=key_mask, other=0.0)
        offs = tl.arange(0, TILE_KEY)
        pool_rows = (slot // BLOCK_SIZE * NUM_KV_HEADS + offs // HALF_DIM) * BLOCK_SIZE + slot % BLOCK_SIZE
        offs_pool = pool_rows * HEAD_DIM + offs % HALF_DIM
        tl.store(k_ptr + offs_pool, key_first, mask=key_mask)
        tl.store(k_ptr + offs_pool + HALF_DIM, key_second, mask=key_mask)
        tl.store(v_ptr + offs_pool, value_first, mask=key_mask)
        tl.store(v_ptr + offs_pool + HALF_DIM, value_second, mask=key_mask)


def rope_store_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    source_rows: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys by their positions, and write the rotated keys and the values into their slots, in one launch.

    A row x becomes x * cos + rotate_half(x) * sin, where rotate_half of the halves (a, b) is (-b, a). Each product and the sum are
    rounded to the tensors' dtype, so that the result is, bit for bit, what transformers' apply_rotary_pos_emb computes in any dtype.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, head_dim even, last axis contiguous, other strides any.
        key, value: `[num_tokens, num_kv_heads, head_dim]`, like query.
        cos, sin: `[num_tokens, head_dim]`, dtype of query, last axis contiguous, as the model's rotary_emb returns them.
        k_pool, v_pool: one layer, `[num_blocks, num_kv_heads, block_size, head_dim]`; changed in place.
        slots: int64 `[num_slots]`, block_id * block_size + offset; -1 writes nothing. No slot twice.
        source_rows: int32 `[num_slots]`, the row that goes to each slot; None: row i goes to slots[i].
        out: takes the rotated queries if given, like query; may be query itself; changed in place.

    Returns:
        the rotated queries `[num_tokens, num_heads, head_dim]`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the tensors are on a CPU outside the interpreter.
    """
    name = "rope_store_kv"
    check_rope_store(name, query, key, value, cos, sin, k_pool, v_pool, slots, source_rows, out)
    check_runs_here(name, _rope_store_kernel, k_pool)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    named = {"query": query, "key": key, "value": value, "cos": cos.unsqueeze(1), "sin": sin.unsqueeze(1), "out": out}
    for argument, tensor in named.items():
        last_axis_contiguous(name, argument, tensor)
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = k_pool.shape
    num_programs = query.shape[0] + slots.shape[0]
    if num_programs == 0:
        return out
    with torch.cuda.device_of(k_pool):
        _rope_store_kernel[(num_programs,)](
            out,
            k_pool,
            v_pool,
            query,
            key,
            value,
            cos,
            sin,
            slots,
            source_rows,
            query.shape[0],
            out.stride(0),
            out.stride(1),
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            cos.stride(0),
            sin.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            TILE_QUERY=triton.next_power_of_2(num_heads * head_dim // 2),
            TILE_KEY=triton.next_power_of_2(num_kv_heads * head_dim // 2),
            ALIGNED=_all_aligned(*named.values()),
            INTERPRET=is_interpreted(_rope_store_kernel),
            num_warps=4,
            # a * cos + b * sin in one rounding less would be other bits than the model's.
            enable_fp_fusion=False,
        )
    return out


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


def _all_aligned(*tensors: Tensor) -> bool:
    """Return whether all rows and heads begin at multiples of eight elements, as far as strides can tell."""
    return all(stride % 8 == 0 for tensor in tensors for stride in tensor.stride()[:-1])
