"""The torch kernels against the float64 reference, on pools where everything that must not be read is NaN."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from radixkv.kernels import reference, torch_ops
from radixkv.kernels.torch_items import MASKED_QUERIES, SHARED_TOKENS, Item
from radixkv.kernels.work import Work, work_from_tensors
from radixkv.testing import PagedBatch, assert_attention_close, paged_batch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def check_prefill(batch: PagedBatch, plan: Work | None = None, **options) -> None:
    """Compare prefill_attention of a batch with the reference."""
    result = torch_ops.prefill_attention(*batch.prefill_args(), scale=batch.scale, plan=plan, **options)
    expected = reference.prefill_attention(*batch.double().prefill_args(), scale=batch.scale, **options)
    assert_attention_close(*result, *expected, batch.query.dtype)


def check_decode(batch: PagedBatch, plan: Work | None = None, **options) -> None:
    """Compare decode_attention of a batch with the reference."""
    result = torch_ops.decode_attention(*batch.decode_args(), scale=batch.scale, plan=plan, **options)
    expected = reference.decode_attention(*batch.double().decode_args(), scale=batch.scale, **options)
    assert_attention_close(*result, *expected, batch.query.dtype)


def make_plan(batch: PagedBatch, *, decode: bool) -> Work:
    """Return the work list of a batch."""
    borders = None if decode else batch.cu_query_lens
    return work_from_tensors(batch.block_table, borders, batch.seq_lens, block_size=batch.k_pool.shape[2], backend="torch")


def planned_items(plan: Work) -> list[Item]:
    """Return the items that the only call with this plan left in it."""
    (items,) = plan.scratch["torch_items"].values()
    return items


def share(batch: PagedBatch, num_blocks: dict[int, int], source: int) -> PagedBatch:
    """Make the leading blocks of sequences, as many as given, those of the source sequence."""
    for seq, count in num_blocks.items():
        batch.block_table[seq, :count] = batch.block_table[source, :count]
    return batch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        pytest.param(2, 2, 64, 16, id="group1-d64"),
        pytest.param(9, 3, 64, 64, id="group3-d64"),
        pytest.param(10, 2, 80, 32, id="group5-d80"),
        pytest.param(6, 1, 96, 16, id="group6-d96"),
        pytest.param(14, 2, 128, 128, id="group7-d128"),
        pytest.param(8, 1, 256, 64, id="group8-d256"),
    ],
)
def test_shapes(num_heads, num_kv_heads, head_dim, block_size, dtype, device):
    sizes = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device=device)
    check_prefill(paged_batch([70, 1, 20, 3], [0, 130, 40, 128], **sizes))
    check_decode(paged_batch([1, 1, 1, 1], [0, 15, 127, 200], **sizes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 1000])
def test_window_counts_absolute_positions(window, device):
    """Keys before the window are NaN, so reading one position too many shows."""
    check_prefill(paged_batch([40, 5, 1, 16], [0, 33, 50, 16], sliding_window=window, device=device), sliding_window=window)
    check_decode(paged_batch([1] * 5, [0, 14, 15, 31, 100], sliding_window=window, device=device), sliding_window=window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 17])
def test_softcap(window, device):
    """The CPU's flash call has no softcap, so this is also the test of the plain formula."""
    check_prefill(paged_batch([40, 5, 1], [0, 33, 50], sliding_window=window, device=device), sliding_window=window, softcap=2.0)
    check_decode(paged_batch([1] * 3, [0, 14, 100], sliding_window=window, device=device), sliding_window=window, softcap=2.0)


def test_every_small_prefix_and_length():
    """The causal mask goes by absolute position: all (prefix, new) of 40 tokens are equal to one shot, at every place in a block."""
    whole = paged_batch([40], [0], num_heads=2, num_kv_heads=1, head_dim=16, device="cpu")
    expected, expected_lse = reference.prefill_attention(*whole.double().prefill_args(), scale=whole.scale)
    for prefix in range(40):
        lens = range(1, 41 - prefix)
        rows = torch.cat([torch.arange(prefix, prefix + new) for new in lens])
        borders = torch.tensor([0, *lens]).cumsum(0).int()
        seq_lens = torch.tensor([prefix + new for new in lens], dtype=torch.int32)
        table = whole.block_table.expand(len(lens), -1)
        result = torch_ops.prefill_attention(whole.query[rows], whole.k_pool, whole.v_pool, table, borders, seq_lens, scale=whole.scale)
        assert_attention_close(*result, expected[rows], expected_lse[rows], torch.float32)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 5.0), (100, None)], ids=["plain", "softcap", "window"])
def test_more_new_tokens_than_one_masked_item_takes(window, softcap):
    lens = [MASKED_QUERIES + 30, 2 * MASKED_QUERIES, MASKED_QUERIES + 1]
    batch = paged_batch(lens, [50, 0, 64], sliding_window=window, device="cpu")
    check_prefill(batch, sliding_window=window, softcap=softcap)


def test_rows_without_keys_leave_the_others_alone():
    """A sequence of length 0 gives (0, -inf) wherever it stands, and the other rows are bit-equal to the batch without it."""
    with_empty = paged_batch([1] * 5, [-1, 40, -1, 20, -1], device="cpu")
    check_decode(with_empty)
    without = paged_batch([1] * 2, [40, 20], device="cpu")
    without.query.copy_(with_empty.query[[1, 3]])
    for pool, other in ((without.k_pool, with_empty.k_pool), (without.v_pool, with_empty.v_pool)):
        pool.copy_(other)
    without.block_table.copy_(with_empty.block_table[[1, 3]])
    out, lse = torch_ops.decode_attention(*with_empty.decode_args(), scale=0.125)
    few_out, few_lse = torch_ops.decode_attention(*without.decode_args(), scale=0.125)
    assert torch.equal(out[[1, 3]], few_out) and torch.equal(lse[[1, 3]], few_lse)
    check_prefill(paged_batch([0, 3, 0, 5, 0], [0, 3, 7, 0, 30], device="cpu"))


def test_decode_rows_that_share_a_gather_and_rows_that_do_not():
    """Equal lengths need no mask, ragged ones do, a much longer one is gathered alone; all in one batch."""
    equal = paged_batch([1] * 6, [99] * 6, device="cpu")
    plan = make_plan(equal, decode=True)
    check_decode(equal, plan)
    assert [item.mask for item in planned_items(plan)] == [None]
    ragged = paged_batch([1] * 6, [99, 60, 3, 900, 64, 2], device="cpu")
    plan = make_plan(ragged, decode=True)
    check_decode(ragged, plan)
    assert sorted(item.num_seqs for item in planned_items(plan)) == [1, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shared_blocks_are_read_once(dtype, device):
    """Runs under runs: all five share 16 blocks, two of them 48 and another two 56, one of which goes on alone."""
    batch = paged_batch([1] * 5, [900, 930, 899, 911, 260], dtype=dtype, device=device)
    batch = share(share(share(batch, {1: 16, 2: 16, 3: 16, 4: 16}, 0), {2: 48}, 0), {3: 56}, 1)
    plan = make_plan(batch, decode=True)
    check_decode(batch, plan)
    shared = [item.num_rows for item in planned_items(plan) if item.num_rows > item.num_seqs]
    assert sorted(shared) == [2, 2, 5]


def test_shared_blocks_in_prefill():
    """Sequences extend one cached prefix by different lengths, and one computes that prefix in the same step."""
    num_blocks = SHARED_TOKENS // 16
    batch = share(
        paged_batch([SHARED_TOKENS + 3, 20, 1, 33], [0, 512, 520, 530], device="cpu"), {1: num_blocks, 2: num_blocks, 3: num_blocks}, 0
    )
    plan = make_plan(batch, decode=False)
    check_prefill(batch, plan)
    assert [item.num_rows for item in planned_items(plan) if isinstance(item.rows, slice) and not item.merge] == [
        20 + 1 + 33,
        SHARED_TOKENS + 3,
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_key_bias(dtype):
    """Qwen2's keys have a bias near 1e3; scores must not overflow on their way to the softmax."""
    check_decode(paged_batch([1] * 3, [5, 99, 300], dtype=dtype, key_bias=1e3, device="cpu"))
    check_prefill(paged_batch([30, 8], [0, 99], dtype=dtype, key_bias=1e3, device="cpu"))


def test_float64():
    batch = paged_batch([5, 1], [30, 40], device="cpu").double()
    out, lse = torch_ops.prefill_attention(*batch.prefill_args(), scale=0.125)
    expected, expected_lse = reference.prefill_attention(*batch.prefill_args(), scale=0.125)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prefix_lens", [[40], [40, -1, 20]], ids=["one-item", "empty-row"])
def test_given_outputs_are_written_and_returned(prefix_lens):
    batch = paged_batch([1] * len(prefix_lens), prefix_lens, device="cpu")
    out = torch.full_like(batch.query, float("nan"))
    lse = torch.full(batch.query.shape[:2], float("nan"))
    got = torch_ops.decode_attention(*batch.decode_args(), scale=0.125, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    fresh = torch_ops.decode_attention(*batch.decode_args(), scale=0.125)
    assert torch.equal(out, fresh[0]) and torch.equal(lse, fresh[1])
    assert fresh[0].is_contiguous() and fresh[1].is_contiguous()


def test_layers_of_a_step_share_what_the_first_one_planned():
    batch = paged_batch([20, 1, 4], [30, 70, 0], device="cpu")
    plan = make_plan(batch, decode=False)
    check_prefill(batch, plan)
    items = planned_items(plan)
    check_prefill(batch, plan)
    assert planned_items(plan) is items
    check_prefill(batch, plan, sliding_window=1000)
    assert len(plan.scratch["torch_items"]) == 2


def test_a_query_that_is_a_view_of_wider_rows():
    """Heads cut out of a fused projection are strided; only the last axis is contiguous."""
    batch = paged_batch([9, 1], [30, 70], device="cpu")
    wide = torch.full((10, 8, 64), float("nan"))
    wide[:, :4] = batch.query
    args = (wide[:, :4], *batch.prefill_args()[1:])
    for got, expected in zip(
        torch_ops.prefill_attention(*args, scale=0.125), torch_ops.prefill_attention(*batch.prefill_args(), scale=0.125), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("slots", "source_rows"),
    [
        pytest.param([37], None, id="one"),
        pytest.param([-1], None, id="one-padding"),
        pytest.param([5, 16, 95, 31], None, id="scattered"),
        pytest.param([-1, 16, -1, 31], None, id="padding"),
        pytest.param([5, 16, 40, 31, 94, -1], [0, 3, 0, 1, 2, 2], id="one-row-to-several-slots"),
        pytest.param([], [], id="nothing"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_kv(slots, source_rows, dtype):
    """All slots but the given ones keep their bits, the last of the pool included."""
    generator = torch.Generator().manual_seed(1)
    pools = [torch.randn((6, 3, 16, 8), generator=generator).to(dtype) for _ in range(2)]
    expected = [pool.clone() for pool in pools]
    num_rows = 4 if source_rows is not None else len(slots)
    rows = [torch.randn((num_rows, 3, 8), generator=generator).to(dtype) for _ in range(2)]
    where = torch.tensor(slots, dtype=torch.int64)
    source = None if source_rows is None else torch.tensor(source_rows, dtype=torch.int32)
    torch_ops.store_kv(pools[0], pools[1], rows[0], rows[1], where, source)
    reference.store_kv(expected[0], expected[1], rows[0], rows[1], where, source)
    assert all(map(torch.equal, pools, expected))


def test_copy_blocks():
    generator = torch.Generator().manual_seed(1)
    pools = [(torch.randn((8, 2, 16, 4), generator=generator), torch.randn((8, 2, 16, 4), generator=generator)) for _ in range(3)]
    expected = [(k_pool.clone(), v_pool.clone()) for k_pool, v_pool in pools]
    what = torch.tensor([1, 1, 6]), torch.tensor([0, 7, 3]), torch.tensor([5, 0, 16], dtype=torch.int32)
    torch_ops.copy_blocks(pools, *what)
    reference.copy_blocks(expected, *what)
    assert all(map(torch.equal, sum(pools, ()), sum(expected, ())))


def test_merge_partials_with_every_pattern_of_empty_ones():
    generator = torch.Generator().manual_seed(1)
    patterns = torch.tensor(list(product([False, True], repeat=3))).T
    out = torch.randn((3, 8, 16), generator=generator).masked_fill_(patterns[..., None], 0.0)
    lse = (40 * torch.randn((3, 8), generator=generator)).masked_fill_(patterns, float("-inf"))
    expected, expected_lse = reference.merge_partials(out.double(), lse.double())
    merged, merged_lse = torch_ops.merge_partials(out, lse)
    assert_attention_close(merged[:, None], merged_lse[:, None], expected[:, None], expected_lse[:, None], torch.float32)


def test_errors_name_the_argument():
    batch = paged_batch([1, 1], [20, 30], device="cpu")
    with pytest.raises(ValueError, match="decode_attention: block_table must be int32"):
        torch_ops.decode_attention(batch.query, batch.k_pool, batch.v_pool, batch.block_table.long(), batch.seq_lens, scale=1.0)
    with pytest.raises(ValueError, match="decode_attention: plan must be for 2 query tokens, got 1"):
        other = paged_batch([1], [20], device="cpu")
        torch_ops.decode_attention(*batch.decode_args(), scale=1.0, plan=make_plan(other, decode=True))
    with pytest.raises(ValueError, match="prefill_attention: lse must be float32"):
        torch_ops.prefill_attention(*batch.prefill_args(), scale=1.0, lse=torch.empty(2, 4, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("new", "prefix"), [(70, 0), (9, 150), (300, 40), (1, 150)], ids=["cold", "extension", "long-extension", "one-token"]
)
def test_rounding_of_sdpa(dtype, new, prefix):
    """A work list that asks for it gets, bit for bit, what scaled_dot_product_attention makes of the contiguous sequence."""
    batch = paged_batch([new], [prefix], num_heads=8, num_kv_heads=2, dtype=dtype, device="cpu", seed=31)
    total = prefix + new
    blocks = batch.block_table[0, : -(-total // 16)].long()
    key, value = (
        pool[blocks].transpose(0, 1).flatten(1, 2)[None, :, :total].repeat_interleave(4, 1) for pool in (batch.k_pool, batch.v_pool)
    )
    query = batch.query.transpose(0, 1)[None]
    mask = torch.ones(new, total, dtype=torch.bool).tril(prefix) if prefix and new > 1 else None
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(query, key, value, attn_mask=mask, is_causal=mask is None and new > 1, scale=batch.scale)[0].transpose(0, 1)
    plan = replace(make_plan(batch, decode=new == 1), round_as_sdpa=True)
    if new == 1:
        out, lse = torch_ops.decode_attention(*batch.decode_args(), scale=batch.scale, plan=plan)
    else:
        out, lse = torch_ops.prefill_attention(*batch.prefill_args(), scale=batch.scale, plan=plan)
    assert torch.equal(out, expected)
    _, expected_lse = reference.prefill_attention(*batch.double().prefill_args(), scale=batch.scale)
    assert (lse - expected_lse).abs().max() <= 1e-4  # 6.2e-5 was measured
