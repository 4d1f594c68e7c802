"""Triton kernel for attention of new tokens over paged keys and values, cached and new alike.

out_p = sum_k exp(s_pk) v_k / sum_k exp(s_pk), s_pk = scale * q_p . k_k, over the keys p - window < k <= p, absolute positions.
One program holds the (token, query head) rows of one tile of tokens and one K/V head, so a key is loaded once for all heads of
a group, whatever its size. Tiles of keys begin at absolute multiples of TILE_KV and are taken in ascending order, so a row's
result does not depend on how the queries are cut into tiles or calls.

Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1; paged keys as in vLLM (arXiv 2309.06180), section 4.1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.kernels.attend import attend_rows
from radixkv.kernels.checks import check_attention, check_outputs
from radixkv.kernels.configs import PrefillConfig, layout_for, prefill_config
from radixkv.kernels.decode import launch_narrow
from radixkv.kernels.extend import launch_wide
from radixkv.kernels.merge import launch_merge
from radixkv.kernels.tiles import cast, check_runs_here, current_arch, is_interpreted, multiprocessors, score_factors, softmax_end
from radixkv.kernels.work import Work, work_from_tensors


@triton.jit(do_not_specialize=["window", "stride_query_token", "stride_query_head", "stride_table_seq"])
def _prefill_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    lse_ptr,  # [num_tokens, num_heads]
    query_ptr,  # [num_tokens, num_heads, head_dim]
    k_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    block_table_ptr,  # [num_seqs, max_blocks]
    cu_query_lens_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    tiles_ptr,  # [num_tiles, 2]
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
    TILE_Q: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KV: tl.constexpr,
    TILE_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    tile = tl.program_id(0) // NUM_KV_HEADS
    head = tl.program_id(0) % NUM_KV_HEADS
    seq = tl.load(tiles_ptr + tile * 2).to(tl.int64)
    first = tl.load(tiles_ptr + tile * 2 + 1)
    query_begin = tl.load(cu_query_lens_ptr + seq)
    query_len = tl.load(cu_query_lens_ptr + seq + 1) - query_begin
    seq_len = tl.load(seq_lens_ptr + seq)
    table_ptr = block_table_ptr + seq * stride_table_seq

    # Rows beyond the tile repeat its last token and are not stored.
    num_tokens = tl.minimum(TILE_Q, query_len - first)
    offs_row = tl.arange(0, TILE_ROWS)
    offs_d = tl.arange(0, TILE_D)
    tokens = first + tl.minimum(offs_row // GROUP, num_tokens - 1)
    heads = head * GROUP + offs_row % GROUP
    query_rows = (query_begin + tokens).to(tl.int64) * stride_query_token + heads.to(tl.int64) * stride_query_head
    query = tl.load(query_ptr + query_rows[:, None] + offs_d[None, :], mask=offs_d[None, :] < HEAD_DIM, other=0.0)

    # The tile sees the keys key_begin .. key_end, and all of its rows see full_begin .. full_end.
    row_end = seq_len - query_len + tokens + 1
    full_end = seq_len - query_len + first + 1
    key_end = full_end + num_tokens - 1
    row_begin = 0
    key_begin = 0
    full_begin = 0
    if HAS_WINDOW:
        row_begin = tl.maximum(row_end - window, 0)
        key_begin = tl.maximum(full_end - window, 0)
        full_begin = tl.maximum(key_end - window, 0)
    row_max, row_sum, acc = attend_rows(
        query, k_ptr, v_ptr, table_ptr, row_begin, row_end, key_begin, full_begin, full_end, key_end, head, inner, outer,
        HAS_WINDOW, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_ROWS, TILE_KV, TILE_D, NUM_STAGES, INTERPRET,
    )  # fmt: skip

    out, lse = softmax_end(row_max, row_sum, acc)
    row_mask = offs_row < num_tokens * GROUP
    out_rows = ((query_begin + tokens) * (NUM_KV_HEADS * GROUP) + heads).to(tl.int64)
    out_offs = out_rows[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptr + out_offs, cast(out, out_ptr.dtype.element_ty, INTERPRET), mask=row_mask[:, None] & (offs_d[None, :] < HEAD_DIM))
    tl.store(lse_ptr + out_rows, lse, mask=row_mask)


def prefill_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: Work | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last query_len positions of each sequence over its paged keys and values.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, float32, float16 or bfloat16, last axis contiguous, sequences one after the
            other. Head h reads K/V head h // (num_heads // num_kv_heads).
        k_pool, v_pool: one layer, dtype of query, `[num_blocks, num_kv_heads, block_size, head_dim]`.
        block_table: int32 `[num_seqs, max_blocks]`, block ids in token order; what lies past a sequence's end is never used.
        cu_query_lens: int32 `[num_seqs + 1]`, where each sequence's rows begin in query.
        seq_lens: int32 `[num_seqs]`, tokens of each sequence, the new ones included.
        scale: factor of q . k, above 0.
        sliding_window: a query sees only that many last positions, its own included; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: as they are.
        plan: the step's work list; None: one is built here, which waits for the device.
        out: takes the output if given, like query; changed in place.
        lse: takes the LSE if given, fp32 `[num_tokens, num_heads]`; changed in place.

    Returns:
        out, like query, and lse, natural log, in fp32. A row that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: shapes, dtypes, devices or the plan do not fit, or the tensors are on a CPU outside the interpreter.
    """
    name = "prefill_attention"
    shape = check_attention(name, query, k_pool, v_pool, block_table, seq_lens, cu_query_lens, sliding_window, softcap)
    check_outputs(name, query, out, lse)
    check_runs_here(name, _prefill_kernel, query)
    has_window = sliding_window is not None
    config = prefill_config(shape.head_dim, shape.group, query.dtype, shape.block_size, current_arch(query), has_window=has_window)
    if plan is None:
        layout = layout_for(
            shape.head_dim, shape.group, query.dtype, shape.block_size, shape.num_kv_heads, current_arch(query), multiprocessors(query)
        )
        plan = work_from_tensors(
            block_table, cu_query_lens, seq_lens, block_size=shape.block_size, backend="triton", layout=layout, window=sliding_window
        )
    if plan.prefill_tiles is None or plan.tile_q != config.tile_q or sum(plan.query_lens) != shape.num_tokens:
        raise ValueError(
            f"{name}: plan must hold prefill tiles of {config.tile_q} tokens for {shape.num_tokens} query tokens, "
            f"got tiles of {plan.tile_q} for {sum(plan.query_lens)}"
        )
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device) if lse is None else lse
    tensors = (query, k_pool, v_pool, block_table)
    _launch_tiles(
        config, plan.prefill_tiles, *tensors, cu_query_lens, seq_lens, out, lse, scale=scale, sliding_window=sliding_window, softcap=softcap
    )
    if plan.ends is not None:
        part_out, part_lse = plan.partials(shape.num_heads, shape.head_dim)
        launch_wide(plan, *tensors, plan.ends, part_out, part_lse, scale=scale, sliding_window=sliding_window, softcap=softcap)
        launch_narrow(plan, *tensors, plan.ends, part_out, part_lse, scale=scale, sliding_window=sliding_window, softcap=softcap)
        launch_merge(plan, part_out, part_lse, out, lse)
    return out, lse


def _launch_tiles(
    config: PrefillConfig,
    tiles: Tensor,
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    """Compute the rows of the query tiles `[num_tiles, 2]`, straight into out and lse; the other arguments as in prefill_attention."""
    if tiles.shape[0] == 0:
        return
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = k_pool.shape[1:3]
    inner, outer = score_factors("prefill_attention", scale, softcap)
    with torch.cuda.device_of(query):
        _prefill_kernel[(tiles.shape[0] * num_kv_heads,)](
            out,
            lse,
            query,
            k_pool,
            v_pool,
            block_table,
            cu_query_lens,
            seq_lens,
            tiles,
            inner,
            outer,
            sliding_window or 0,
            query.stride(0),
            query.stride(1),
            block_table.stride(0),
            HAS_WINDOW=sliding_window is not None,
            HAS_SOFTCAP=softcap is not None,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=num_heads // num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            TILE_Q=config.tile_q,
            TILE_ROWS=config.tile_rows,
            TILE_KV=config.tile_kv,
            TILE_D=config.tile_d,
            NUM_STAGES=config.num_stages,
            INTERPRET=is_interpreted(_prefill_kernel),
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )
