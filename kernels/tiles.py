"""What the attention kernels share: dot products, rounding, the online softmax step, the way from a key's position to its row.

Also what their launchers share: whether kernels are interpreted, and the check that they can run where the tensors are.
Scores are handled in base 2, exp(s) = exp2(s * log2(e)), because exp2 is one instruction and exp is five.

Source: online softmax, Milakov and Gimelshein (arXiv 1805.02867), algorithm 3; FlashAttention-2 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.kernels.checks import ATTENTION_DTYPES, check_tensor, dtype_name

LOG2_E = math.log2(math.e)
# A running maximum starts here and not at -inf, so that (-inf) - (-inf) never arises.
LOWEST = tl.constexpr(-1.0e30)
LN_2 = tl.constexpr(math.log(2.0))


def is_interpreted(kernel: Any) -> bool:
    """Return whether a kernel runs in Triton's interpreter, decided when it was defined."""
    return not isinstance(kernel, triton.JITFunction)


def check_runs_here(function: str, kernel: Any, tensor: Tensor) -> None:
    """Raise unless a kernel can run on a tensor's device and dtype.

    Raises:
        ValueError: CPU tensors without the interpreter, or a dtype that the kernels do not have.
    """
    if tensor.device.type == "cpu" and not is_interpreted(kernel):
        raise ValueError(
            f'{function}: Triton kernels must get GPU tensors, got cpu: use backend "torch" there '
            "(or TRITON_INTERPRET=1, set before triton is imported, to try a kernel out)"
        )
    if tensor.dtype not in ATTENTION_DTYPES:
        raise ValueError(f"{function}: dtype must be float32, float16 or bfloat16, got {dtype_name(tensor.dtype)}")


def current_arch(tensor: Tensor) -> str:
    """Return the name, one of configs.ARCHS, under which the configurations for a tensor's device are kept."""
    if torch.version.hip:
        return "hip"
    if not tensor.is_cuda:
        return "cuda"
    # 8.0, 9.0 and 10.x have the shared memory of data centers, 8.6, 8.9 and 12.x have not.
    return "cuda" if torch.cuda.get_device_capability(tensor.device) in ((8, 0), (9, 0), (10, 0), (10, 3)) else "cuda_small"


def multiprocessors(tensor: Tensor) -> int:
    """Return how many multiprocessors a tensor's device has; 132, an H100's, where it is no GPU."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 132


def program_slots(kernel: Any, tensor: Tensor, ctas: int) -> int:
    """Return the largest grid of a persistent kernel of which a multiprocessor runs ctas programs at once.

    The interpreter runs one program after the other: few there, so that each has several units of work.
    """
    return 8 if is_interpreted(kernel) else multiprocessors(tensor) * ctas


def score_factors(function: str, scale: float, softcap: float | None) -> tuple[float, float]:
    """Return (inner, outer): the base-2 score of x = q . k is x * outer, or tanh(x * inner) * outer with a softcap.

    Raises:
        ValueError: scale is not above 0.
    """
    if not scale > 0:
        raise ValueError(f"{function}: scale must be above 0, got {scale}")
    return (1.0, scale * LOG2_E) if softcap is None else (scale / softcap, softcap * LOG2_E)


def last_axis_contiguous(function: str, argument: str, tensor: Tensor) -> None:
    """Raise unless a `[rows, heads, head_dim]` tensor can be read with two strides.

    Raises:
        ValueError: its last axis is strided.
    """
    check_tensor(function, argument, tensor, (None, None, None))
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{function}: {argument} must be contiguous in its last axis, got strides {tuple(tensor.stride())}")


@triton.jit
def dot(a, b, acc, INTERPRET: tl.constexpr):
    """Matrix product with fp32 accumulation, IEEE for fp32 operands; acc None starts at 0.

    The interpreter multiplies bf16 wrongly, so there the operands become fp32, which changes no value.
    """
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def cast(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """Round fp32 to dtype, to nearest even.

    The interpreter truncates on the way to bf16, so there the rounding is done on the bits first.
    """
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def tanh(x):
    """Hyperbolic tangent from exp2 of a number that is never positive, so that nothing overflows."""
    shrink = tl.exp2(tl.abs(x) * (-2.0 / LN_2))
    size = (1.0 - shrink) / (1.0 + shrink)
    return tl.where(x < 0, -size, size)


@triton.jit
def softmax_step(x, outer, row_max, row_sum, acc):
    """Take one tile of scores into a running softmax along the last axis.

    x * outer are the base-2 scores, -inf where masked; returns the weights, the new maximum, sum and rescaled accumulator.
    """
    new_max = tl.maximum(row_max, tl.max(x, -1) * outer)
    weights = tl.exp2(x * outer - tl.expand_dims(new_max, -1))
    shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, -1)
    acc = acc * tl.expand_dims(shrink, -1)
    return weights, new_max, row_sum, acc


@triton.jit
def softmax_end(row_max, row_sum, acc):
    """Return the output and natural-log LSE of a finished running softmax; (0, -inf) for rows that saw no key."""
    seen = row_sum > 0
    row_sum = tl.where(seen, row_sum, 1.0)
    lse = tl.where(seen, (row_max + tl.log2(row_sum)) * LN_2, float("-inf"))
    return acc * tl.expand_dims(1.0 / row_sum, -1), lse


@triton.jit
def load_rows(ptr, offs, live, offs_d, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr):
    """Load rows of K or V, 0 beyond head_dim and, where MASKED, in rows that are not live.

    V needs that as K does: 0 * NaN of a dead slot would be NaN. live and offs_d are shaped to broadcast to offs.
    """
    if MASKED:
        return tl.load(ptr + offs, mask=live & (offs_d < HEAD_DIM), other=0.0)
    elif HEAD_DIM < TILE_D:
        return tl.load(ptr + offs, mask=offs_d < HEAD_DIM, other=0.0)
    else:
        return tl.load(ptr + offs)
