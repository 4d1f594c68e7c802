"""prefill_attention in Triton against the float64 reference on the same rounded inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from radixkv.kernels import decode, extend, merge, prefill, reference, tiles
from radixkv.kernels.configs import layout_for
from radixkv.kernels.work import Work, build_work
from radixkv.testing import PagedBatch, assert_attention_close, paged_batch, untouched_pool

GROUPS = [1, 3, 5, 6, 7, 8]
HEAD_DIMS = [64, 80, 96, 128, 256]
HALF = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]
# Every group and every head_dim once.
GROUP_AND_HEAD_DIM = [(1, 64), (3, 80), (5, 96), (6, 128), (7, 256), (8, 64)]


def run(batch: PagedBatch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel into outputs that are NaN before."""
    out = torch.full_like(batch.query, float("nan"), memory_format=torch.contiguous_format)
    lse = torch.full(batch.query.shape[:2], float("nan"), device=batch.query.device)
    return prefill.prefill_attention(*batch.prefill_args(), scale=batch.scale, out=out, lse=lse, **options)


def assert_matches_reference(batch: PagedBatch, **options: Any) -> None:
    """Compare the kernel with the float64 reference."""
    wanted = reference.prefill_attention(*batch.double().prefill_args(), scale=batch.scale, **options)
    assert_attention_close(*run(batch, **options), *wanted, batch.query.dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda head_dim: f"d{head_dim}")
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"group{group}")
def test_every_group_at_every_head_dim(group: int, head_dim: int) -> None:
    """A plain cached prefix, a cold prompt across a block border, nothing new, and one token."""
    assert_matches_reference(paged_batch([3, 18, 0, 1], [20, 0, 5, 33], num_heads=2 * group, head_dim=head_dim))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("group", "head_dim"), GROUP_AND_HEAD_DIM, ids=lambda value: str(value))
def test_half_precision(group: int, head_dim: int, dtype: torch.dtype) -> None:
    """The last sequence has a tile of keys that all rows see, and a border inside its new tokens."""
    assert_matches_reference(paged_batch([3, 18, 20], [20, 0, 60], num_heads=2 * group, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="fp32"), *HALF])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes_below_and_above_a_tile(block_size: int, dtype: torch.dtype) -> None:
    assert_matches_reference(paged_batch([20, 2], [57, block_size - 1], block_size=block_size, dtype=dtype))


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
        paged_batch([4, 1], [30, 9], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17])
def test_window_at_a_page_border(window: int) -> None:
    """Stored keys outside the window are NaN; with and without a prefix, and a prompt longer than the window."""
    assert_matches_reference(paged_batch([1, 2, 40, 18], [47, 32, 0, 30], sliding_window=window), sliding_window=window)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32_tile_of_32_keys"), pytest.param(torch.float16, id="fp16_tile_of_64_keys")]
)
def test_window_of_several_tiles(dtype: torch.dtype) -> None:
    """Masked tiles at the start of the window, whole tiles inside it, masked tiles on the diagonal."""
    assert_matches_reference(paged_batch([30], [250], num_heads=2, num_kv_heads=1, sliding_window=170, dtype=dtype), sliding_window=170)


def test_largest_window() -> None:
    """Where a row's window begins, taken from where a tile does, does not wrap round: the row would see keys behind its own."""
    assert_matches_reference(paged_batch([100], [0], num_heads=1, num_kv_heads=1, dtype=torch.float16), sliding_window=2**31 - 1)


@pytest.mark.parametrize(
    ("softcap", "window"),
    [pytest.param(2.0, None, id="strong"), pytest.param(50.0, None, id="weak"), pytest.param(2.0, 9, id="with_window")],
)
def test_softcap(softcap: float, window: int | None) -> None:
    assert_matches_reference(paged_batch([5, 2], [30, 0], sliding_window=window), softcap=softcap, sliding_window=window)


@pytest.mark.parametrize("dtype", HALF)
def test_huge_key_bias_does_not_overflow(dtype: torch.dtype) -> None:
    """Qwen2 has key biases of up to 900: scores of 1e4 and above, more than fp16 can hold or tell apart."""
    batch = paged_batch([4, 3], [30, 0], dtype=dtype, key_bias=1e3)
    # A query along the bias: a score of 512,000 before it is scaled.
    batch.query[0, 0] = batch.key[0, 0].sign() * 8
    assert_matches_reference(batch)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_empty_sequences_leave_the_others_alone(place: int) -> None:
    """A sequence of length 0 elsewhere gave NaN that spread."""
    query_lens, prefix_lens = [3, 5], [20, 0]
    alone = run(paged_batch(query_lens, prefix_lens))
    query_lens.insert(place, 0)
    prefix_lens.insert(place, 0)
    assert all(torch.equal(one, other) for one, other in zip(run(paged_batch(query_lens, prefix_lens)), alone, strict=True))


def test_a_query_without_any_key_gives_zero() -> None:
    assert_matches_reference(paged_batch([1, 2], [-1, 8]))


def test_every_split_into_prefix_and_new_equals_one_shot() -> None:
    """Elsewhere chunked prefill over a prefix used the wrong causal offset. All (prefix, new) up to 40 tokens, bit for bit."""
    whole = paged_batch([40], [0], num_heads=1, num_kv_heads=1)
    out, lse = run(whole)
    pairs = [(prefix, new) for prefix in range(40) for new in range(1, 41 - prefix)]
    rows = torch.tensor([row for prefix, new in pairs for row in range(prefix, prefix + new)], device=whole.query.device)
    split = replace(
        whole,
        query=whole.query[rows],
        block_table=whole.block_table.expand(len(pairs), -1),
        cu_query_lens=torch.tensor([0, *(new for _, new in pairs)]).cumsum(0).int().to(rows.device),
        seq_lens=torch.tensor([prefix + new for prefix, new in pairs], dtype=torch.int32, device=rows.device),
    )
    split_out, split_lse = run(split)
    assert torch.equal(split_out, out[rows]) and torch.equal(split_lse, lse[rows])


def test_result_depends_neither_on_batch_mates_nor_on_physical_blocks() -> None:
    batch = paged_batch([3, 20, 5], [20, 40, 0])
    out, lse = run(batch)
    order = torch.arange(batch.k_pool.shape[0]).flip(0).to(batch.k_pool.device)
    table = torch.where(batch.block_table < 0, -1, batch.k_pool.shape[0] - 1 - batch.block_table)
    alone = replace(
        batch,
        query=batch.query[3:23],
        k_pool=batch.k_pool[order].contiguous(),
        v_pool=batch.v_pool[order].contiguous(),
        block_table=table[1:2],
        cu_query_lens=torch.tensor([0, 20], dtype=torch.int32, device=out.device),
        seq_lens=batch.seq_lens[1:2],
    )
    alone_out, alone_lse = run(alone)
    assert torch.equal(alone_out, out[3:23]) and torch.equal(alone_lse, lse[3:23])


def test_query_may_be_a_transposed_view() -> None:
    batch = paged_batch([3, 18], [20, 0])
    view = replace(batch, query=batch.query.transpose(0, 1).contiguous().transpose(0, 1))
    assert not view.query.is_contiguous()
    assert all(torch.equal(one, other) for one, other in zip(run(view), run(batch), strict=True))


def test_addresses_beyond_int32_are_met() -> None:
    """block * stride wrapped in int32 on a large pool. The pool is virtual memory: only its last blocks are ever touched."""
    small = paged_batch([3], [20], num_heads=2, num_kv_heads=1, dtype=torch.float16)
    num_blocks, live = 2**31 // (16 * 64) + 8, small.k_pool.shape[0]
    pools = untouched_pool(num_blocks), untouched_pool(num_blocks)
    pools[0][-live:], pools[1][-live:] = small.k_pool, small.v_pool
    table = torch.where(small.block_table < 0, -1, small.block_table + num_blocks - live)
    large = replace(small, k_pool=pools[0], v_pool=pools[1], block_table=table)
    assert all(torch.equal(one, other) for one, other in zip(run(large), run(small), strict=True))


def plan_of(batch: PagedBatch, **options: Any) -> Work:
    """Build the work of a batch of prompts beforehand."""
    num_heads, head_dim = batch.query.shape[1:]
    num_kv_heads, block_size = batch.k_pool.shape[1:3]
    layout = layout_for(head_dim, num_heads // num_kv_heads, batch.query.dtype, block_size, num_kv_heads)
    query_lens = batch.cu_query_lens.diff().tolist()
    table, lens = batch.block_table.cpu().numpy(), batch.seq_lens.tolist()
    options = {"phases": "prefill", "backend": "triton", "layout": layout, **options}
    return build_work(table, query_lens, lens, device=batch.query.device, **options)


def test_a_given_plan_gives_the_same() -> None:
    batch = paged_batch([3, 70, 0, 1], [20, 3, 5, 33])
    assert all(torch.equal(one, other) for one, other in zip(run(batch, plan=plan_of(batch)), run(batch), strict=True))


def test_a_plan_for_other_tiles_or_tokens_is_refused() -> None:
    batch = paged_batch([3], [20])
    fewer = plan_of(paged_batch([2], [20]))
    other_heads = plan_of(paged_batch([3], [20], num_heads=2))
    for plan in (fewer, other_heads, build_work([[0]], [3], [23], phases="prefill", backend="torch", device=batch.query.device)):
        with pytest.raises(ValueError, match="plan must hold prefill tiles of 16 tokens for 3 query tokens, got tiles of"):
            run(batch, plan=plan)


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.float32), (None, torch.bfloat16), (1500, torch.float16)])
def test_a_short_extension_of_a_long_prefix_is_split(window: int | None, dtype: torch.dtype) -> None:
    """Beside a cold prompt and an empty sequence in one batch: its rows come from the merge, the others' straight from the tiles."""
    batch = paged_batch([20, 0, 5], [0, 3, 2100], num_heads=4, num_kv_heads=1, sliding_window=window, dtype=dtype)
    plan = plan_of(batch, window=window)
    assert plan.wide is not None and plan.prefill_tiles is not None and plan.prefill_tiles.shape[0] > 0
    assert_matches_reference(batch, plan=plan, sliding_window=window)
    assert_matches_reference(batch, sliding_window=window)


def test_a_mixed_step_carries_generated_tokens_too() -> None:
    """Generated tokens take the narrow kernel, prompt tokens the tiles, in one call."""
    batch = paged_batch([1, 20, 1], [300, 10, 40])
    plan = plan_of(batch, phases=["decode", "prefill", "decode"])
    assert plan.narrow is not None
    assert_matches_reference(batch, plan=plan)
    direct = run(batch, plan=plan_of(batch, exact=True))
    mixed = run(batch, plan=plan)
    assert all(torch.equal(one[1:21], other[1:21]) for one, other in zip(mixed, direct, strict=True))


class _Launch:
    """Stands for a kernel and notes that it was launched."""

    def __init__(self, name: str, launched: list[str]):
        self.name, self.launched = name, launched

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: self.launched.append(self.name)


class _Refuse(TorchDispatchMode):
    """Fails on any torch operation, allocations and copies included."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def test_a_call_with_a_plan_neither_allocates_nor_reads_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured graph needs, once a first call has made the partials that all layers share."""
    batch = paged_batch([20, 3, 1], [0, 2100, 30], num_heads=4, num_kv_heads=1)
    plan = plan_of(batch, phases=["prefill", "prefill", "decode"])
    out, lse = run(batch, plan=plan)
    launched: list[str] = []
    for module, kernel in (
        (prefill, "_prefill_kernel"), (extend, "_extend_kernel"), (decode, "_decode_kernel"), (merge, "_merge_kernel")
    ):  # fmt: skip
        monkeypatch.setattr(module, kernel, _Launch(kernel, launched))
    with _Refuse():
        prefill.prefill_attention(*batch.prefill_args(), scale=batch.scale, plan=plan, out=out, lse=lse)
    assert launched == ["_prefill_kernel", "_extend_kernel", "_decode_kernel", "_merge_kernel"]


def test_no_new_tokens_at_all_is_fine() -> None:
    out, lse = run(paged_batch([0, 0], [5, 0]))
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_what_the_kernel_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = paged_batch([3], [20], device="cpu")
    with pytest.raises(ValueError, match="prefill_attention: scale must be above 0, got -1.0"):
        run(replace(paged_batch([3], [20]), scale=-1.0))
    monkeypatch.setattr(tiles, "is_interpreted", lambda kernel: False)
    with pytest.raises(ValueError, match='prefill_attention: Triton kernels must get GPU tensors, got cpu: use backend "torch"'):
        run(batch)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="dtype must be float32, float16 or bfloat16, got float64"):
        prefill.prefill_attention(*paged_batch([3], [20]).double().prefill_args(), scale=1.0)
