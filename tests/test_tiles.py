"""The helpers that all kernels share, each in a kernel of one line."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from radixkv.kernels import tiles
from radixkv.testing import kernel_device


@triton.jit
def _cast_kernel(out_ptr, x_ptr, TILE: tl.constexpr, INTERPRET: tl.constexpr):
    offs = tl.arange(0, TILE)
    tl.store(out_ptr + offs, tiles.cast(tl.load(x_ptr + offs), out_ptr.dtype.element_ty, INTERPRET))


@triton.jit
def _tanh_kernel(out_ptr, x_ptr, TILE: tl.constexpr):
    offs = tl.arange(0, TILE)
    tl.store(out_ptr + offs, tiles.tanh(tl.load(x_ptr + offs)))


@triton.jit
def _dot_kernel(out_ptr, a_ptr, b_ptr, TILE: tl.constexpr, INTERPRET: tl.constexpr):
    offs = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tl.store(out_ptr + offs, tiles.dot(tl.load(a_ptr + offs), tl.load(b_ptr + offs), None, INTERPRET))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_cast_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    """The interpreter truncates on the way to bf16. Ties, both signs, 0, the edge of overflow and random values."""
    ties = [0.0, -0.0, 1.00390625, 1.01171875, -1.00390625, -1.01171875, 3.3e38, 6.0e-8]
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.tensor(ties), torch.randn(256 - len(ties), generator=generator)]).to(kernel_device())
    x = x.clamp(-6e4, 6e4) if dtype == torch.float16 else x
    out = torch.empty(256, dtype=dtype, device=x.device)
    _cast_kernel[(1,)](out, x, TILE=256, INTERPRET=tiles.is_interpreted(_cast_kernel))
    assert torch.equal(out, x.to(dtype))


def test_tanh_is_right_to_rounding_and_never_overflows() -> None:
    x = torch.cat([torch.linspace(-12, 12, 248), torch.tensor([0.0, 1e-6, -1e-6, 1e4, -1e4, 1e37, -1e37, 88.0])]).to(kernel_device())
    out = torch.empty_like(x)
    _tanh_kernel[(1,)](out, x, TILE=256)
    assert float((out.double() - x.double().tanh()).abs().max()) <= 5e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_dot_is_as_exact_as_fp32(dtype: torch.dtype) -> None:
    """TF32 would be off by 1e-3."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn((32, 32), generator=generator).to(dtype).to(kernel_device()) for _ in range(2))
    out = torch.empty((32, 32), device=a.device)
    _dot_kernel[(1,)](out, a, b, TILE=32, INTERPRET=tiles.is_interpreted(_dot_kernel))
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=0, atol=2e-5)


def test_the_softcap_is_folded_into_the_factors() -> None:
    assert tiles.score_factors("f", 0.5, None) == (1.0, pytest.approx(0.5 / 0.6931471805599453))
    assert tiles.score_factors("f", 0.5, 2.0) == (0.25, pytest.approx(2.0 / 0.6931471805599453))
