"""Compile small kernels whose machine code is known beforehand and print what bench/sass.py reads from them, as JSON.

Run as `python tests/compiled_samples.py` with TRITON_INTERPRET unset: interpreted functions cannot be compiled.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl

from radixkv.bench import sass, static
from radixkv.bench.launches import Launch, record


@triton.jit
def _matmul_kernel(
    out_ptr,  # [ROWS, COLUMNS]
    left_ptr,  # [ROWS, depth]
    right_ptr,  # [depth, COLUMNS]
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    rows, columns, offs = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, TILE)
    left = tl.load(left_ptr + rows[:, None] * TILE + offs[None, :])
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, depth, TILE, num_stages=STAGES):
        right = tl.load(right_ptr + (start + offs)[:, None] * COLUMNS + columns[None, :])
        # [ROWS, TILE] x [TILE, COLUMNS]
        acc = tl.dot(left, right, acc)
    tl.store(out_ptr + rows[:, None] * COLUMNS + columns[None, :], acc)


@triton.jit
def _indirect_kernel(
    out_ptr,  # [64, 64]
    left_ptr,  # [64, 64]
    right_ptr,  # [num_blocks, 64, 64]
    table_ptr,  # [num_blocks]
    num_blocks,
    STAGES: tl.constexpr,
):
    offs = tl.arange(0, 64)
    tile = offs[:, None] * 64 + offs[None, :]
    left = tl.load(left_ptr + tile)
    acc = tl.zeros([64, 64], tl.float32)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        right = tl.load(right_ptr + tl.load(table_ptr + block) * 4096 + tile)
        # [64, 64] x [64, 64]
        acc = tl.dot(left, right, acc)
    tl.store(out_ptr + tile, acc)


@triton.jit
def _two_dots_kernel(
    out_ptr,  # [128, 128]
    left_ptr,  # [128, 128]
    right_ptr,  # [depth, 128]
    depth,
    STAGES: tl.constexpr,
):
    rows, columns, offs = tl.arange(0, 128), tl.arange(0, 128), tl.arange(0, 64)
    left = tl.load(left_ptr + rows[:, None] * 128 + columns[None, :])
    acc = tl.zeros([128, 128], tl.float32)
    for start in tl.range(0, depth, 64, num_stages=STAGES):
        right = tl.load(right_ptr + (start + offs)[:, None] * 128 + columns[None, :])
        # [128, 128] x [128, 64]
        weights = tl.exp2(tl.dot(left, tl.trans(right)))
        # [128, 64] x [64, 128]
        acc = tl.dot(weights.to(tl.bfloat16), right, acc)
    tl.store(out_ptr + rows[:, None] * 128 + columns[None, :], acc)


@triton.jit
def _sum_kernel(
    out_ptr,  # [TILE]
    values_ptr,  # [length]
    length,
    TILE: tl.constexpr,
):
    offs = tl.arange(0, TILE)
    acc = tl.zeros([TILE], tl.float32)
    for start in range(0, length, TILE):
        acc += tl.load(values_ptr + start + offs)
    tl.store(out_ptr + offs, acc)


def samples() -> dict[str, Launch]:
    """Return the launches by name."""
    bf16, fp32 = (torch.empty(1 << 20, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32))
    table = torch.empty(64, dtype=torch.int32, device="meta")

    def take(kernel: Any, *arguments: Any, num_warps: int = 4, **options: Any) -> Launch:
        return record(lambda: kernel[(1,)](*arguments, num_warps=num_warps, enable_fp_fusion=True, **options))[0]

    # 77: a length that Triton takes for any.
    return {
        "pipelined": take(_matmul_kernel, fp32, bf16, bf16, 77, 128, 64, 64, 3, num_warps=8),
        "deeper": take(_matmul_kernel, fp32, bf16, bf16, 77, 128, 64, 64, 5, num_warps=8),
        "not pipelined": take(_matmul_kernel, fp32, bf16, bf16, 77, 128, 64, 64, 1, num_warps=8),
        # wgmma takes four warps: one alone runs mma.
        "one warp": take(_matmul_kernel, fp32, bf16, bf16, 77, 64, 64, 64, 3, num_warps=1),
        "too shallow": take(_indirect_kernel, fp32, bf16, bf16, table, 77, 2),
        "deep enough": take(_indirect_kernel, fp32, bf16, bf16, table, 77, 5),
        "two dots": take(_two_dots_kernel, fp32, bf16, bf16, 77, 3, num_warps=8),
        # Accumulator and weights do not fit the registers of one warpgroup.
        "starved": take(_two_dots_kernel, fp32, bf16, bf16, 77, 3, maxnreg=192),
        "sum": take(_sum_kernel, fp32, fp32, 77, 1024),
        "spilling": take(_sum_kernel, fp32, fp32, 77, 8192, maxnreg=32),
    }


def describe(launch: Launch) -> dict[str, Any]:
    """Return the figures of a sample, and of its loops."""
    compiled = launch.compile()
    program = sass.read(compiled.asm["cubin"], compiled.metadata.num_warps, compiled.metadata.shared)
    loops = [
        {"flops": loop.flops * program.num_warps, "load_bytes": loop.load_bytes * program.num_warps, "is_async": loop.is_async}
        for loop in program.loops
    ]
    return {**static.figures(program, 128), "loops": loops}


if __name__ == "__main__":
    print(json.dumps({name: describe(launch) for name, launch in samples().items()}))
