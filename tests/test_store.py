"""store_kv and copy_blocks move bits: Triton must leave exactly the pools that the reference leaves. rope_store_kv: transformers' bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

from radixkv.kernels import reference, store, tiles, torch_ops
from radixkv.testing import kernel_device, untouched_pool

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS = [
    pytest.param(1, 64, id="1x64"),
    pytest.param(2, 80, id="2x80"),
    pytest.param(3, 96, id="3x96"),
    pytest.param(2, 128, id="2x128"),
    pytest.param(5, 256, id="5x256"),
]


# Query heads, K/V heads, head_dim: those of Qwen2.5-0.5B, 1.5B and 7B, and every named head_dim with a group of its own.
ROPE_HEADS = [
    pytest.param(14, 2, 64, id="14/2x64"),
    pytest.param(12, 2, 128, id="12/2x128"),
    pytest.param(28, 4, 128, id="28/4x128"),
    pytest.param(5, 1, 80, id="5/1x80"),
    pytest.param(9, 3, 96, id="9/3x96"),
    pytest.param(16, 1, 256, id="16/1x256"),
]
IMPLEMENTATIONS = [pytest.param(module, id=module.__name__.split(".")[-1]) for module in (store, torch_ops, reference)]

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RopeCase:
    """One layer's rows before and after transformers' own rotation, all `[num_tokens, heads, head_dim]`, and cos and sin."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    rotated_query: torch.Tensor
    rotated_key: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The leading arguments of rope_store_kv."""
        return self.query, self.key, self.value, self.cos, self.sin


def rope_case(num_heads: int, num_kv_heads: int, head_dim: int, *, num_tokens: int = 5, dtype: torch.dtype = torch.float32) -> RopeCase:
    """Rows as Qwen2's attention has them, transposed to `[1, heads, tokens, head_dim]`, at positions far apart."""
    generator = torch.Generator().manual_seed(3)
    config = Qwen2Config(hidden_size=num_heads * head_dim, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads)
    positions = torch.randint(0, 4096, (1, num_tokens), generator=generator)
    query, key, value = (
        torch.randn((1, num_tokens, heads, head_dim), generator=generator).to(dtype).to(kernel_device()).transpose(1, 2)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    cos, sin = Qwen2RotaryEmbedding(config).to(kernel_device())(value, positions.to(kernel_device()))
    assert cos.dtype == dtype and cos.shape == (1, num_tokens, head_dim)
    rotated_query, rotated_key = apply_rotary_pos_emb(query, key, cos, sin)
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value, rotated_query, rotated_key)]
    return RopeCase(rows[0], rows[1], rows[2], cos[0], sin[0], rows[3], rows[4])


def random_pools(num_kv_heads: int, head_dim: int, *, block_size: int = 16, dtype: torch.dtype = torch.float32) -> Pair:
    """Return K and V pools of six blocks, random so that a write to a wrong place shows."""
    generator = torch.Generator().manual_seed(1)
    shape = (6, num_kv_heads, block_size, head_dim)
    k_pool, v_pool = (torch.randn(shape, generator=generator).to(dtype).to(kernel_device()) for _ in range(2))
    return k_pool, v_pool


def random_rows(num_rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Pair:
    """Return new keys and values."""
    generator = torch.Generator().manual_seed(2)
    shape = (num_rows, num_kv_heads, head_dim)
    key, value = (torch.randn(shape, generator=generator).to(dtype).to(kernel_device()) for _ in range(2))
    return key, value


def clones(pools: Pair) -> Pair:
    """Return copies of both pools."""
    return pools[0].clone(), pools[1].clone()


def on_device(values: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor where kernels run."""
    return torch.tensor(values, dtype=dtype).to(kernel_device())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits, so that NaN equals itself."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def assert_same_pools(got: Pair, wanted: Pair) -> None:
    """Assert that all pools hold the same bits."""
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), HEADS)
def test_store_writes_the_rows_and_nothing_else(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    got, rows = random_pools(num_kv_heads, head_dim, dtype=dtype), random_rows(4, num_kv_heads, head_dim, dtype)
    wanted = clones(got)
    # The first and last slot of the pool, both sides of a block's border.
    slots = on_device([95, 0, 31, 32], torch.int64)
    store.store_kv(*got, *rows, slots)
    reference.store_kv(*wanted, *rows, slots)
    assert_same_pools(got, wanted)
    assert torch.equal(got[0][5, :, 15], rows[0][0])


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_store_to_any_block_size(block_size: int) -> None:
    got, rows = random_pools(2, 64, block_size=block_size), random_rows(3, 2, 64)
    wanted = clones(got)
    slots = on_device([6 * block_size - 1, block_size, 0], torch.int64)
    store.store_kv(*got, *rows, slots)
    reference.store_kv(*wanted, *rows, slots)
    assert_same_pools(got, wanted)


def test_slot_minus_one_writes_nothing() -> None:
    """A padding slot of -1 elsewhere overwrote the last slot of the pool."""
    got, rows = random_pools(2, 64), random_rows(3, 2, 64)
    wanted = clones(got)
    slots = on_device([-1, 20, -1], torch.int64)
    store.store_kv(*got, *rows, slots)
    reference.store_kv(*wanted, *rows, slots)
    assert_same_pools(got, wanted)
    store.store_kv(*got, *rows, on_device([-1, -1, -1], torch.int64))
    assert_same_pools(got, wanted)


def test_one_row_goes_to_several_slots() -> None:
    got, rows = random_pools(2, 64), random_rows(2, 2, 64)
    wanted = clones(got)
    slots, source_rows = on_device([3, 40, -1, 77, 20], torch.int64), on_device([1, 0, 1, 1, 0], torch.int32)
    store.store_kv(*got, *rows, slots, source_rows)
    reference.store_kv(*wanted, *rows, slots, source_rows)
    assert_same_pools(got, wanted)


def test_rows_may_be_a_transposed_view() -> None:
    """Models hand over [heads, tokens, head_dim] seen as [tokens, heads, head_dim]."""
    got = random_pools(2, 64)
    wanted = clones(got)
    key, value = (rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in random_rows(3, 2, 64))
    slots = on_device([3, 40, 77], torch.int64)
    assert not key.is_contiguous()
    store.store_kv(*got, key, value, slots)
    reference.store_kv(*wanted, key, value, slots)
    assert_same_pools(got, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), ROPE_HEADS)
def test_rope_store_gives_the_bits_of_transformers(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, implementation: Any
) -> None:
    case = rope_case(num_heads, num_kv_heads, head_dim, dtype=dtype)
    got = random_pools(num_kv_heads, head_dim, dtype=dtype)
    wanted = clones(got)
    slots = on_device([95, 0, -1, 31, 32], torch.int64)
    rotated = implementation.rope_store_kv(*case.arguments, *got, slots)
    reference.store_kv(*wanted, case.rotated_key, case.value, slots)
    assert rotated.dtype == dtype and rotated.is_contiguous()
    assert torch.equal(rotated, case.rotated_query)
    assert_same_pools(got, wanted)
    assert not torch.equal(case.rotated_query[1:], case.query[1:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rope_store_to_several_slots_and_past_padding(implementation: Any) -> None:
    """Fewer rows than slots; the last slot of the pool, which a padding slot of -1 would hit, holds a canary."""
    case = rope_case(4, 2, 64, num_tokens=2, dtype=torch.bfloat16)
    got = random_pools(2, 64, dtype=torch.bfloat16)
    for pool in got:
        pool[-1, :, -1] = 42.0
    wanted = clones(got)
    slots, source_rows = on_device([3, 40, -1, 77, 20], torch.int64), on_device([1, 0, 1, 1, 0], torch.int32)
    rotated = implementation.rope_store_kv(*case.arguments, *got, slots, source_rows)
    reference.store_kv(*wanted, case.rotated_key, case.value, slots, source_rows)
    assert torch.equal(rotated, case.rotated_query)
    assert_same_pools(got, wanted)
    assert bool((got[0][-1, :, -1] == 42.0).all()) and bool((got[1][-1, :, -1] == 42.0).all())


def test_rope_store_of_a_padding_row_reads_no_row() -> None:
    """The row of a slot of -1 may be anything, an address outside of the tensors included."""
    case = rope_case(4, 2, 64, num_tokens=2)
    got = random_pools(2, 64)
    wanted = clones(got)
    slots, source_rows = on_device([-1, -1], torch.int64), on_device([2**31 - 1, -(2**31)], torch.int32)
    store.rope_store_kv(*case.arguments, *got, slots, source_rows)
    assert_same_pools(got, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("spare", [0, 8, 3], ids=["dense", "aligned", "unaligned"])
def test_rope_store_reads_views_of_a_fused_projection(head_dim: int, spare: int, implementation: Any) -> None:
    """q, k and v side by side in one row; spare elements behind them shift the rows against 16-byte borders."""
    case = rope_case(6, 2, head_dim, dtype=torch.float16)
    fused = torch.full((5, 10 * head_dim + spare), float("nan"), dtype=torch.float16, device=kernel_device())
    parts = fused[:, : 10 * head_dim].unflatten(1, (10, head_dim)).split([6, 2, 2], dim=1)
    for part, rows in zip(parts, (case.query, case.key, case.value), strict=True):
        part.copy_(rows)
    got = random_pools(2, head_dim, dtype=torch.float16)
    wanted = clones(got)
    slots = on_device([95, 0, 31, 32, 7], torch.int64)
    rotated = implementation.rope_store_kv(*parts, case.cos, case.sin, *got, slots)
    reference.store_kv(*wanted, case.rotated_key, case.value, slots)
    assert torch.equal(rotated, case.rotated_query)
    assert_same_pools(got, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rope_store_writes_the_output_given(implementation: Any) -> None:
    case = rope_case(4, 2, 64)
    slots = on_device([1, 2, 3, 4, 5], torch.int64)
    out = torch.full_like(case.query, float("nan")).contiguous()
    returned = implementation.rope_store_kv(*case.arguments, *random_pools(2, 64), slots, out=out)
    assert returned is out and torch.equal(out, case.rotated_query)
    query = case.query.clone()
    arguments = (query, *case.arguments[1:])
    implementation.rope_store_kv(*arguments, *random_pools(2, 64), slots, out=query)
    assert torch.equal(query, case.rotated_query)


def test_rope_store_in_float64_is_the_definition() -> None:
    """Rounded once, the half precision results lie within two units in the last place of the larger products."""
    case = rope_case(4, 2, 64, dtype=torch.bfloat16)
    query, key, value, cos, sin = (tensor.double() for tensor in case.arguments)
    k_pool, v_pool = (pool.double() for pool in random_pools(2, 64))
    slots = on_device([0, 1, 2, 3, 4], torch.int64)
    exact = reference.rope_store_kv(query, key, value, cos, sin, k_pool, v_pool, slots)
    got = torch_ops.rope_store_kv(*case.arguments, *random_pools(2, 64, dtype=torch.bfloat16), slots)
    assert float((got.double() - exact).norm() / exact.norm()) < 4e-3


def test_rope_store_of_nothing_is_fine() -> None:
    case, pools = rope_case(4, 2, 64, num_tokens=0), random_pools(2, 64)
    wanted = clones(pools)
    assert store.rope_store_kv(*case.arguments, *pools, on_device([], torch.int64)).shape == (0, 4, 64)
    assert_same_pools(pools, wanted)


def test_nothing_to_store_or_copy_is_fine() -> None:
    pools = random_pools(2, 64)
    wanted = clones(pools)
    none = on_device([], torch.int64)
    store.store_kv(*pools, *random_rows(0, 2, 64), none)
    store.copy_blocks([pools], none, none, none.int())
    assert_same_pools(pools, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), HEADS)
def test_copy_takes_the_first_tokens_of_every_layer(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    first = random_pools(num_kv_heads, head_dim, dtype=dtype)
    got = [first, (first[0] + 1, first[1] + 1)]
    # What is copied may be anything, NaN with a payload included.
    bits(first[1])[0, 0, 0, :2] = -1
    wanted = [clones(pair) for pair in got]
    src, dst = on_device([0, 1, 0, 2], torch.int64), on_device([5, 3, 4, 2], torch.int64)
    num_tokens = on_device([16, 7, 1, 0], torch.int32)
    store.copy_blocks(got, src, dst, num_tokens)
    reference.copy_blocks(wanted, src, dst, num_tokens)
    for layer in range(2):
        assert_same_pools(got[layer], wanted[layer])


def test_copy_of_a_block_larger_than_a_tile() -> None:
    got = random_pools(1, 128, block_size=64)
    wanted = clones(got)
    src, dst, num_tokens = on_device([1], torch.int64), on_device([4], torch.int64), on_device([63], torch.int32)
    store.copy_blocks([got], src, dst, num_tokens)
    reference.copy_blocks([wanted], src, dst, num_tokens)
    assert_same_pools(got, wanted)


def test_addresses_beyond_int32_are_met() -> None:
    """block * stride wrapped in int32 on a large pool. The pool is virtual memory: only two blocks of it are ever touched."""
    num_blocks = 2**31 // (16 * 64) + 3
    pools = untouched_pool(num_blocks), untouched_pool(num_blocks)
    assert pools[0].numel() > 2**31
    rows = random_rows(1, 1, 64, torch.float16)
    store.store_kv(*pools, *rows, on_device([num_blocks * 16 - 1], torch.int64))
    assert all(torch.equal(pool[-1, :, 15], row[0]) for pool, row in zip(pools, rows, strict=True))
    src, dst = on_device([num_blocks - 1], torch.int64), on_device([num_blocks - 2], torch.int64)
    store.copy_blocks([pools], src, dst, on_device([16], torch.int32))
    assert all(torch.equal(pool[-2, :, 15], row[0]) for pool, row in zip(pools, rows, strict=True))


def test_arguments_that_do_not_fit_are_named() -> None:
    pools, rows, slots = random_pools(2, 64), random_rows(3, 2, 64), on_device([1, 2, 3], torch.int64)
    with pytest.raises(ValueError, match=r"store_kv: slots must be int64 \[3\], got int32 \[3\]"):
        store.store_kv(*pools, *rows, slots.int())
    with pytest.raises(ValueError, match=r"store_kv: key must be float32 \[3, 2, 64\], got float16 \[3, 2, 64\]"):
        store.store_kv(*pools, rows[0].half(), rows[1], slots)
    with pytest.raises(ValueError, match=r"store_kv: source_rows must be int32 \[3\], got int32 \[2\]"):
        store.store_kv(*pools, *rows, slots, slots[:2].int())
    with pytest.raises(ValueError, match="store_kv: value must be contiguous in its last axis"):
        store.store_kv(*pools, rows[0], torch.cat(rows, -1)[..., ::2], slots)
    case = rope_case(4, 2, 64, num_tokens=3)
    with pytest.raises(ValueError, match=r"rope_store_kv: cos must be float32 \[3, 64\], got float16 \[3, 64\]"):
        store.rope_store_kv(*case.arguments[:3], case.cos.half(), case.sin, *pools, slots)
    with pytest.raises(ValueError, match=r"rope_store_kv: query must be float32 \[3, \*, 64\], got float32 \[2, 4, 64\]"):
        store.rope_store_kv(case.query[:2], *case.arguments[1:], *pools, slots)
    with pytest.raises(ValueError, match="rope_store_kv: sin must be contiguous in its last axis"):
        store.rope_store_kv(*case.arguments[:4], torch.cat([case.sin, case.sin], -1)[:, ::2], *pools, slots)
    with pytest.raises(ValueError, match="copy_blocks: pools must hold at least one layer, got none"):
        store.copy_blocks([], slots, slots, slots.int())
    with pytest.raises(ValueError, match=r"copy_blocks: num_tokens must be int32 \[3\], got int64 \[3\]"):
        store.copy_blocks([pools], slots, slots, slots)


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "is_interpreted", lambda kernel: False)
    (k_pool, v_pool), (key, value) = random_pools(2, 64), random_rows(1, 2, 64)
    with pytest.raises(ValueError, match='store_kv: Triton kernels must get GPU tensors, got cpu: use backend "torch"'):
        store.store_kv(k_pool.cpu(), v_pool.cpu(), key.cpu(), value.cpu(), torch.tensor([1]))
