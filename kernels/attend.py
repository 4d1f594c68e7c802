"""Attention of one tile of rows over one range of paged keys and values: the walk that the prefill and the wide kernel share.

out_r = sum_k exp(s_rk) v_k / sum_k exp(s_rk), s_rk = scale * q_r . k_k, over the keys row_begin[r] <= k < row_end[r].
Where tiles of keys begin does not depend on the rows, they are taken in ascending order, and a tile of which a row sees nothing leaves
that row's sums alone, so a row's result does not depend on which rows share its tile.

Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1; paged keys as in vLLM (arXiv 2309.06180), section 4.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from radixkv.kernels.tiles import LOWEST, cast, dot, softmax_step, tanh


@triton.jit
def _load_keys(ptr, offs, offs_d, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr):
    """Load rows of K or V, 0 beyond head_dim; offs_d is shaped to broadcast to offs."""
    if HEAD_DIM < TILE_D:
        return tl.load(ptr + offs, mask=offs_d < HEAD_DIM, other=0.0)
    else:
        return tl.load(ptr + offs)


@triton.jit
def _attend_tile(
    query,  # [TILE_ROWS, TILE_D]
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    key_begin,
    key_end,
    row_begin,  # [TILE_ROWS]
    row_end,  # [TILE_ROWS]
    inner,
    outer,
    row_max,  # [TILE_ROWS]
    row_sum,  # [TILE_ROWS]
    acc,  # [TILE_ROWS, TILE_D]
    MASKED: tl.constexpr,
    HAS_BEGIN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KV: tl.constexpr,
    TILE_D: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attend all rows to the keys start .. start + TILE_KV; MASKED where some row does not see some of them."""
    # Keys are origin + offs: with whole tiles offs is constant, where they are clamped it is the position itself.
    origin = start
    offs = tl.arange(0, TILE_KV)
    if MASKED:
        # Keys outside key_begin .. key_end may be anything, NaN included: the nearest live key is loaded in their place.
        origin = 0
        offs += start
        if HAS_BEGIN:
            offs = tl.maximum(offs, key_begin)
        offs = tl.minimum(offs, key_end - 1)
    # Unsigned, or a division rounds towards 0 with four instructions.
    offs = offs.to(tl.uint32, bitcast=True)
    rows = offs % BLOCK_SIZE * HEAD_DIM
    offs_d = tl.arange(0, TILE_D)
    if BLOCK_SIZE >= TILE_KV:
        # The whole tile lies in one block, which holds at least one live key.
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        base = block * BLOCK_STRIDE + origin % BLOCK_SIZE * HEAD_DIM
        k_offs = rows[None, :] + offs_d[:, None]
        v_offs = rows[:, None] + offs_d[None, :]
        k_ptr += base
        v_ptr += base
    else:
        blocks = tl.load(table_ptr + origin // BLOCK_SIZE + offs // BLOCK_SIZE).to(tl.int64) * BLOCK_STRIDE
        k_offs = blocks[None, :] + (rows[None, :] + offs_d[:, None])
        v_offs = blocks[:, None] + (rows[:, None] + offs_d[None, :])

    key = _load_keys(k_ptr, k_offs, offs_d[:, None], HEAD_DIM, TILE_D)
    # [TILE_ROWS, TILE_D] x [TILE_D, TILE_KV]
    x = dot(query, key, None, INTERPRET)
    if HAS_SOFTCAP:
        x = tanh(x * inner)
    if MASKED:
        offs_key = tl.arange(0, TILE_KV)[None, :]
        seen = offs_key < (row_end - start)[:, None]
        if HAS_BEGIN:
            # A key below one end alone, as row_begin <= row_end. Xor goes into the second comparison; `and` becomes a second select, and
            # one comparison of unsigned distances becomes bits, packed and unpacked again (Triton 3.6).
            seen ^= offs_key < (row_begin - start)[:, None]
        x = tl.where(seen, x, float("-inf"))
    weights, row_max, row_sum, acc = softmax_step(x, outer, row_max, row_sum, acc)
    value = _load_keys(v_ptr, v_offs, offs_d[None, :], HEAD_DIM, TILE_D)
    # [TILE_ROWS, TILE_KV] x [TILE_KV, TILE_D]
    acc = dot(cast(weights, value.dtype, INTERPRET), value, acc, INTERPRET)
    return row_max, row_sum, acc


@triton.jit
def attend_rows(
    query,  # [TILE_ROWS, TILE_D]
    k_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    v_ptr,  # [num_blocks, num_kv_heads, block_size, head_dim]
    table_ptr,  # [max_blocks]
    row_begin,  # [TILE_ROWS]
    row_end,  # [TILE_ROWS]
    key_begin,
    full_begin,
    full_end,
    key_end,
    head,
    inner,
    outer,
    HAS_BEGIN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KV: tl.constexpr,
    TILE_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return the running maximum, sum and accumulator of rows that see the keys row_begin .. row_end, one range per row.

    key_begin .. key_end holds the ranges of all rows, and each row sees all of full_begin .. full_end. With HAS_BEGIN no range begins
    before 0, and tiles begin at multiples of TILE_KV. Without it all ranges begin at key_begin, a multiple of BLOCK_SIZE or TILE_KV, and
    so does the first tile; row_begin and full_begin are not looked at.
    """
    BLOCK_STRIDE: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    k_ptr += head * (BLOCK_SIZE * HEAD_DIM)
    v_ptr += head * (BLOCK_SIZE * HEAD_DIM)
    row_max = tl.full([TILE_ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, TILE_D], tl.float32)

    # A pass takes full tiles, then masked ones. Where ranges begin inside tiles, a pass before takes those, with no full ones, so that
    # there is one masked loop for both ends.
    first_tile = key_begin
    if HAS_BEGIN:
        first_tile = key_begin // TILE_KV * TILE_KV
        # No tile at all where no row sees a key.
        key_end = tl.where(key_begin < key_end, key_end, first_tile)
        row_end = tl.maximum(row_end, row_begin)
    full_end = first_tile + tl.maximum(full_end - first_tile, 0) // TILE_KV * TILE_KV
    full_start = first_tile
    full_stop = full_end
    masked_stop = key_end
    if HAS_BEGIN:
        full_begin = tl.minimum(tl.cdiv(full_begin, TILE_KV) * TILE_KV, full_end)
        full_stop = first_tile
        masked_stop = full_begin
    for _ in tl.range(0, 1 + HAS_BEGIN, num_stages=1):
        for start in tl.range(full_start, full_stop, TILE_KV, num_stages=NUM_STAGES):
            row_max, row_sum, acc = _attend_tile(
                query, k_ptr, v_ptr, table_ptr, start, key_begin, key_end, row_begin, row_end, inner, outer, row_max, row_sum, acc,
                False, HAS_BEGIN, HAS_SOFTCAP, BLOCK_STRIDE, HEAD_DIM, BLOCK_SIZE, TILE_KV, TILE_D, INTERPRET,
            )  # fmt: skip
        for start in tl.range(full_stop, masked_stop, TILE_KV, num_stages=1):
            row_max, row_sum, acc = _attend_tile(
                query, k_ptr, v_ptr, table_ptr, start, key_begin, key_end, row_begin, row_end, inner, outer, row_max, row_sum, acc,
                True, HAS_BEGIN, HAS_SOFTCAP, BLOCK_STRIDE, HEAD_DIM, BLOCK_SIZE, TILE_KV, TILE_D, INTERPRET,
            )  # fmt: skip
        full_start = full_begin
        full_stop = full_end
        masked_stop = key_end
    return row_max, row_sum, acc
