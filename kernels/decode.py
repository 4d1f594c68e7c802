"""Triton kernels for attention of one new token per sequence over paged keys and values, and for the merge of partials.

out = sum_k exp(s_k) v_k / sum_k exp(s_k), s_k = scale * q . k_k, over the last `window` keys of the sequence. The keys are cut at
absolute multiples of a chunk; one program attends the heads of one group to one chunk, in fp32, and a second kernel merges a
sequence's partials in the order of their positions. So a sequence's result depends on nothing but itself.
The keys of a tile are split, and every split, a warp as a rule, has a softmax of its own (3-d dots); they meet once, at the end.

Source: FlashDecoding (Dao, Haziza, Massa, Sizov, 2023); merge of attention states, FlashInfer (arXiv 2501.01005), section 3.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.kernels.checks import check_attention, check_outputs, check_partials, check_tensor
from radixkv.kernels.configs import decode_config
from radixkv.kernels.tiles import (
    LN_2,
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

# Partials that the merge kernel reads per trip.
_MERGE_TILE = 16


@triton.jit
def _attend_tile(
    query,  # [SPLITS, TILE_H, TILE_D]
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    key_begin,
    key_end,
    head,
    inner,
    outer,
    row_max,  # [SPLITS, TILE_H]
    row_sum,  # [SPLITS, TILE_H]
    acc,  # [SPLITS, TILE_H, TILE_D]
    MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_W: tl.constexpr,
    TILE_D: tl.constexpr,
    SPLITS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attend to the keys start .. start + SPLITS * TILE_W; MASKED where some of them are not to be seen."""
    # The TILE_W keys of a split always lie in one block.
    split_keys = start + tl.arange(0, SPLITS) * TILE_W
    if BLOCK_SIZE >= SPLITS * TILE_W:
        # The whole tile lies in one block, which holds at least one live key.
        blocks = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
    elif MASKED:
        split_live = (split_keys + TILE_W > key_begin) & (split_keys < key_end)
        blocks = tl.load(table_ptr + split_keys // BLOCK_SIZE, mask=split_live, other=0).to(tl.int64)
    else:
        blocks = tl.load(table_ptr + split_keys // BLOCK_SIZE).to(tl.int64)
    split_rows = (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + split_keys % BLOCK_SIZE
    offs_w = tl.arange(0, TILE_W)
    rows = split_rows[:, None] + offs_w[None, :]
    keys = split_keys[:, None] + offs_w[None, :]
    live = (keys >= key_begin) & (keys < key_end)
    offs_d = tl.arange(0, TILE_D)
    k_offs = rows[:, None, :] * HEAD_DIM + offs_d[None, :, None]
    v_offs = rows[:, :, None] * HEAD_DIM + offs_d[None, None, :]

    key = load_rows(k_ptr, k_offs, live[:, None, :], offs_d[None, :, None], MASKED, HEAD_DIM, TILE_D)
    # [SPLITS, TILE_H, TILE_D] x [SPLITS, TILE_D, TILE_W]
    x = dot(query, key, None, INTERPRET)
    if HAS_SOFTCAP:
        x = tanh(x * inner)
    if MASKED:
        x = tl.where(live[:, None, :], x, float("-inf"))
    weights, row_max, row_sum, acc = softmax_step(x, outer, row_max, row_sum, acc)
    value = load_rows(v_ptr, v_offs, live[:, :, None], offs_d[None, None, :], MASKED, HEAD_DIM, TILE_D)
    # [SPLITS, TILE_H, TILE_W] x [SPLITS, TILE_W, TILE_D]
    acc = dot(cast(weights, value.dtype, INTERPRET), value, acc, INTERPRET)
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["window", "stride_query_seq", "stride_query_head", "stride_table_seq"])
def _decode_kernel(
    out_ptr,  # [num_items, num_heads, head_dim]
    lse_ptr,  # [num_items, num_heads]
    query_ptr,  # [num_seqs, num_heads, head_dim]
    k_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    block_table_ptr,  # [num_seqs, max_blocks]
    seq_lens_ptr,  # [num_seqs]
    items_ptr,  # [num_items, 4]
    inner,
    outer,
    window,
    stride_query_seq,
    stride_query_head,
    stride_table_seq,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_KV: tl.constexpr,
    TILE_D: tl.constexpr,
    SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (GROUP + TILE_H - 1) // TILE_H
    TILE_W: tl.constexpr = TILE_KV // SPLITS
    head = tl.program_id(0) // HEAD_TILES % NUM_KV_HEADS
    item_ptr = items_ptr + tl.program_id(0) // HEAD_TILES // NUM_KV_HEADS * 4
    seq = tl.load(item_ptr).to(tl.int64)
    key_begin = tl.load(item_ptr + 1)
    seq_len = tl.load(seq_lens_ptr + seq)
    key_end = tl.minimum(tl.load(item_ptr + 2), seq_len)
    partial = tl.load(item_ptr + 3).to(tl.int64)
    table_ptr = block_table_ptr + seq * stride_table_seq

    offs_h = tl.program_id(0) % HEAD_TILES * TILE_H + tl.arange(0, TILE_H)
    offs_d = tl.arange(0, TILE_D)
    mask = (offs_h[:, None] < GROUP) & (offs_d[None, :] < HEAD_DIM)
    heads = (head * GROUP + offs_h).to(tl.int64)
    query_rows = seq * stride_query_seq + heads * stride_query_head
    query = tl.load(query_ptr + query_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
    query = tl.broadcast_to(query[None, :, :], (SPLITS, TILE_H, TILE_D))
    row_max = tl.full([SPLITS, TILE_H], LOWEST, tl.float32)
    row_sum = tl.zeros([SPLITS, TILE_H], tl.float32)
    acc = tl.zeros([SPLITS, TILE_H, TILE_D], tl.float32)

    # Tiles begin at absolute multiples of TILE_KV; all keys of the tiles full_begin .. full_end are seen.
    full_begin = key_begin
    full_end = key_end // TILE_KV * TILE_KV
    if HAS_WINDOW:
        key_begin = tl.maximum(key_begin, seq_len - window)
        full_begin = tl.minimum(tl.cdiv(key_begin, TILE_KV) * TILE_KV, full_end)
        for start in tl.range(key_begin // TILE_KV * TILE_KV, full_begin, TILE_KV, num_stages=1):
            row_max, row_sum, acc = _attend_tile(
                query, k_ptr, v_ptr, table_ptr, start, key_begin, key_end, head, inner, outer, row_max, row_sum, acc,
                True, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_W, TILE_D, SPLITS, INTERPRET,
            )  # fmt: skip
    for start in tl.range(full_begin, full_end, TILE_KV, num_stages=NUM_STAGES):
        row_max, row_sum, acc = _attend_tile(
            query, k_ptr, v_ptr, table_ptr, start, key_begin, key_end, head, inner, outer, row_max, row_sum, acc,
            False, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_W, TILE_D, SPLITS, INTERPRET,
        )  # fmt: skip
    for start in tl.range(full_end, key_end, TILE_KV, num_stages=1):
        row_max, row_sum, acc = _attend_tile(
            query, k_ptr, v_ptr, table_ptr, start, key_begin, key_end, head, inner, outer, row_max, row_sum, acc,
            True, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_W, TILE_D, SPLITS, INTERPRET,
        )  # fmt: skip

    # The splits' softmaxes become one; a split that saw no key has maximum LOWEST and sum 0.
    top = tl.max(row_max, 0)
    shrink = tl.exp2(row_max - top[None, :])
    out, lse = softmax_end(top, tl.sum(row_sum * shrink, 0), tl.sum(acc * shrink[:, :, None], 0))
    out_rows = partial * (NUM_KV_HEADS * GROUP) + heads
    tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + offs_d[None, :], out, mask=mask)
    tl.store(lse_ptr + out_rows, lse, mask=offs_h < GROUP)


@triton.jit
def _merge_kernel(
    out_ptr,  # [num_seqs, num_rows, head_dim]
    lse_ptr,  # [num_seqs, num_rows]
    part_out_ptr,  # [num_partials, num_rows, head_dim]
    part_lse_ptr,  # [num_partials, num_rows]
    ranges_ptr,  # [num_seqs + 1]
    NUM_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_D: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    seq = (tl.program_id(0) // NUM_ROWS).to(tl.int64)
    row = tl.program_id(0) % NUM_ROWS
    begin = tl.load(ranges_ptr + seq)
    end = tl.load(ranges_ptr + seq + 1)

    offs_p = tl.arange(0, TILE_P)
    offs_d = tl.arange(0, TILE_D)
    row_max = tl.full([1], LOWEST, tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, TILE_D], tl.float32)

    for start in range(begin, end, TILE_P):
        partials = start + offs_p
        part_rows = partials.to(tl.int64) * NUM_ROWS + row
        part_mask = partials < end
        part_lse = tl.load(part_lse_ptr + part_rows, mask=part_mask, other=float("-inf"))
        part_out = tl.load(
            part_out_ptr + part_rows[:, None] * HEAD_DIM + offs_d[None, :],
            mask=part_mask[:, None] & (offs_d[None, :] < HEAD_DIM),
            other=0.0,
        )
        # [1, TILE_P]: partials take the place of keys, their LSE that of scores.
        weights, row_max, row_sum, acc = softmax_step(part_lse[None, :], 1.0 / LN_2, row_max, row_sum, acc)
        acc += tl.sum(tl.trans(weights) * part_out, 0)[None, :]

    out, lse = softmax_end(row_max, row_sum, acc)
    out_row = seq * NUM_ROWS + row
    out = cast(out, out_ptr.dtype.element_ty, INTERPRET)
    tl.store(out_ptr + out_row * HEAD_DIM + offs_d[None, :], out, mask=offs_d[None, :] < HEAD_DIM)
    tl.store(lse_ptr + out_row + tl.arange(0, 1), lse)


def decode_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: Work | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the last position of each sequence over its paged keys and values.

    Args:
        query: `[num_seqs, num_heads, head_dim]`, float32, float16 or bfloat16, last axis contiguous. Head h reads K/V head
            h // (num_heads // num_kv_heads).
        k_pool, v_pool: one layer, dtype of query, `[num_blocks, num_kv_heads, block_size, head_dim]`.
        block_table: int32 `[num_seqs, max_blocks]`, block ids in token order; what lies past a sequence's end is never used.
        seq_lens: int32 `[num_seqs]`, tokens of each sequence, the new one included; 0 gives out 0 and lse -inf.
        scale: factor of q . k, above 0.
        sliding_window: only that many last positions are seen, the query's own included; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: as they are.
        plan: the step's work list; None: one is built here, which waits for the device.
        out: takes the output if given, like query; changed in place.
        lse: takes the LSE if given, fp32 `[num_seqs, num_heads]`; changed in place.

    Returns:
        out, like query, and lse, natural log, in fp32.

    Raises:
        ValueError: shapes, dtypes, devices or the plan do not fit, or the tensors are on a CPU outside the interpreter.
    """
    name = "decode_attention"
    shape = check_attention(name, query, k_pool, v_pool, block_table, seq_lens, None, sliding_window, softcap)
    check_outputs(name, query, out, lse)
    check_runs_here(name, _decode_kernel, query)
    config = decode_config(shape.head_dim, shape.group, query.dtype, shape.block_size, current_arch(query))
    inner, outer = score_factors(name, scale, softcap)
    if plan is None:
        plan = work_from_tensors(
            block_table, None, seq_lens, block_size=shape.block_size, backend="triton", tile_q=0, chunk=config.chunk
        )
    items, ranges = plan.decode_items, plan.merge_ranges
    if items is None or ranges is None or plan.chunk % config.tile_kv:
        raise ValueError(f"{name}: plan must hold decode items of a multiple of {config.tile_kv} keys, got items of {plan.chunk}")
    check_tensor(name, "plan.merge_ranges", ranges, (shape.num_seqs + 1,), dtype=torch.int32, device=query.device)
    part_out = torch.empty((items.shape[0], shape.num_heads, shape.head_dim), dtype=torch.float32, device=query.device)
    part_lse = torch.empty(part_out.shape[:2], dtype=torch.float32, device=query.device)
    if items.shape[0] > 0:
        head_tiles = triton.cdiv(shape.group, config.tile_rows)
        with torch.cuda.device_of(query):
            _decode_kernel[(items.shape[0] * shape.num_kv_heads * head_tiles,)](
                part_out,
                part_lse,
                query,
                k_pool,
                v_pool,
                block_table,
                seq_lens,
                items,
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
                TILE_H=config.tile_rows,
                TILE_KV=config.tile_kv,
                TILE_D=config.tile_d,
                SPLITS=config.splits,
                NUM_STAGES=config.num_stages,
                INTERPRET=is_interpreted(_decode_kernel),
                num_warps=config.num_warps,
                enable_fp_fusion=True,
            )
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device) if lse is None else lse
    _merge(out, lse, part_out, part_lse, ranges)
    return out, lse


def merge_partials(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention outputs over disjoint sets of keys into the output over all of them.

    Args:
        out: fp32 `[num_partials, num_rows, head_dim]`; an empty partial is 0.
        lse: fp32 `[num_partials, num_rows]`, natural log; an empty partial is -inf.

    Returns:
        out fp32 `[num_rows, head_dim]` and lse fp32 `[num_rows]`; (0, -inf) for a row whose partials are all empty.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the tensors are on a CPU outside the interpreter.

    Source: FlashInfer (arXiv 2501.01005), section 3.3, composition of attention states.
    """
    check_partials("merge_partials", out, lse)
    check_tensor("merge_partials", "out", out, out.shape, dtype=torch.float32)
    check_runs_here("merge_partials", _merge_kernel, out)
    merged_out = torch.empty((1, *out.shape[1:]), dtype=torch.float32, device=out.device)
    merged_lse = torch.empty((1, lse.shape[1]), dtype=torch.float32, device=out.device)
    ranges = torch.tensor([0, out.shape[0]], dtype=torch.int32).to(out.device)
    _merge(merged_out, merged_lse, out, lse, ranges)
    return merged_out[0], merged_lse[0]


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, ranges: Tensor) -> None:
    """Merge the partials ranges[n] .. ranges[n + 1] into row n of out and lse, which are changed in place."""
    num_seqs, num_rows, head_dim = out.shape
    if num_seqs * num_rows == 0:
        return
    with torch.cuda.device_of(out):
        _merge_kernel[(num_seqs * num_rows,)](
            out,
            lse,
            part_out,
            part_lse,
            ranges,
            NUM_ROWS=num_rows,
            HEAD_DIM=head_dim,
            TILE_P=_MERGE_TILE,
            TILE_D=triton.next_power_of_2(head_dim),
            INTERPRET=is_interpreted(_merge_kernel),
            num_warps=4,
            enable_fp_fusion=True,
        )
