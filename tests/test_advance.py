"""Decode rows move on by a token on the device."""

from __future__ import annotations

import re

import pytest
import torch

from radixkv.kernels import advance, reference


def rows(lens: list[int], block_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(1 << 28, 1 << 30, (len(lens), 12), generator=generator, dtype=torch.int32)
    return torch.full((len(lens),), -7), torch.tensor(lens, dtype=torch.int32), torch.full((len(lens),), -7), table


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_rows_advance_over_block_borders(block_size: int) -> None:
    lens = [0, 1, block_size - 1, block_size, block_size + 1, 11 * block_size - 2, 0]
    got, wanted = rows(lens, block_size, 1), rows(lens, block_size, 1)
    for _ in range(3):
        advance.advance_rows(*got, block_size)
        reference.advance_rows(*wanted, block_size)
        assert all(map(torch.equal, got, wanted))
    assert got[1].tolist() == [seq_len + 3 if seq_len else 0 for seq_len in lens]
    assert got[2].max() > 1 << 31 and got[2][0] == got[2][-1] == -1


def test_more_rows_than_a_program_has() -> None:
    got, wanted = rows(list(range(161)), 16, 2), rows(list(range(161)), 16, 2)
    advance.advance_rows(*got, 16)
    reference.advance_rows(*wanted, 16)
    assert all(map(torch.equal, got, wanted))


def test_what_does_not_fit_is_refused() -> None:
    positions, seq_lens, slots, table = rows([3, 4], 16, 3)
    with pytest.raises(ValueError, match=re.escape("advance_rows: seq_lens must be int32 [2], got int64 [2]")):
        advance.advance_rows(positions, seq_lens.long(), slots, table, 16)
    with pytest.raises(ValueError, match=re.escape("advance_rows: slots must be int64 [2], got int64 [1]")):
        advance.advance_rows(positions, seq_lens, slots[:1], table, 16)
