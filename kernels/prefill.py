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

from radixkv.kernels.checks import check_attention, check_outputs
from radixkv.kernels.configs import prefill_config
from radixkv.kernels.tiles import (
    LOWEST,
    cast,
    check_runs_here,
    current_arch,
    dot,
    is_interpreted,
    load_rows,
    score_factors,
    softmax_end,
    softmax_step,
    tanh,
)
from radixkv.kernels.work import Work, work_from_tensors


@triton.jit
def _key_rows(
    table_ptr,
    start,
    key_begin,
    key_end,
    head,
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KV: tl.constexpr,
):
    """Return the pool rows of the keys start .. start + TILE_KV, int64, as rows of a [blocks * heads * block_size, head_dim] view."""
    offs = tl.arange(0, TILE_KV)
    if BLOCK_SIZE >= TILE_KV:
        # The whole tile lies in one block, which holds at least one live key.
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        return (block * NUM_KV_HEADS + head) * BLOCK_SIZE + start % BLOCK_SIZE + offs
    else:
        keys = start + offs
        if MASKED:
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=(keys >= key_begin) & (keys < key_end), other=0).to(tl.int64)
        else:
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
        return (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + keys % BLOCK_SIZE


@triton.jit
def _attend_tile(
    query,  # [TILE_ROWS, TILE_D]
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    key_begin,
    key_end,
    positions,  # [TILE_ROWS]
    window,
    head,
    inner,
    outer,
    row_max,  # [TILE_ROWS]
    row_sum,  # [TILE_ROWS]
    acc,  # [TILE_ROWS, TILE_D]
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KV: tl.constexpr,
    TILE_D: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attend all rows to the keys start .. start + TILE_KV; MASKED where some row does not see some of them."""
    rows = _key_rows(table_ptr, start, key_begin, key_end, head, MASKED, NUM_KV_HEADS, BLOCK_SIZE, TILE_KV)
    keys = start + tl.arange(0, TILE_KV)
    live = (keys >= key_begin) & (keys < key_end)
    offs_d = tl.arange(0, TILE_D)
    k_offs = rows[None, :] * HEAD_DIM + offs_d[:, None]
    v_offs = rows[:, None] * HEAD_DIM + offs_d[None, :]

    key = load_rows(k_ptr, k_offs, live[None, :], offs_d[:, None], MASKED, HEAD_DIM, TILE_D)
    # [TILE_ROWS, TILE_D] x [TILE_D, TILE_KV]
    x = dot(query, key, None, INTERPRET)
    if HAS_SOFTCAP:
        x = tanh(x * inner)
    if MASKED:
        seen = keys[None, :] <= positions[:, None]
        if HAS_WINDOW:
            seen = seen & (keys[None, :] > positions[:, None] - window)
        x = tl.where(seen, x, float("-inf"))
    weights, row_max, row_sum, acc = softmax_step(x, outer, row_max, row_sum, acc)
    value = load_rows(v_ptr, v_offs, live[:, None], offs_d[None, :], MASKED, HEAD_DIM, TILE_D)
    # [TILE_ROWS, TILE_KV] x [TILE_KV, TILE_D]
    acc = dot(cast(weights, value.dtype, INTERPRET), value, acc, INTERPRET)
    return row_max, row_sum, acc


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

    offs_row = tl.arange(0, TILE_ROWS)
    offs_d = tl.arange(0, TILE_D)
    tokens = first + offs_row // GROUP
    positions = seq_len - query_len + tokens
    row_mask = (offs_row < TILE_Q * GROUP) & (tokens < query_len)
    mask = row_mask[:, None] & (offs_d[None, :] < HEAD_DIM)
    out_tokens = (query_begin + tokens).to(tl.int64)
    heads = head * GROUP + offs_row % GROUP
    query_rows = out_tokens * stride_query_token + heads.to(tl.int64) * stride_query_head
    query = tl.load(query_ptr + query_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
    row_max = tl.full([TILE_ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, TILE_D], tl.float32)

    # The tile sees the keys key_begin .. key_end, and all of its rows see the tiles full_begin .. full_end.
    position = seq_len - query_len + first
    last_position = position + tl.minimum(TILE_Q, query_len - first) - 1
    key_begin = 0
    key_end = last_position + 1
    full_begin = 0
    full_end = tl.maximum(position + 1, 0) // TILE_KV * TILE_KV
    if HAS_WINDOW:
        key_begin = tl.maximum(position - window + 1, 0)
        full_begin = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE_KV) * TILE_KV
        full_begin = tl.minimum(full_begin, full_end)
        for start in tl.range(key_begin // TILE_KV * TILE_KV, full_begin, TILE_KV, num_stages=1):
            row_max, row_sum, acc = _attend_tile(
                query, k_ptr, v_ptr, table_ptr, start, key_begin, key_end, positions, window, head, inner, outer, row_max, row_sum, acc,
                True, HAS_WINDOW, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_KV, TILE_D, INTERPRET,
            )  # fmt: skip
    for start in tl.range(full_begin, full_end, TILE_KV, num_stages=NUM_STAGES):
        row_max, row_sum, acc = _attend_tile(
            query, k_ptr, v_ptr, table_ptr, start, key_begin, key_end, positions, window, head, inner, outer, row_max, row_sum, acc,
            False, HAS_WINDOW, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_KV, TILE_D, INTERPRET,
        )  # fmt: skip
    for start in tl.range(full_end, key_end, TILE_KV, num_stages=1):
        row_max, row_sum, acc = _attend_tile(
            query, k_ptr, v_ptr, table_ptr, start, key_begin, key_end, positions, window, head, inner, outer, row_max, row_sum, acc,
            True, HAS_WINDOW, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_KV, TILE_D, INTERPRET,
        )  # fmt: skip

    out, lse = softmax_end(row_max, row_sum, acc)
    out_rows = out_tokens * (NUM_KV_HEADS * GROUP) + heads
    tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + offs_d[None, :], cast(out, out_ptr.dtype.element_ty, INTERPRET), mask=mask)
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
    config = prefill_config(shape.head_dim, shape.group, query.dtype, shape.block_size, current_arch(query))
    inner, outer = score_factors(name, scale, softcap)
    if plan is None:
        plan = work_from_tensors(
            block_table, cu_query_lens, seq_lens, block_size=shape.block_size, backend="triton", tile_q=config.tile_q, chunk=0
        )
    tiles = plan.prefill_tiles
    if tiles is None or plan.tile_q != config.tile_q or sum(plan.query_lens) != shape.num_tokens:
        raise ValueError(
            f"{name}: plan must hold prefill tiles of {config.tile_q} tokens for {shape.num_tokens} query tokens, "
            f"got tiles of {plan.tile_q} for {sum(plan.query_lens)}"
        )
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device) if lse is None else lse
    if tiles.shape[0] == 0:
        return out, lse
    with torch.cuda.device_of(query):
        _prefill_kernel[(tiles.shape[0] * shape.num_kv_heads,)](
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
            NUM_KV_HEADS=shape.num_kv_heads,
            GROUP=shape.group,
            HEAD_DIM=shape.head_dim,
            BLOCK_SIZE=shape.block_size,
            TILE_Q=config.tile_q,
            TILE_ROWS=config.tile_rows,
            TILE_KV=config.tile_kv,
            TILE_D=config.tile_d,
            NUM_STAGES=config.num_stages,
            INTERPRET=is_interpreted(_prefill_kernel),
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )
    return out, lse
