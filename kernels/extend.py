"""Triton kernel for many rows that attend to one range of paged keys and values: the wide split kernel.

Rows are (token, query head) pairs: the new tokens of a short extension over a long prefix, or decode tokens of sequences that share
the range. out_r = sum_k exp(s_rk) v_k / sum_k exp(s_rk), s_rk = scale * q_r . k_k, over the keys of the range that row r may see,
end_r - window <= k < end_r, goes with its LSE to the row's partial, and `merge` joins the partials of a row. The grid is persistent:
programs take items from a list whose length they read on the device.

Source: FlashDecoding (split K/V) with the heads of a group packed into the rows; Hydragen (arXiv 2402.05099), section 3, for shared
ranges; the walk over the keys is that of `attend`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.kernels.attend import attend_rows
from radixkv.kernels.configs import extend_config
from radixkv.kernels.tiles import current_arch, is_interpreted, program_slots, score_factors, softmax_end
from radixkv.kernels.work import Work


@triton.jit(do_not_specialize=["window", "stride_query_token", "stride_query_head", "stride_table_seq"])
def _extend_kernel(
    part_out_ptr,  # [num_partials, num_heads, head_dim]
    part_lse_ptr,  # [num_partials, num_heads]
    query_ptr,  # [num_tokens, num_heads, head_dim]
    k_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    block_table_ptr,  # [num_seqs, max_blocks]
    ends_ptr,  # [num_tokens]
    items_ptr,  # [capacity, 5]
    count_ptr,  # [1]
    entry_tokens_ptr,  # [num_entries]
    entry_partials_ptr,  # [num_entries]
    inner,
    outer,
    window,
    stride_query_token,
    stride_query_head,
    stride_table_seq,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KV: tl.constexpr,
    TILE_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    offs_row = tl.arange(0, TILE_ROWS)
    offs_d = tl.arange(0, TILE_D)
    num_units = tl.load(count_ptr) * NUM_KV_HEADS
    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0), num_stages=1):
        item_ptr = items_ptr + unit // NUM_KV_HEADS * 5
        head = unit % NUM_KV_HEADS
        first_row = tl.load(item_ptr)
        num_rows = tl.load(item_ptr + 1)
        table_ptr = block_table_ptr + tl.load(item_ptr + 2).to(tl.int64) * stride_table_seq
        first_key = tl.load(item_ptr + 3)
        end_key = tl.load(item_ptr + 4)

        # Rows beyond the item repeat its last one and are not stored.
        rows = first_row + tl.minimum(offs_row, num_rows - 1)
        tokens = tl.load(entry_tokens_ptr + rows // GROUP).to(tl.int64)
        ends = tl.load(ends_ptr + tokens)
        query_rows = tokens * stride_query_token + (head * GROUP + rows % GROUP).to(tl.int64) * stride_query_head
        query = tl.load(query_ptr + query_rows[:, None] + offs_d[None, :], mask=offs_d[None, :] < HEAD_DIM, other=0.0)

        # Some row sees the keys key_begin .. key_end, and all of them see full_begin .. full_end.
        row_end = tl.minimum(end_key, ends)
        key_end = tl.max(row_end, 0)
        full_end = tl.min(row_end, 0)
        row_begin = first_key
        key_begin = first_key
        full_begin = first_key
        if HAS_WINDOW:
            row_begin = tl.maximum(first_key, ends - window)
            key_begin = tl.min(row_begin, 0)
            full_begin = tl.max(row_begin, 0)
        row_max, row_sum, acc = attend_rows(
            query, k_ptr, v_ptr, table_ptr, row_begin, row_end, key_begin, full_begin, full_end, key_end, head, inner, outer,
            HAS_WINDOW, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_ROWS, TILE_KV, TILE_D, NUM_STAGES, INTERPRET,
        )  # fmt: skip

        out, lse = softmax_end(row_max, row_sum, acc)
        # Rows are worked out anew from the item, read again, or they take registers all through the loop over the keys.
        first_row = tl.load(item_ptr, volatile=True)
        num_rows = tl.load(item_ptr + 1, volatile=True)
        row_mask = offs_row < num_rows
        rows = first_row + tl.minimum(offs_row, num_rows - 1)
        partials = tl.load(entry_partials_ptr + rows // GROUP).to(tl.int64)
        out_rows = partials * (NUM_KV_HEADS * GROUP) + (head * GROUP + rows % GROUP)
        out_offs = out_rows[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(part_out_ptr + out_offs, out, mask=row_mask[:, None] & (offs_d[None, :] < HEAD_DIM))
        tl.store(part_lse_ptr + out_rows, lse, mask=row_mask)


def launch_wide(
    work: Work,
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    ends: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    """Compute the partials of a work's wide items, if it has any; the arguments were checked. Waits for nothing, allocates nothing.

    Args:
        work: the items.
        query: `[num_tokens, num_heads, head_dim]`, last axis contiguous.
        k_pool, v_pool: one layer, dtype of query, `[num_blocks, num_kv_heads, block_size, head_dim]`.
        block_table: int32 `[num_seqs, max_blocks]`.
        ends: int32 `[num_tokens]`, how many keys of its sequence each token may see.
        part_out, part_lse: fp32 `[num_partials, num_heads, head_dim]` and `[num_partials, num_heads]`; changed in place.
        scale, sliding_window, softcap: as in prefill_attention. All keys from the first to the last that rows of one item see must
            hold numbers.

    Raises:
        ValueError: scale is not above 0, or no configuration for such heads.
    """
    if work.wide is None or work.wide.capacity == 0:
        return
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = k_pool.shape[1:3]
    group = num_heads // num_kv_heads
    config = extend_config(head_dim, query.dtype, block_size, current_arch(query), has_window=sliding_window is not None)
    inner, outer = score_factors("launch_wide", scale, softcap)
    num_programs = min(work.wide.capacity * num_kv_heads, program_slots(_extend_kernel, query, config.ctas))
    with torch.cuda.device_of(query):
        _extend_kernel[(num_programs,)](
            part_out,
            part_lse,
            query,
            k_pool,
            v_pool,
            block_table,
            ends,
            work.wide.items,
            work.wide.count,
            work.entry_tokens,
            work.entry_partials,
            inner,
            outer,
            sliding_window or 0,
            query.stride(0),
            query.stride(1),
            block_table.stride(0),
            HAS_WINDOW=sliding_window is not None,
            HAS_SOFTCAP=softcap is not None,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            TILE_ROWS=config.tile_rows,
            TILE_KV=config.tile_kv,
            TILE_D=config.tile_d,
            NUM_STAGES=config.num_stages,
            INTERPRET=is_interpreted(_extend_kernel),
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )
