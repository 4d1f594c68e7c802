"""Microbenchmarks: on a CPU the torch backend and the builder of work lists, on a GPU the kernels. Each result is checked first.

The shapes are those of Qwen2.5-0.5B (14 query heads, 2 K/V heads, head_dim 64) over blocks of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.bench.forests import BEST_OF_8, FEW_SHOT, SHARED_8K, Tree, forest
from radixkv.kernels import decode, prefill, reference, store, torch_ops
from radixkv.kernels.configs import layout_for
from radixkv.kernels.items import ItemLists, decode_items
from radixkv.kernels.merge import merge_partials
from radixkv.kernels.work import Backend, Capacity, Phase, Work, build_work
from radixkv.testing import PagedBatch, assert_attention_close, kernel_device, paged_batch

DEVICE = kernel_device()
ON_GPU = DEVICE.type == "cuda"
BACKEND: Backend = "triton" if ON_GPU else "torch"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
HEADS: dict[str, Any] = {"num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "block_size": 64}


@dataclass(frozen=True)
class Kernels:
    """The functions under measurement, those that a user of this machine runs."""

    store_kv: Callable[..., None]
    rope_store_kv: Callable[..., torch.Tensor]
    copy_blocks: Callable[..., None]
    prefill_attention: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    decode_attention: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    merge_partials: Callable[..., tuple[torch.Tensor, torch.Tensor]]


KERNELS = (
    Kernels(
        store.store_kv,
        store.rope_store_kv,
        store.copy_blocks,
        prefill.prefill_attention,
        decode.decode_attention,
        merge_partials,
    )
    if ON_GPU
    else Kernels(
        torch_ops.store_kv,
        torch_ops.rope_store_kv,
        torch_ops.copy_blocks,
        torch_ops.prefill_attention,
        torch_ops.decode_attention,
        torch_ops.merge_partials,
    )
)
LAYOUT = layout_for(64, 7, DTYPE, 64, 2)


def measure(benchmark: Any, function: Callable[[], Any]) -> None:
    """Time a function, and on a GPU the work it started."""

    def timed() -> None:
        function()
        if ON_GPU:
            torch.cuda.synchronize()

    benchmark.pedantic(timed, rounds=20, iterations=1, warmup_rounds=3)


def step_work(batch: PagedBatch, query_lens: list[int], phase: Phase) -> Work:
    """Build a step's work list, which layers share and so is no part of a kernel's time."""
    seq_lens = batch.seq_lens.tolist()
    rows = [row[: -(-seq_len // 64)] for row, seq_len in zip(batch.block_table.tolist(), seq_lens, strict=True)]
    return build_work(rows, query_lens, seq_lens, phases=phase, backend=BACKEND, layout=LAYOUT, device=DEVICE)


def random_pools(num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V pools."""
    generator = torch.Generator().manual_seed(0)
    k_pool, v_pool = (torch.randn((num_blocks, 2, 64, 64), generator=generator).to(DTYPE).to(DEVICE) for _ in range(2))
    return k_pool, v_pool


@pytest.mark.parametrize(
    ("query_lens", "prefix_lens"),
    [
        pytest.param([512], [0], id="cold_512"),
        pytest.param([20] * 4, [2000] * 4, id="4x20_on_2000"),
    ],
)
def test_bench_prefill_attention(benchmark: Any, query_lens: list[int], prefix_lens: list[int]) -> None:
    batch = paged_batch(query_lens, prefix_lens, dtype=DTYPE, **HEADS)
    work = step_work(batch, query_lens, "prefill")

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return KERNELS.prefill_attention(*batch.prefill_args(), scale=batch.scale, plan=work)

    wanted = reference.prefill_attention(*batch.double().prefill_args(), scale=batch.scale)
    assert_attention_close(*run(), *wanted, DTYPE)
    measure(benchmark, run)


@pytest.mark.parametrize("seq_lens", [pytest.param([2000], id="1x2000"), pytest.param([1000] * 8, id="8x1000")])
def test_bench_decode_attention(benchmark: Any, seq_lens: list[int]) -> None:
    ones = [1] * len(seq_lens)
    batch = paged_batch(ones, [seq_len - 1 for seq_len in seq_lens], dtype=DTYPE, **HEADS)
    work = step_work(batch, ones, "decode")

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return KERNELS.decode_attention(*batch.decode_args(), scale=batch.scale, plan=work)

    wanted = reference.decode_attention(*batch.double().decode_args(), scale=batch.scale)
    assert_attention_close(*run(), *wanted, DTYPE)
    measure(benchmark, run)


@pytest.mark.parametrize("num_rows", [1, 512])
def test_bench_store_kv(benchmark: Any, num_rows: int) -> None:
    got, wanted = random_pools(16), random_pools(16)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn((num_rows, 2, 64), generator=generator).to(DTYPE).to(DEVICE)
    slots = torch.randperm(16 * 64, generator=generator)[:num_rows].to(DEVICE)
    KERNELS.store_kv(*got, rows, -rows, slots)
    reference.store_kv(*wanted, rows, -rows, slots)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    measure(benchmark, lambda: KERNELS.store_kv(*got, rows, -rows, slots))


@pytest.mark.parametrize("num_rows", [1, 512])
def test_bench_rope_store_kv(benchmark: Any, num_rows: int) -> None:
    got, wanted = random_pools(16), random_pools(16)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn((18, num_rows, 64), generator=generator).to(DTYPE).to(DEVICE).transpose(0, 1)
    query, key, value = rows.split([14, 2, 2], dim=1)
    cos, sin = torch.randn((2, num_rows, 64), generator=generator).to(DTYPE).to(DEVICE)
    slots = torch.randperm(16 * 64, generator=generator)[:num_rows].to(DEVICE)
    rotated = KERNELS.rope_store_kv(query, key, value, cos, sin, *got, slots)
    assert torch.equal(rotated, reference.rope_store_kv(query, key, value, cos, sin, *wanted, slots))
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    measure(benchmark, lambda: KERNELS.rope_store_kv(query, key, value, cos, sin, *got, slots))


def test_bench_copy_blocks(benchmark: Any) -> None:
    """One partly filled block of a model of 24 layers, as a hit that ends inside a block costs it."""
    got, wanted = [random_pools(4) for _ in range(24)], [random_pools(4) for _ in range(24)]
    src, dst = (torch.tensor([block], dtype=torch.int64, device=DEVICE) for block in (0, 3))
    count = torch.tensor([40], dtype=torch.int32, device=DEVICE)
    KERNELS.copy_blocks(got, src, dst, count)
    reference.copy_blocks(wanted, src, dst, count)
    assert all(torch.equal(one, other) for pair, same in zip(got, wanted, strict=True) for one, other in zip(pair, same, strict=True))
    measure(benchmark, lambda: KERNELS.copy_blocks(got, src, dst, count))


def test_bench_merge_partials(benchmark: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    out = torch.randn((32, 14, 64), generator=generator).to(DEVICE)
    lse = torch.randn((32, 14), generator=generator).to(DEVICE)
    wanted = reference.merge_partials(out.double(), lse.double())
    got = KERNELS.merge_partials(out, lse)
    assert_attention_close(got[0][None], got[1][None], wanted[0][None], wanted[1][None], torch.float32)
    measure(benchmark, lambda: KERNELS.merge_partials(out, lse))


PLANS = [
    pytest.param([(8192, None)] * 64, id="64x8k"),
    pytest.param([(tokens, None) for tokens in range(1000, 16001, 236)], id="ragged"),
    pytest.param(SHARED_8K, id="64x(8k+256)"),
    pytest.param(FEW_SHOT, id="few_shot"),
    pytest.param(BEST_OF_8, id="best_of_8"),
]


@pytest.mark.parametrize("trees", PLANS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_bench_decode_items(benchmark: Any, trees: list[Tree], block_size: int) -> None:
    """The items of a decode step, as the Triton kernels get them; their copy to a device is not included."""
    table, lens = forest(trees, block_size)
    layout = replace(LAYOUT, block_size=block_size)

    def run() -> ItemLists:
        return decode_items(table, lens, layout)

    assert_items_cover(run(), table, lens, block_size)
    benchmark.pedantic(run, rounds=200, iterations=5, warmup_rounds=3)


def test_bench_exact_decode_items(benchmark: Any) -> None:
    table, lens = forest([(8192, None)] * 64, 64)

    def run() -> ItemLists:
        return decode_items(table, lens, LAYOUT, exact=True)

    assert_items_cover(run(), table, lens, 64)
    benchmark.pedantic(run, rounds=200, iterations=5, warmup_rounds=3)


@pytest.mark.parametrize("trees", PLANS)
def test_bench_rebuild_work(benchmark: Any, trees: list[Tree]) -> None:
    """A work list built anew in the tensors of the one before, all that the host does for a decode step whose rows outgrew it."""
    table, lens = forest(trees, 64)
    ones, seq_lens = [1] * len(lens), lens.tolist()
    capacity = Capacity.for_decode(len(lens), 2 * int(lens.max()), LAYOUT)
    options: dict[str, Any] = {"phases": "decode", "backend": "triton", "layout": LAYOUT, "capacity": capacity, "device": "cpu"}
    work = build_work(table, ones, seq_lens, **options)
    wanted = build_work(table, ones, seq_lens, **options).storage

    def run() -> Work:
        return build_work(table, ones, seq_lens, into=work, **options)

    assert work.storage is not None and wanted is not None
    work.storage.zero_()
    run()
    assert torch.equal(work.storage, wanted)
    benchmark.pedantic(run, rounds=200, iterations=5, warmup_rounds=3)


def assert_items_cover(lists: ItemLists, table: np.ndarray, lens: np.ndarray, block_size: int) -> None:
    """Assert that each query head of a group sees each key of its sequence once, through a row of the table that agrees with its own."""
    seen = [np.zeros((LAYOUT.group, length), dtype=np.int64) for length in lens]
    rows = [
        *((item, entry, slice(None)) for item in lists.narrow.tolist() for entry in range(item[0], item[0] + item[1])),
        # Wide items count rows: row r is query head r % group of entry r // group.
        *((item, row // LAYOUT.group, row % LAYOUT.group) for item in lists.wide.tolist() for row in range(item[0], item[0] + item[1])),
    ]
    for (_, _, seq, begin, end), entry, heads in rows:
        token = lists.entry_tokens[entry]
        end = min(end, lens[token])
        seen[token][heads, begin:end] += 1
        assert np.array_equal(
            table[seq, begin // block_size : -(-end // block_size)], table[token, begin // block_size : -(-end // block_size)]
        )
    assert all((counts == 1).all() for counts in seen)
