"""Paged attention and K/V storage in plain PyTorch: one sequence at a time, nothing clever.

This is the definition that the Triton and the fast torch kernels are tested against; the tests call it in float64. For query
position p and key position k of one sequence, with s = scale * q_p . k_k (or softcap * tanh(s / softcap)),
out_p = sum_k exp(s) v_k / sum_k exp(s) over the keys p - sliding_window < k <= p, and lse_p = log sum_k exp(s).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.kernels.checks import check_attention, check_copy, check_outputs, check_partials, check_rope_store, check_store
from radixkv.kernels.work import Work


def store_kv(k_pool: Tensor, v_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor, source_rows: Tensor | None = None) -> None:
    """Write rows of new keys and values into their slots.

    Args:
        k_pool, v_pool: one layer, `[num_blocks, num_kv_heads, block_size, head_dim]`; changed in place.
        key, value: new rows `[num_rows, num_kv_heads, head_dim]`.
        slots: int64 `[num_slots]`, block_id * block_size + offset; -1 writes nothing. No slot twice.
        source_rows: int32 `[num_slots]`, the row that goes to each slot; None: row i goes to slots[i].

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_store("store_kv", k_pool, v_pool, key, value, slots, source_rows)
    block_size = k_pool.shape[2]
    rows = torch.arange(slots.shape[0]) if source_rows is None else source_rows
    for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
        if slot >= 0:
            k_pool[slot // block_size, :, slot % block_size] = key[row]
            v_pool[slot // block_size, :, slot % block_size] = value[row]


def rope_store_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    source_rows: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys by their positions, and write the rotated keys and the values into their slots.

    A row x becomes x * cos + rotate_half(x) * sin, where rotate_half of the halves (a, b) is (-b, a). Each product and the sum are
    rounded to the tensors' dtype, as they are where transformers computes them.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, head_dim even.
        key, value: `[num_tokens, num_kv_heads, head_dim]`, dtype of query.
        cos, sin: `[num_tokens, head_dim]`, dtype of query.
        k_pool, v_pool: one layer, `[num_blocks, num_kv_heads, block_size, head_dim]`; changed in place.
        slots, source_rows: as in store_kv.
        out: takes the rotated queries if given, like query; changed in place.

    Returns:
        the rotated queries `[num_tokens, num_heads, head_dim]`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.

    Source: RoFormer (arXiv 2104.09864), section 3.4.2, over halves as in GPT-NeoX.
    """
    check_rope_store("rope_store_kv", query, key, value, cos, sin, k_pool, v_pool, slots, source_rows, out)
    store_kv(k_pool, v_pool, _rotate(key, cos, sin), value, slots, source_rows)
    rotated = _rotate(query, cos, sin)
    return rotated if out is None else out.copy_(rotated)


def copy_blocks(pools: Sequence[tuple[Tensor, Tensor]], src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
    """Copy the first num_tokens[i] slots of block src[i] to block dst[i], K and V of every layer.

    Args:
        pools: per layer (k_pool, v_pool), all of one shape; changed in place.
        src, dst: int64 `[num_copies]` block ids; no block is in dst twice or in both.
        num_tokens: int32 `[num_copies]`, 0 to block_size.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_copy("copy_blocks", pools, src, dst, num_tokens)
    for source, target, count in zip(src.tolist(), dst.tolist(), num_tokens.tolist(), strict=True):
        for pool in (pool for pair in pools for pool in pair):
            pool[target, :, :count] = pool[source, :, :count]


def prefill_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: Work | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last query_len positions of each sequence over its paged keys and values.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, sequences one after the other. Head h reads K/V head h // (num_heads // num_kv_heads).
        k_pool, v_pool: one layer, dtype of query, `[num_blocks, num_kv_heads, block_size, head_dim]`.
        block_table: int32 `[num_seqs, max_blocks]`, block ids in token order; what lies past a sequence's end is never used.
        cu_query_lens: int32 `[num_seqs + 1]`, where each sequence's rows begin in query.
        seq_lens: int32 `[num_seqs]`, tokens of each sequence, the new ones included.
        scale: factor of q . k.
        sliding_window: a query sees only that many last positions, its own included; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: as they are.
        plan: not needed here.
        out: takes the output if given, like query; changed in place.
        lse: takes the LSE if given, `[num_tokens, num_heads]`; changed in place.

    Returns:
        out, like query, and lse, natural log, in fp32 (fp64 for fp64). A row that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    shape = check_attention("prefill_attention", query, k_pool, v_pool, block_table, seq_lens, cu_query_lens, sliding_window, softcap)
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    check_outputs("prefill_attention", query, out, lse, compute_dtype)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(query.shape[:2], dtype=compute_dtype, device=query.device) if lse is None else lse
    borders = cu_query_lens.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        begin, end = borders[seq], borders[seq + 1]
        positions = torch.arange(seq_len - (end - begin), seq_len, device=query.device)
        # Keys that no query of the sequence can see are not touched at all.
        first_key = 0 if sliding_window is None else max(0, seq_len - (end - begin) - sliding_window + 1)
        key_positions = torch.arange(first_key, seq_len, device=query.device)
        block_ids = block_table[seq].long()[key_positions // shape.block_size]
        key = k_pool[block_ids, :, key_positions % shape.block_size].to(compute_dtype)
        value = v_pool[block_ids, :, key_positions % shape.block_size].to(compute_dtype)
        key, value = key.repeat_interleave(shape.group, 1), value.repeat_interleave(shape.group, 1)
        # [query_len, num_heads, head_dim] x [num_keys, num_heads, head_dim] -> [query_len, num_heads, num_keys]
        scores = torch.einsum("qhd,khd->qhk", query[begin:end].to(compute_dtype), key) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = key_positions[None, :] <= positions[:, None]
        if sliding_window is not None:
            seen &= key_positions[None, :] > positions[:, None] - sliding_window
        scores = scores.masked_fill(~seen[:, None, :], float("-inf"))
        seq_lse = torch.logsumexp(scores, dim=-1)
        # A row without keys has only -inf; 0 in the place of its lse keeps exp(-inf - 0) = 0.
        weights = torch.exp(scores - seq_lse.masked_fill(seq_lse == float("-inf"), 0.0)[..., None])
        out[begin:end] = torch.einsum("qhk,khd->qhd", weights, value).to(out.dtype)
        lse[begin:end] = seq_lse
    return out, lse


def decode_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: Work | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the last position of each sequence over its paged keys and values.

    Args:
        query: `[num_seqs, num_heads, head_dim]`.
        k_pool, v_pool, block_table, seq_lens, scale, sliding_window, softcap, plan, out, lse: as in prefill_attention.

    Returns:
        out and lse as in prefill_attention.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_attention("decode_attention", query, k_pool, v_pool, block_table, seq_lens, None, sliding_window, softcap)
    cu_query_lens = torch.arange(seq_lens.shape[0] + 1, dtype=torch.int32, device=query.device)
    return prefill_attention(
        query,
        k_pool,
        v_pool,
        block_table,
        cu_query_lens,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        plan=plan,
        out=out,
        lse=lse,
    )


def merge_partials(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention outputs over disjoint sets of keys into the output over all of them.

    Args:
        out: `[num_partials, num_rows, head_dim]`, fp32; an empty partial is 0.
        lse: `[num_partials, num_rows]`, natural log; an empty partial is -inf.

    Returns:
        out `[num_rows, head_dim]` and lse `[num_rows]`; (0, -inf) for a row whose partials are all empty.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.

    Source: FlashInfer (arXiv 2501.01005), section 3.3, composition of attention states.
    """
    check_partials("merge_partials", out, lse)
    merged_lse = torch.logsumexp(lse, dim=0)
    weights = torch.exp(lse - merged_lse.masked_fill(merged_lse == float("-inf"), 0.0))
    return (weights[..., None] * out).sum(0), merged_lse


def _rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rows `[num_tokens, heads, head_dim]` rotated by cos and sin `[num_tokens, head_dim]`."""
    first, second = rows.chunk(2, dim=-1)
    return rows * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def advance_rows(positions: Tensor, seq_lens: Tensor, slots: Tensor, block_table: Tensor, block_size: int) -> None:
    """Append one token to every row that has any; arguments as in `radixkv.kernels.advance.advance_rows`."""
    for row, seq_len in enumerate(seq_lens.tolist()):
        positions[row] = seq_len
        slots[row] = int(block_table[row, seq_len // block_size]) * block_size + seq_len % block_size if seq_len else -1
        seq_lens[row] = seq_len + 1 if seq_len else 0
