"""The reference itself, against torch's own attention and against sums written out; and the checks all backends share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from radixkv.kernels import reference
from radixkv.testing import assert_attention_close, attention_error, paged_batch


def gathered(batch: Any, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one sequence's keys and values, [seq_len, num_kv_heads, head_dim], token by token through its block table."""
    block_size = batch.k_pool.shape[2]
    slots = [(int(batch.block_table[seq, p // block_size]), p % block_size) for p in range(int(batch.seq_lens[seq]))]
    key, value = (torch.stack([pool[block, :, offset] for block, offset in slots]) for pool in (batch.k_pool, batch.v_pool))
    return key, value


@pytest.mark.parametrize("group", [1, 3, 7])
def test_prefill_equals_torch_attention(group: int) -> None:
    batch = paged_batch([5, 1, 9], [20, 40, 0], num_heads=2 * group, device="cpu").double()
    out, _ = reference.prefill_attention(*batch.prefill_args(), scale=batch.scale)
    borders = batch.cu_query_lens.tolist()
    for seq in range(3):
        key, value = (rows.repeat_interleave(group, 1).transpose(0, 1) for rows in gathered(batch, seq))
        query = batch.query[borders[seq] : borders[seq + 1]].transpose(0, 1)
        seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(key.shape[1] - query.shape[1])
        wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=batch.scale)
        torch.testing.assert_close(out[borders[seq] : borders[seq + 1]], wanted.transpose(0, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("window", "softcap"),
    [
        pytest.param(None, None, id="plain"),
        pytest.param(1, None, id="window_of_the_query_alone"),
        pytest.param(16, None, id="window_of_a_page"),
        pytest.param(None, 2.0, id="softcap"),
        pytest.param(5, 2.0, id="window_and_softcap"),
    ],
)
def test_prefill_equals_the_sum_written_out(window: int | None, softcap: float | None) -> None:
    batch = paged_batch([4], [30], num_heads=4, sliding_window=window, device="cpu").double()
    out, lse = reference.prefill_attention(*batch.prefill_args(), scale=batch.scale, sliding_window=window, softcap=softcap)
    key, value = gathered(batch, 0)
    for row, position in enumerate(range(30, 34)):
        for head in range(4):
            total, weighted = 0.0, torch.zeros(64, dtype=torch.float64)
            for k in range(34):
                if k <= position and (window is None or k > position - window):
                    score = float(batch.query[row, head] @ key[k, head // 2]) * batch.scale
                    score = score if softcap is None else softcap * math.tanh(score / softcap)
                    total += math.exp(score)
                    weighted += math.exp(score) * value[k, head // 2]
            assert float(lse[row, head]) == pytest.approx(math.log(total), abs=1e-12)
            torch.testing.assert_close(out[row, head], weighted / total, rtol=1e-12, atol=1e-12)


def test_decode_is_prefill_of_one_token() -> None:
    batch = paged_batch([1, 1, 1], [20, -1, 3], device="cpu").double()
    options: dict[str, Any] = {"scale": batch.scale, "sliding_window": 7, "softcap": 3.0}
    prefill = reference.prefill_attention(*batch.prefill_args(), **options)
    decode = reference.decode_attention(*batch.decode_args(), **options)
    assert all(torch.equal(one, other) for one, other in zip(prefill, decode, strict=True))


def test_a_row_without_keys_is_zero_with_lse_minus_infinity() -> None:
    batch = paged_batch([1, 1], [-1, 3], device="cpu").double()
    out, lse = reference.decode_attention(*batch.decode_args(), scale=batch.scale)
    assert torch.equal(out[0], torch.zeros_like(out[0])) and bool((lse[0] == float("-inf")).all())
    assert bool(lse[1].isfinite().all())


def test_merging_parts_gives_the_whole() -> None:
    batch = paged_batch([1], [47], num_heads=2, num_kv_heads=2, device="cpu").double()
    query = batch.query[0]
    key, value = gathered(batch, 0)
    scores = torch.einsum("hd,khd->hk", query, key) * batch.scale
    parts = [(0, 5), (5, 5), (5, 40), (40, 48)]
    outs = [torch.einsum("hk,khd->hd", scores[:, a:b].softmax(-1), value[a:b]) for a, b in parts]
    lses = [scores[:, a:b].logsumexp(-1) for a, b in parts]
    out, lse = reference.merge_partials(torch.stack(outs), torch.stack(lses))
    whole_out, whole_lse = reference.decode_attention(*batch.decode_args(), scale=batch.scale)
    torch.testing.assert_close(out, whole_out[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse[0], rtol=1e-12, atol=1e-12)


def test_half_precision_inputs_are_computed_in_fp32() -> None:
    batch = paged_batch([5, 1], [20, 60], dtype=torch.bfloat16, device="cpu")
    ref_out, ref_lse = reference.prefill_attention(*batch.double().prefill_args(), scale=batch.scale)
    out, lse = reference.prefill_attention(*batch.prefill_args(), scale=batch.scale)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert_attention_close(out, lse, ref_out, ref_lse, torch.bfloat16)


def test_given_outputs_are_filled_and_returned() -> None:
    batch = paged_batch([2], [9], device="cpu")
    out, lse = torch.full_like(batch.query, float("nan")), torch.full(batch.query.shape[:2], float("nan"))
    got = reference.prefill_attention(*batch.prefill_args(), scale=batch.scale, out=out, lse=lse)
    assert got[0] is out and got[1] is lse and not out.isnan().any() and not lse.isnan().any()


def test_tolerances_see_one_stale_key_and_one_wrong_block() -> None:
    """The comparison must notice the faults it is there for: among 100 keys, one key too few, and two blocks exchanged."""
    batch = paged_batch([1], [99], dtype=torch.bfloat16, device="cpu")
    ref_out, ref_lse = reference.decode_attention(*batch.double().decode_args(), scale=batch.scale)
    stale = reference.decode_attention(*batch.decode_args()[:4], batch.seq_lens - 1, scale=batch.scale)
    with pytest.raises(AssertionError):
        assert_attention_close(*stale, ref_out, ref_lse, torch.bfloat16)
    query, k_pool, v_pool, table, lens = batch.decode_args()
    wrong = v_pool.clone()
    wrong[int(table[0, 0])], wrong[int(table[0, 1])] = v_pool[int(table[0, 1])], v_pool[int(table[0, 0])]
    with pytest.raises(AssertionError, match="output is off"):
        got = reference.decode_attention(query, k_pool, wrong, table, lens, scale=batch.scale)
        assert_attention_close(*got, ref_out, ref_lse, torch.bfloat16)
    assert attention_error(ref_out, ref_out) == 0.0


BATCH = paged_batch([2, 1], [9, 20], device="cpu")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"query": BATCH.query[0]}, r"query must be \[\*, \*, \*\], got float32 \[4, 64\]", id="query_rank"),
        pytest.param({"k_pool": BATCH.k_pool.half()}, r"k_pool must be float32 \[\*, \*, \*, \*\], got float16", id="pool_dtype"),
        pytest.param({"v_pool": BATCH.v_pool[:2]}, r"v_pool must be float32 \[6, 2, 16, 64\], got float32 \[2, 2, 16, 64\]", id="v_shape"),
        pytest.param({"k_pool": BATCH.k_pool.transpose(1, 2)}, "k_pool must be contiguous", id="pool_layout"),
        pytest.param({"query": BATCH.query[:, :3].contiguous()}, "query heads must be a multiple of the 2 K/V heads, got 3", id="heads"),
        pytest.param({"query": BATCH.query[..., ::2]}, r"k_pool must be \[\*, \*, \*, 32\]", id="head_dim"),
        pytest.param({"block_table": BATCH.block_table.long()}, r"block_table must be int32 \[2, \*\], got int64", id="table_dtype"),
        pytest.param({"seq_lens": BATCH.seq_lens[:1]}, r"block_table must be int32 \[1, \*\], got int32 \[2, 4\]", id="num_seqs"),
        pytest.param({"seq_lens": BATCH.seq_lens.long()}, r"seq_lens must be int32 \[2\], got int64 \[2\]", id="lens_dtype"),
        pytest.param({"cu_query_lens": BATCH.cu_query_lens[:2]}, r"cu_query_lens must be int32 \[3\], got int32 \[2\]", id="borders"),
        pytest.param({"sliding_window": 0}, "sliding_window must be at least 1 or None, got 0", id="window"),
        pytest.param({"softcap": 0.0}, "softcap must be above 0 or None, got 0.0", id="softcap"),
        pytest.param({"out": BATCH.query.half()}, r"out must be float32 \[3, 4, 64\], got float16", id="out"),
        pytest.param({"lse": BATCH.query[..., 0].double().contiguous()}, r"lse must be float32 \[3, 4\], got float64", id="lse"),
        pytest.param({"seq_lens": BATCH.seq_lens.to("meta")}, "seq_lens must be on cpu, got meta", id="device"),
    ],
)
def test_attention_arguments_that_do_not_fit_are_named(changed: dict[str, Any], message: str) -> None:
    arguments = dict(zip(("query", "k_pool", "v_pool", "block_table", "cu_query_lens", "seq_lens"), BATCH.prefill_args(), strict=True))
    with pytest.raises(ValueError, match="prefill_attention: " + message):
        reference.prefill_attention(**{"scale": BATCH.scale, **arguments, **changed})


def test_partials_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"merge_partials: lse must be float32 \[3, 4\], got float32 \[3, 5\]"):
        reference.merge_partials(torch.zeros(3, 4, 8), torch.zeros(3, 5))
