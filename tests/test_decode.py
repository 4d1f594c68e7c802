"""decode_attention and merge_partials in Triton against the float64 reference on the same rounded inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from radixkv.kernels import decode, reference, tiles
from radixkv.kernels.work import Work, build_work
from radixkv.testing import PagedBatch, assert_attention_close, kernel_device, paged_batch, untouched_pool

GROUPS = [1, 3, 5, 6, 7, 8]
HEAD_DIMS = [64, 80, 96, 128, 256]
HALF = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]
# Every group and every head_dim once.
GROUP_AND_HEAD_DIM = [(1, 64), (3, 80), (5, 96), (6, 128), (7, 256), (8, 64)]


def decode_batch(seq_lens: list[int], **options: Any) -> PagedBatch:
    """Return sequences of the given lengths, 0 included, each with one query."""
    return paged_batch([1] * len(seq_lens), [seq_len - 1 for seq_len in seq_lens], **options)


def chunked(batch: PagedBatch, chunk: int) -> Work:
    """Return a work list with small chunks, so that a short sequence has several."""
    lens = batch.seq_lens.tolist()
    return build_work(
        [[]] * len(lens), [1] * len(lens), lens, phase="decode", backend="triton", tile_q=0, chunk=chunk, device=batch.query.device
    )


def run(batch: PagedBatch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel into outputs that are NaN before."""
    out = torch.full_like(batch.query, float("nan"), memory_format=torch.contiguous_format)
    lse = torch.full(batch.query.shape[:2], float("nan"), device=batch.query.device)
    return decode.decode_attention(*batch.decode_args(), scale=batch.scale, out=out, lse=lse, **options)


def assert_matches_reference(batch: PagedBatch, plan: Work | None = None, **options: Any) -> None:
    """Compare the kernel with the float64 reference."""
    wanted = reference.decode_attention(*batch.double().decode_args(), scale=batch.scale, **options)
    assert_attention_close(*run(batch, plan=plan, **options), *wanted, batch.query.dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda head_dim: f"d{head_dim}")
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"group{group}")
def test_every_group_at_every_head_dim(group: int, head_dim: int) -> None:
    assert_matches_reference(decode_batch([34, 1, 16], num_heads=2 * group, head_dim=head_dim))


@pytest.mark.parametrize("group", [16, 17, 40], ids=lambda group: f"group{group}")
def test_groups_of_more_than_one_program(group: int) -> None:
    assert_matches_reference(decode_batch([20, 3], num_heads=group, num_kv_heads=1, dtype=torch.float16))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("group", "head_dim"), GROUP_AND_HEAD_DIM, ids=lambda value: str(value))
def test_half_precision(group: int, head_dim: int, dtype: torch.dtype) -> None:
    """Less than a tile of keys, a whole tile and a part, and exactly one tile."""
    assert_matches_reference(decode_batch([5, 80, 64], num_heads=2 * group, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="fp32"), *HALF])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes_below_and_above_a_tile(block_size: int, dtype: torch.dtype) -> None:
    assert_matches_reference(decode_batch([77, block_size], block_size=block_size, dtype=dtype))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [
        pytest.param(14, 2, 64, id="qwen2.5-0.5b"),
        pytest.param(28, 4, 128, id="qwen2.5-7b"),
        pytest.param(12, 2, 128, id="deepseek-r1-distill-qwen-1.5b"),
        pytest.param(9, 3, 64, id="smollm2-135m"),
    ],
)
def test_head_shapes_of_real_models(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    assert_matches_reference(
        decode_batch([34, 10], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="fp32"), *HALF])
def test_several_chunks_are_merged(dtype: torch.dtype) -> None:
    batch = decode_batch([200, 64, 0, 65, 3], dtype=dtype)
    plan = chunked(batch, 64)
    assert plan.decode_items is not None and plan.decode_items.shape[0] == 4 + 1 + 0 + 2 + 1
    assert_matches_reference(batch, plan)


def test_the_launchers_own_chunks() -> None:
    assert_matches_reference(decode_batch([257, 40], num_heads=2, num_kv_heads=1, dtype=torch.float16))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 70])
def test_window_at_a_page_border(window: int) -> None:
    """Keys outside the window are NaN; chunks before the window are empty partials."""
    batch = decode_batch([48, 1, 97, 16], sliding_window=window)
    assert_matches_reference(batch, chunked(batch, 32), sliding_window=window)


@pytest.mark.parametrize(
    ("softcap", "window"),
    [pytest.param(2.0, None, id="strong"), pytest.param(50.0, None, id="weak"), pytest.param(2.0, 9, id="with_window")],
)
def test_softcap(softcap: float, window: int | None) -> None:
    assert_matches_reference(decode_batch([35, 2], sliding_window=window), softcap=softcap, sliding_window=window)


@pytest.mark.parametrize("dtype", HALF)
def test_huge_key_bias_does_not_overflow(dtype: torch.dtype) -> None:
    """Qwen2 has key biases of up to 900: scores of 1e4 and above, more than fp16 can hold or tell apart."""
    batch = decode_batch([34, 3], dtype=dtype, key_bias=1e3)
    # A query along the bias: a score of 512,000 before it is scaled.
    batch.query[0, 0] = batch.key[0, 0].sign() * 8
    assert_matches_reference(batch)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_empty_sequences_leave_the_others_alone(place: int) -> None:
    """A sequence of length 0 elsewhere gave NaN that spread."""
    batch = decode_batch([23, 40])
    out, lse = run(batch)
    rows = [0, 1]
    rows.insert(place, 0)
    lens = batch.seq_lens[rows].clone()
    lens[place] = 0
    table = batch.block_table[rows].clone()
    table[place] = -1
    with_empty = replace(batch, query=batch.query[rows], block_table=table, seq_lens=lens)
    got_out, got_lse = run(with_empty)
    others = [row for row in range(3) if row != place]
    assert torch.equal(got_out[others], out) and torch.equal(got_lse[others], lse)
    assert bool((got_out[place] == 0).all()) and bool((got_lse[place] == float("-inf")).all())


def test_only_empty_sequences() -> None:
    assert_matches_reference(decode_batch([0, 0]))


def test_result_depends_neither_on_batch_mates_nor_on_physical_blocks() -> None:
    batch = decode_batch([23, 100, 5])
    out, lse = run(batch, plan=chunked(batch, 32))
    order = torch.arange(batch.k_pool.shape[0]).flip(0).to(batch.k_pool.device)
    table = torch.where(batch.block_table < 0, -1, batch.k_pool.shape[0] - 1 - batch.block_table)
    alone = replace(
        batch,
        query=batch.query[1:2],
        k_pool=batch.k_pool[order].contiguous(),
        v_pool=batch.v_pool[order].contiguous(),
        block_table=table[1:2],
        seq_lens=batch.seq_lens[1:2],
    )
    alone_out, alone_lse = run(alone, plan=chunked(alone, 32))
    assert torch.equal(alone_out, out[1:2]) and torch.equal(alone_lse, lse[1:2])


def test_lengths_are_read_on_the_device() -> None:
    """A work list made for long sequences serves shorter ones, as a replayed graph needs; their dead chunks are empty."""
    batch = decode_batch([20, 33])
    longer = replace(batch, seq_lens=torch.full_like(batch.seq_lens, 100))
    assert_matches_reference(batch, chunked(longer, 32))


def test_query_may_be_a_transposed_view() -> None:
    batch = decode_batch([23, 18])
    view = replace(batch, query=batch.query.transpose(0, 1).contiguous().transpose(0, 1))
    assert not view.query.is_contiguous()
    assert all(torch.equal(one, other) for one, other in zip(run(view), run(batch), strict=True))


def test_addresses_beyond_int32_are_met() -> None:
    """block * stride wrapped in int32 on a large pool. The pool is virtual memory: only its last blocks are ever touched."""
    small = decode_batch([70], num_heads=2, num_kv_heads=1, dtype=torch.float16)
    num_blocks, live = 2**31 // (16 * 64) + 12, small.k_pool.shape[0]
    pools = untouched_pool(num_blocks), untouched_pool(num_blocks)
    pools[0][-live:], pools[1][-live:] = small.k_pool, small.v_pool
    table = torch.where(small.block_table < 0, -1, small.block_table + num_blocks - live)
    large = replace(small, k_pool=pools[0], v_pool=pools[1], block_table=table)
    assert all(torch.equal(one, other) for one, other in zip(run(large), run(small), strict=True))


def test_a_plan_of_another_phase_or_batch_is_refused() -> None:
    batch = decode_batch([20, 3])
    plan = build_work([[], []], [1, 1], [20, 3], phase="prefill", backend="triton", tile_q=16, chunk=0, device=batch.query.device)
    with pytest.raises(ValueError, match="decode_attention: plan must hold decode items of a multiple of 32 keys, got items of 0"):
        run(batch, plan=plan)
    with pytest.raises(ValueError, match="decode_attention: plan must hold decode items of a multiple of 32 keys, got items of 16"):
        run(batch, plan=chunked(batch, 16))
    with pytest.raises(ValueError, match=r"decode_attention: plan.merge_ranges must be int32 \[3\], got int32 \[2\]"):
        run(batch, plan=chunked(decode_batch([20]), 32))


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "is_interpreted", lambda kernel: False)
    with pytest.raises(ValueError, match='decode_attention: Triton kernels must get GPU tensors, got cpu: use backend "torch"'):
        run(decode_batch([20], device="cpu"))


@pytest.mark.parametrize("num_partials", [1, 3, 20])
def test_merge_over_every_pattern_of_empty_partials(num_partials: int) -> None:
    """Two empty splits merged to NaN elsewhere. Row r has partial p empty where bit p of r is set; 20 is more than a tile."""
    generator = torch.Generator().manual_seed(3)
    num_rows = 1 << min(num_partials, 3)
    out = torch.randn((num_partials, num_rows, 80), generator=generator)
    lse = torch.randn((num_partials, num_rows), generator=generator) * 20
    empty = (torch.arange(num_rows)[None, :] >> (torch.arange(num_partials)[:, None] % 3)) & 1 == 1
    out[empty], lse[empty] = 0.0, float("-inf")
    got = decode.merge_partials(out.to(kernel_device()), lse.to(kernel_device()))
    wanted = reference.merge_partials(out.double(), lse.double())
    assert bool((wanted[1][-1] == float("-inf")).all())
    assert_attention_close(got[0][None].cpu(), got[1][None].cpu(), wanted[0][None], wanted[1][None], torch.float32)


def test_merge_of_nothing_is_empty() -> None:
    out, lse = decode.merge_partials(torch.zeros((0, 3, 64), device=kernel_device()), torch.zeros((0, 3), device=kernel_device()))
    assert bool((out == 0).all()) and bool((lse == float("-inf")).all()) and out.shape == (3, 64)
