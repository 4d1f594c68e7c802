"""Triton kernel for attention of few rows over paged keys and values: one new token per sequence, and ranges that sequences share.

out = sum_k exp(s_k) v_k / sum_k exp(s_k), s_k = scale * q . k_k, over the last `window` keys up to a row's end. A plan cuts the keys
in ranges; an item is one range and the tokens, of one sequence or of several that hold the same blocks there, that attend to it. A
row is a (token, query head) pair of one K/V head. One program of a fixed grid after the other takes the next item and writes one fp32
partial per row; a second kernel merges them. Tiles of keys begin at absolute multiples of TILE_KV and are taken in ascending order,
and a key that a row does not see leaves no trace in it, so that a partial depends on nothing but its row, its range and its keys.
The keys of a tile are split, and every split, a warp as a rule, has a softmax of its own (3-d dots); they meet once, at the end.

Source: FlashDecoding (Dao, Haziza, Massa, Sizov, 2023); shared ranges as in Hydragen (arXiv 2402.05099), section 3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.kernels.checks import check_attention, check_outputs, check_tensor
from radixkv.kernels.configs import decode_config, layout_for
from radixkv.kernels.extend import launch_wide
from radixkv.kernels.merge import launch_merge
from radixkv.kernels.tiles import (
    LOWEST,
    cast,
    check_runs_here,
    current_arch,
    dot,
    is_interpreted,
    load_rows,
    multiprocessors,
    program_slots,
    score_factors,
    softmax_end,
    softmax_step,
    tanh,
)
from radixkv.kernels.work import Work, work_from_tensors

# A window as long as any sequence: no window.
_NO_WINDOW = 2**31 - 1


@triton.jit
def _block_ids(
    table_ptr,
    start,
    live_begin,
    live_end,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_W: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return the block of the keys start .. start + SPLITS * TILE_W, or of each split of them where a tile spans blocks.

    MASKED where only the keys live_begin .. live_end, some of the tile's, have one: splits without such a key get block 0.
    """
    if BLOCK_SIZE >= SPLITS * TILE_W:
        return tl.load(table_ptr + start // BLOCK_SIZE)
    else:
        # The TILE_W keys of a split always lie in one block.
        split_keys = start + tl.arange(0, SPLITS) * TILE_W
        if MASKED:
            live = (split_keys + TILE_W > live_begin) & (split_keys < live_end)
            return tl.load(table_ptr + split_keys // BLOCK_SIZE, mask=live, other=0)
        else:
            return tl.load(table_ptr + split_keys // BLOCK_SIZE)


@triton.jit
def _attend_tile(
    query,  # [SPLITS, TILE_R, TILE_D]
    k_ptr,
    v_ptr,
    blocks,  # [] or [SPLITS]
    start,
    live_begin,
    live_end,
    end,  # [TILE_R]
    window,
    head,
    inner,
    outer,
    row_max,  # [SPLITS, TILE_R]
    row_sum,  # [SPLITS, TILE_R]
    acc,  # [SPLITS, TILE_R, TILE_D]
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
    """Attend to the keys start .. start + SPLITS * TILE_W; MASKED where some row does not see some of them."""
    offs_s = tl.arange(0, SPLITS) * TILE_W
    offs_w = tl.arange(0, TILE_W)
    offs_d = tl.arange(0, TILE_D)
    keys = start + offs_s[:, None] + offs_w[None, :]
    live = (keys >= live_begin) & (keys < live_end)
    block_rows = (blocks.to(tl.int64) * NUM_KV_HEADS + head) * BLOCK_SIZE
    # 64-bit arithmetic for a tile or a split, and 32 bits, mostly constants, from there on.
    if BLOCK_SIZE >= SPLITS * TILE_W:
        origin = (block_rows + start % BLOCK_SIZE) * HEAD_DIM
        rows = offs_s[:, None] + offs_w[None, :]
        k_ptrs, v_ptrs = k_ptr + origin, v_ptr + origin
    else:
        origin = (block_rows + (start + offs_s) % BLOCK_SIZE) * HEAD_DIM
        rows = tl.broadcast_to(offs_w[None, :], (SPLITS, TILE_W))
        k_ptrs, v_ptrs = (k_ptr + origin)[:, None, None], (v_ptr + origin)[:, None, None]
    # Keys are laid out as values are and turned round in shared memory, so that both have the same addresses but for the pool.
    offs = rows[:, :, None] * HEAD_DIM + offs_d[None, None, :]

    # A dead key may be NaN, its score is masked. A dead value must not be read, for 0 * NaN is NaN.
    key = load_rows(k_ptrs, offs, live[:, :, None], offs_d[None, None, :], False, HEAD_DIM, TILE_D)
    # [SPLITS, TILE_R, TILE_D] x [SPLITS, TILE_D, TILE_W]
    x = dot(query, tl.permute(key, (0, 2, 1)), None, INTERPRET)
    if HAS_SOFTCAP:
        x = tanh(x * inner)
    if MASKED:
        # 1 for a row's last key, up to window for its first one.
        distance = end[None, :, None] - keys[:, None, :]
        seen = live[:, None, :] & ((distance - 1).to(tl.uint32) < window.to(tl.uint32))
        x = tl.where(seen, x, float("-inf"))
    weights, row_max, row_sum, acc = softmax_step(x, outer, row_max, row_sum, acc)
    value = load_rows(v_ptrs, offs, live[:, :, None], offs_d[None, None, :], MASKED, HEAD_DIM, TILE_D)
    # [SPLITS, TILE_R, TILE_W] x [SPLITS, TILE_W, TILE_D]
    acc = dot(cast(weights, value.dtype, INTERPRET), value, acc, INTERPRET)
    return row_max, row_sum, acc


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _join_splits(x, COMBINE: tl.constexpr, SPLITS: tl.constexpr):
    """Reduce the last axis of SPLITS, 2 or 4, elements.

    Half by half, and not with tl.reduce, whose way across warps has a barrier for every register.
    """
    tl.static_assert(SPLITS == 2 or SPLITS == 4)
    if SPLITS == 4:
        one, other = tl.split(tl.reshape(x, x.shape[:-1] + [2, 2]))
        x = COMBINE(one, other)
    one, other = tl.split(x)
    return COMBINE(one, other)


@triton.jit(do_not_specialize=["window", "stride_query_token", "stride_query_head", "stride_table_seq"])
def _decode_kernel(
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
    HAS_SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_KV: tl.constexpr,
    TILE_D: tl.constexpr,
    SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (GROUP + TILE_R - 1) // TILE_R
    TILE_W: tl.constexpr = TILE_KV // SPLITS
    EDGE_STAGES: tl.constexpr = 2 if NUM_STAGES > 2 else 1
    offs_r = tl.arange(0, TILE_R)
    offs_d = tl.arange(0, TILE_D)
    num_units = tl.load(count_ptr) * (NUM_KV_HEADS * HEAD_TILES)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        item_ptr = items_ptr + unit // (NUM_KV_HEADS * HEAD_TILES) * 5
        head = unit // HEAD_TILES % NUM_KV_HEADS
        first_entry = tl.load(item_ptr)
        num_entries = tl.load(item_ptr + 1)
        table_ptr = block_table_ptr + tl.load(item_ptr + 2).to(tl.int64) * stride_table_seq
        key_begin = tl.load(item_ptr + 3)
        key_end = tl.load(item_ptr + 4)

        # Row r is of entry r // GROUP and head r % GROUP, here counted through from the first entry's first head. A group of more
        # heads than rows has several programs, and one entry to an item.
        if HEAD_TILES == 1:
            row_entry = offs_r * 0
            for i in tl.static_range(1, (TILE_R - 1) // GROUP + 1):
                row_entry += (offs_r >= i * GROUP).to(tl.int32)
            row_mask = row_entry < num_entries
            heads = head * GROUP + offs_r
        else:
            row_entry = offs_r * 0
            row_mask = unit % HEAD_TILES * TILE_R + offs_r < GROUP
            heads = head * GROUP + unit % HEAD_TILES * TILE_R + offs_r
        token = tl.load(entry_tokens_ptr + first_entry + row_entry, mask=row_mask, other=0).to(tl.int64)
        end = tl.load(ends_ptr + token, mask=row_mask, other=0)
        query_rows = token * stride_query_token + heads * stride_query_head - row_entry * (GROUP * stride_query_head)
        mask = row_mask[:, None] & (offs_d[None, :] < HEAD_DIM)
        query = tl.load(query_ptr + query_rows[:, None] + offs_d[None, :], mask=mask, other=0.0)
        query = tl.broadcast_to(query[None, :, :], (SPLITS, TILE_R, TILE_D))

        # Some row sees the keys live_begin .. live_end, all rows see all keys of the tiles full_begin .. full_end. The ends are
        # read once more, one by one, so that the compiler knows these bounds for scalars: it has no registers to spare.
        first_end = tl.load(ends_ptr + tl.load(entry_tokens_ptr + first_entry))
        last_end = first_end
        for i in tl.static_range(1, TILE_R // GROUP):
            one_end = tl.load(ends_ptr + tl.load(entry_tokens_ptr + first_entry + tl.minimum(i, num_entries - 1)))
            first_end = tl.minimum(first_end, one_end)
            last_end = tl.maximum(last_end, one_end)
        live_begin = tl.maximum(key_begin, first_end - window)
        live_end = tl.minimum(key_end, last_end)
        full_begin = tl.cdiv(tl.minimum(tl.maximum(key_begin, last_end - window), live_end), TILE_KV) * TILE_KV
        full_end = tl.maximum(tl.minimum(key_end, first_end) // TILE_KV * TILE_KV, full_begin)
        first_tile = tl.where(live_begin < live_end, live_begin // TILE_KV * TILE_KV, full_begin)
        row_max = tl.full([SPLITS, TILE_R], LOWEST, tl.float32)
        row_sum = tl.zeros([SPLITS, TILE_R], tl.float32)
        acc = tl.zeros([SPLITS, TILE_R, TILE_D], tl.float32)

        # Masked tiles before the full ones, full tiles, masked tiles after them. Two trips around one masked and one full loop,
        # of which the second finds no full tile, take fewer registers than three loops.
        for part in range(2):
            begin = tl.where(part == 0, first_tile, full_end)
            stop = tl.where(part == 0, full_begin, live_end)
            for start in tl.range(begin, stop, TILE_KV, num_stages=EDGE_STAGES):
                blocks = _block_ids(table_ptr, start, live_begin, live_end, True, BLOCK_SIZE, TILE_W, SPLITS)
                row_max, row_sum, acc = _attend_tile(
                    query, k_ptr, v_ptr, blocks, start, live_begin, live_end, end, window, head, inner, outer,
                    row_max, row_sum, acc,
                    True, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_W, TILE_D, SPLITS, INTERPRET,
                )  # fmt: skip
            full = tl.where(part == 0, full_begin, full_end)
            if full < full_end:
                # The blocks of a tile are read one trip ahead of its keys, so that the keys' own loads can start early.
                blocks = _block_ids(table_ptr, full, 0, 0, False, BLOCK_SIZE, TILE_W, SPLITS)
                for start in tl.range(full, full_end, TILE_KV, num_stages=NUM_STAGES):
                    tile_blocks = blocks
                    ahead = tl.minimum(start + TILE_KV, full_end - TILE_KV)
                    blocks = _block_ids(table_ptr, ahead, 0, 0, False, BLOCK_SIZE, TILE_W, SPLITS)
                    row_max, row_sum, acc = _attend_tile(
                        query, k_ptr, v_ptr, tile_blocks, start, live_begin, live_end, end, window, head, inner, outer,
                        row_max, row_sum, acc,
                        False, HAS_SOFTCAP, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_W, TILE_D, SPLITS, INTERPRET,
                    )  # fmt: skip

        # The splits' softmaxes become one; a split that saw no key has maximum LOWEST and sum 0.
        top = _join_splits(tl.permute(row_max, (1, 0)), _larger, SPLITS)
        shrink = tl.exp2(row_max - top[None, :])
        row_sum = _join_splits(tl.permute(row_sum * shrink, (1, 0)), _add, SPLITS)
        acc = _join_splits(tl.permute(acc * shrink[:, :, None], (1, 2, 0)), _add, SPLITS)
        out, lse = softmax_end(top, row_sum, acc)
        if HEAD_TILES == 1:
            # Rows are worked out anew from the item, read again, or they take registers all through the loops: with a softcap, at
            # head_dim 128, Triton 3.6 has none left.
            num_entries = tl.load(item_ptr + 1, volatile=True)
            row_entry = tl.minimum(offs_r, num_entries * GROUP - 1) // GROUP
            row_mask = offs_r < num_entries * GROUP
        mask = row_mask[:, None] & (offs_d[None, :] < HEAD_DIM)
        partial = tl.load(entry_partials_ptr + first_entry + row_entry, mask=row_mask, other=0).to(tl.int64)
        out_rows = (partial * NUM_KV_HEADS - row_entry) * GROUP + heads
        tl.store(part_out_ptr + out_rows[:, None] * HEAD_DIM + offs_d[None, :], out, mask=mask)
        tl.store(part_lse_ptr + out_rows, lse, mask=row_mask)


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

    With plan, out and lse given, and once the plan has its buffers, nothing is allocated and nothing waits for the device.

    Args:
        query: `[num_seqs, num_heads, head_dim]`, float32, float16 or bfloat16, last axis contiguous. Head h reads K/V head
            h // (num_heads // num_kv_heads).
        k_pool, v_pool: one layer, dtype of query, `[num_blocks, num_kv_heads, block_size, head_dim]`.
        block_table: int32 `[num_seqs, max_blocks]`, block ids in token order; what lies past a sequence's end is never used.
        seq_lens: int32 `[num_seqs]`, tokens of each sequence, the new one included; 0 gives out 0 and lse -inf.
        scale: factor of q . k, above 0.
        sliding_window: only that many last positions are seen, the query's own included; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: as they are.
        plan: the step's work list, built for this window; None: one is built here, which waits for the device.
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
    if plan is None:
        layout = layout_for(
            shape.head_dim, shape.group, query.dtype, shape.block_size, shape.num_kv_heads, current_arch(query), multiprocessors(query)
        )
        plan = work_from_tensors(
            block_table, None, seq_lens, block_size=shape.block_size, backend="triton", layout=layout, window=sliding_window
        )
    if plan.merge_tokens is None:
        raise ValueError(f"{name}: plan must hold items of a decode step, got none")
    check_tensor(name, "plan.merge_tokens", plan.merge_tokens, (shape.num_seqs,), dtype=torch.int32, device=query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device) if lse is None else lse
    part_out, part_lse = plan.partials(shape.num_heads, shape.head_dim)
    for launch in (launch_narrow, launch_wide):
        launch(
            plan, query, k_pool, v_pool, block_table, seq_lens, part_out, part_lse,
            scale=scale, sliding_window=sliding_window, softcap=softcap,
        )  # fmt: skip
    launch_merge(plan, part_out, part_lse, out, lse)
    return out, lse


def launch_narrow(
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
    """Compute the partials of a work's narrow items, if it has any; the arguments were checked.

    Args:
        work: the items.
        query: `[num_tokens, num_heads, head_dim]`.
        k_pool, v_pool, block_table, scale, sliding_window, softcap: as in decode_attention. The keys that the rows of one item see
            must together have no gap.
        ends: int32 `[num_tokens]`, how many keys of its sequence each token may see.
        part_out, part_lse: fp32 `[num_partials, num_heads, head_dim]` and `[num_partials, num_heads]`; changed in place.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = k_pool.shape[1:3]
    group = num_heads // num_kv_heads
    config = decode_config(head_dim, group, query.dtype, block_size, current_arch(query))
    inner, outer = score_factors("decode_attention", scale, softcap)
    if work.narrow is None or work.narrow.capacity == 0:
        return
    num_units = work.narrow.capacity * num_kv_heads * triton.cdiv(group, config.tile_rows)
    options = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    with torch.cuda.device_of(query):
        _decode_kernel[(min(num_units, program_slots(_decode_kernel, query, config.ctas)),)](
            part_out,
            part_lse,
            query,
            k_pool,
            v_pool,
            block_table,
            ends,
            work.narrow.items,
            work.narrow.count,
            work.entry_tokens,
            work.entry_partials,
            inner,
            outer,
            _NO_WINDOW if sliding_window is None else sliding_window,
            query.stride(0),
            query.stride(1),
            block_table.stride(0),
            HAS_SOFTCAP=softcap is not None,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            TILE_R=config.tile_rows,
            TILE_KV=config.tile_kv,
            TILE_D=config.tile_d,
            SPLITS=config.splits,
            NUM_STAGES=config.num_stages,
            INTERPRET=is_interpreted(_decode_kernel),
            num_warps=config.num_warps,
            enable_fp_fusion=True,
            **options,
        )
