"""merge_partials and the merge of a work's partials against the float64 reference, empty partials above all."""

from __future__ import annotations

import pytest
import torch

from radixkv.kernels import merge, reference
from radixkv.kernels.work import Work
from radixkv.testing import assert_attention_close, kernel_device


@pytest.mark.parametrize("num_partials", [1, 3, 20])
def test_merge_over_every_pattern_of_empty_partials(num_partials: int) -> None:
    """Two empty splits merged to NaN elsewhere. Row r has partial p empty where bit p of r is set; 20 is more than a tile."""
    generator = torch.Generator().manual_seed(3)
    num_rows = 1 << min(num_partials, 3)
    out = torch.randn((num_partials, num_rows, 80), generator=generator)
    lse = torch.randn((num_partials, num_rows), generator=generator) * 20
    empty = (torch.arange(num_rows)[None, :] >> (torch.arange(num_partials)[:, None] % 3)) & 1 == 1
    out[empty], lse[empty] = 0.0, float("-inf")
    got = merge.merge_partials(out.to(kernel_device()), lse.to(kernel_device()))
    wanted = reference.merge_partials(out.double(), lse.double())
    assert bool((wanted[1][-1] == float("-inf")).all())
    assert_attention_close(got[0][None].cpu(), got[1][None].cpu(), wanted[0][None], wanted[1][None], torch.float32)


def test_merge_of_nothing_is_empty() -> None:
    out, lse = merge.merge_partials(torch.zeros((0, 3, 64), device=kernel_device()), torch.zeros((0, 3), device=kernel_device()))
    assert bool((out == 0).all()) and bool((lse == float("-inf")).all()) and out.shape == (3, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_tokens_take_their_own_partials(dtype: torch.dtype) -> None:
    """Tokens in any order, one of them without partials; rows of other tokens, and merges past the live ones, are left alone."""
    generator = torch.Generator().manual_seed(4)
    device = kernel_device()
    tokens, borders, live = [4, 0, 2, 3, 3], [0, 2, 2, 20, 21, 10**8], 4

    def put(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    work = Work([], [], [], merge_tokens=put(tokens), merge_ranges=put(borders), merge_count=put([live]))
    part_out = torch.randn((21, 3, 80), generator=generator).to(device)
    part_lse = (torch.randn((21, 3), generator=generator) * 9).to(device)
    out = torch.full((5, 3, 80), 7.0, dtype=dtype, device=device)
    lse = torch.full((5, 3), 7.0, device=device)
    merge.launch_merge(work, part_out, part_lse, out, lse)
    assert bool((out[1] == 7).all()) and bool((lse[1] == 7).all())
    for i, token in enumerate(tokens[:live]):
        begin, end = borders[i], borders[i + 1]
        wanted = reference.merge_partials(part_out[begin:end].double(), part_lse[begin:end].double())
        assert_attention_close(out[token][None], lse[token][None], wanted[0][None], wanted[1][None], dtype)
