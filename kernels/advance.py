"""The Triton kernel that moves decode rows on by one token, on the device, so that a step needs nothing from the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.kernels.checks import check_advance
from radixkv.kernels.tiles import is_interpreted

_TILE = 128


@triton.jit(do_not_specialize=["num_rows", "stride_table_row"])
def _advance_kernel(
    positions_ptr,  # [num_rows]
    seq_lens_ptr,  # [num_rows]
    slots_ptr,  # [num_rows]
    block_table_ptr,  # [num_rows, max_blocks]
    num_rows,
    stride_table_row,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = rows < num_rows
    seq_lens = tl.load(seq_lens_ptr + rows, mask=mask, other=0)
    live = seq_lens > 0
    # The new token's position is the old length.
    table_rows = rows.to(tl.int64) * stride_table_row
    blocks = tl.load(block_table_ptr + table_rows + seq_lens // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    slots = tl.where(live, blocks * BLOCK_SIZE + seq_lens % BLOCK_SIZE, -1)
    tl.store(positions_ptr + rows, seq_lens.to(tl.int64), mask=mask)
    tl.store(seq_lens_ptr + rows, tl.where(live, seq_lens + 1, 0), mask=mask)
    tl.store(slots_ptr + rows, slots, mask=mask)


def advance_rows(positions: Tensor, seq_lens: Tensor, slots: Tensor, block_table: Tensor, block_size: int) -> None:
    """Append one token to every row that has any: its position, its slot and the row's new length.

    Args:
        positions: int64 `[num_rows]`; becomes the position of the new token, 0 in an empty row.
        seq_lens: int32 `[num_rows]`, tokens before the step; one more after it, still 0 in an empty row.
        slots: int64 `[num_rows]`; becomes the slot of the new token, -1 in an empty row.
        block_table: int32 `[num_rows, max_blocks]`, the block of the new token included.
        block_size: tokens per block.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the tensors are on a CPU outside the interpreter.
    """
    check_advance("advance_rows", positions, seq_lens, slots, block_table)
    if positions.device.type == "cpu" and not is_interpreted(_advance_kernel):
        raise ValueError("advance_rows: Triton kernels must get GPU tensors, got cpu")
    num_rows = positions.shape[0]
    with torch.cuda.device_of(positions):
        _advance_kernel[(triton.cdiv(num_rows, _TILE),)](
            positions,
            seq_lens,
            slots,
            block_table,
            num_rows,
            block_table.stride(0),
            BLOCK_SIZE=block_size,
            TILE=_TILE,
            num_warps=4,
            enable_fp_fusion=True,
        )
