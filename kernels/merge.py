"""Triton kernel that merges partials: attention outputs of one row over disjoint ranges of keys become its output over all of them.

out = sum_p exp(lse_p - lse) out_p, lse = log sum_p exp(lse_p). Partials of a row are merged in the order of their positions, so that
the result does not depend on who computed them, or when.

A kernel of its own: inside the attention kernel, done by a token's last program, it makes that kernel spill, 28 (Triton 3.9) or 35 (3.6)
instructions in place of none at head_dim 128, blocks of 16 and three programs per multiprocessor (sm_90, bfloat16).

Source: merge of attention states, FlashInfer (arXiv 2501.01005), section 3.3; FlashDecoding (Dao, Haziza, Massa, Sizov, 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.kernels.checks import check_partials, check_tensor
from radixkv.kernels.tiles import LN_2, LOWEST, cast, check_runs_here, is_interpreted, softmax_end, softmax_step
from radixkv.kernels.work import Work

# Partials that the merge kernel reads per trip.
_MERGE_TILE = 16


@triton.jit
def _merge_kernel(
    out_ptr,  # [num_tokens, num_rows, head_dim]
    lse_ptr,  # [num_tokens, num_rows]
    part_out_ptr,  # [num_partials, num_rows, head_dim]
    part_lse_ptr,  # [num_partials, num_rows]
    tokens_ptr,  # [capacity]
    ranges_ptr,  # [capacity + 1]
    count_ptr,  # [1]
    NUM_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_D: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    # A grid of fixed size serves any number of tokens: what lies past the live ones is garbage.
    merge = tl.program_id(0) // NUM_ROWS
    if merge >= tl.load(count_ptr):
        return
    row = tl.program_id(0) % NUM_ROWS
    begin = tl.load(ranges_ptr + merge)
    end = tl.load(ranges_ptr + merge + 1)
    out_row = tl.load(tokens_ptr + merge).to(tl.int64) * NUM_ROWS + row

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
    out = cast(out, out_ptr.dtype.element_ty, INTERPRET)
    tl.store(out_ptr + out_row * HEAD_DIM + offs_d[None, :], out, mask=offs_d[None, :] < HEAD_DIM)
    tl.store(lse_ptr + out_row + tl.arange(0, 1), lse)


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
    merged_lse = torch.empty((1, out.shape[1]), dtype=torch.float32, device=out.device)
    one = torch.ones(1, dtype=torch.int32, device=out.device)
    ranges = torch.arange(2, dtype=torch.int32, device=out.device) * out.shape[0]
    _launch(merged_out, merged_lse, out, lse, torch.zeros_like(one), ranges, one)
    return merged_out[0], merged_lse[0]


def launch_merge(work: Work, part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge the partials of one launch of the split kernels into the rows of the tokens that have some.

    Args:
        work: its merge_tokens, merge_ranges and merge_count say which partials go to which token.
        part_out, part_lse: fp32 `[num_partials, num_heads, head_dim]` and `[num_partials, num_heads]`.
        out, lse: `[num_tokens, num_heads, head_dim]` and fp32 `[num_tokens, num_heads]`, contiguous; changed in place, in the rows
            of merge_tokens alone.
    """
    assert work.merge_tokens is not None and work.merge_ranges is not None and work.merge_count is not None
    _launch(out, lse, part_out, part_lse, work.merge_tokens, work.merge_ranges, work.merge_count)


def _launch(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, tokens: Tensor, ranges: Tensor, count: Tensor) -> None:
    """Launch the merge kernel; shapes as it names them."""
    num_rows, head_dim = out.shape[1:]
    if tokens.shape[0] * num_rows == 0:
        return
    with torch.cuda.device_of(out):
        _merge_kernel[(tokens.shape[0] * num_rows,)](
            out,
            lse,
            part_out,
            part_lse,
            tokens,
            ranges,
            count,
            NUM_ROWS=num_rows,
            HEAD_DIM=head_dim,
            TILE_P=_MERGE_TILE,
            TILE_D=triton.next_power_of_2(head_dim),
            INTERPRET=is_interpreted(_merge_kernel),
            num_warps=4,
            enable_fp_fusion=True,
        )
