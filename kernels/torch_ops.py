"""Paged attention and K/V storage in plain PyTorch, made for CPUs: plan -> attend -> merge.

The first layer of a step turns the work list into items (see torch_items.py) and keeps them in plan.scratch. An item gathers its blocks
into one run of keys and attends in one call; rows with more than one item merge by their LSE. The query heads of a group are a broadcast
axis or part of the query axis, so that K and V are never repeated in memory. What is gathered is computed with in fp32 (fp64 for fp64),
because torch's half precision attention on CPUs has an exponential that costs the LSE four digits; only a work list that asks for the
rounding of scaled_dot_product_attention gets it. What is gathered of a single sequence is kept for the steps to come, see torch_held.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.kernels.checks import check_attention, check_copy, check_outputs, check_partials, check_rope_store, check_store
from radixkv.kernels.torch_held import make_held, may_hold
from radixkv.kernels.torch_items import GATHER_BYTES, Item, ItemBuilder
from radixkv.kernels.torch_rows import GrowingRows
from radixkv.kernels.work import Work, work_from_tensors

# Attends without materialising scores and returns the LSE too, which torch.nn.functional.scaled_dot_product_attention keeps to itself.
# It reads keys by their strides, so a broadcast axis costs no copy; it must not be given 0 keys, nor rows whose keys are all masked.
cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def store_kv(k_pool: Tensor, v_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor, source_rows: Tensor | None = None) -> None:
    """Write rows of new keys and values into their slots; arguments as in reference.store_kv."""
    check_store("store_kv", k_pool, v_pool, key, value, slots, source_rows)
    block_size = k_pool.shape[2]
    if source_rows is not None:
        key, value = key.index_select(0, source_rows), value.index_select(0, source_rows)
    if slots.shape[0] == 1:
        # Decode of one sequence, where the overhead of indexing by tensors is most of the cost.
        slot = int(slots)
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            k_pool.narrow(0, block, 1).select(2, offset).copy_(key)
            v_pool.narrow(0, block, 1).select(2, offset).copy_(value)
        return
    if slots.shape[0] and int(slots.min()) < 0:
        live = slots >= 0
        slots, key, value = slots[live], key[live], value[live]
    index = (slots // block_size, slots % block_size)
    # [num_blocks, num_kv_heads, block_size, head_dim] -> [num_blocks, block_size, num_kv_heads, head_dim]
    k_pool.transpose(1, 2).index_put_(index, key)
    v_pool.transpose(1, 2).index_put_(index, value)


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
    """Rotate queries and keys, and write keys and values into their slots; arguments and result as in reference.rope_store_kv."""
    check_rope_store("rope_store_kv", query, key, value, cos, sin, k_pool, v_pool, slots, source_rows, out)
    store_kv(k_pool, v_pool, _rotate(key, cos, sin), value, slots, source_rows)
    rotated = _rotate(query, cos, sin)
    return rotated if out is None else out.copy_(rotated)


def copy_blocks(pools: Sequence[tuple[Tensor, Tensor]], src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
    """Copy the first num_tokens[i] slots of block src[i] to block dst[i], K and V of every layer; arguments as in reference.copy_blocks."""
    check_copy("copy_blocks", pools, src, dst, num_tokens)
    for source, target, count in zip(src.tolist(), dst.tolist(), num_tokens.tolist(), strict=True):
        for pair in pools:
            for pool in pair:
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
        query, k_pool, v_pool, block_table, cu_query_lens, seq_lens, scale, sliding_window, softcap, out, lse: as in
            reference.prefill_attention.
        plan: the step's work list, whose lengths and block ids are then used instead of the tensors; its scratch is filled.

    Returns:
        out, like query, and lse, natural log, in fp32 (fp64 for fp64). A row that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    arguments = (query, k_pool, v_pool, block_table, seq_lens, cu_query_lens, sliding_window, softcap)
    items = _items("prefill_attention", *arguments, plan)
    return _attend_items("prefill_attention", items, query, k_pool, v_pool, scale, softcap, plan, out, lse)


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
    arguments = (query, k_pool, v_pool, block_table, seq_lens, None, sliding_window, softcap)
    items = _items("decode_attention", *arguments, plan)
    return _attend_items("decode_attention", items, query, k_pool, v_pool, scale, softcap, plan, out, lse)


def grow_work(work: Work, begun: Sequence[int]) -> None:
    """Make a decode step's work that of the next step, for which its `table` and `lens` were written on: a token more of each sequence.

    Args:
        work: changed in place; its tensors are on a CPU. begun: the sequences whose token is the first one of a block.
    """
    assert work.table is not None and work.lens is not None, "only a work with a table grows"
    items, growing = work.scratch.get("torch_items", {}), work.scratch.get("torch_growing", {})
    for key in list(items):
        if key not in growing or not growing[key].grow(begun, work.table, work.lens):
            growing.pop(key, None)
            del items[key]  # built anew when it is asked for


def merge_partials(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention outputs over disjoint sets of keys; arguments and result as in reference.merge_partials."""
    check_partials("merge_partials", out, lse)
    merged_lse = torch.logsumexp(lse, dim=0)
    weights = torch.exp(lse - merged_lse.masked_fill(merged_lse == float("-inf"), 0.0))
    return torch.einsum("pr,prd->rd", weights, out), merged_lse


def _rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rows `[num_tokens, heads, head_dim]` rotated by cos and sin `[num_tokens, head_dim]`, to the bit as reference does."""
    half = rows.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None]
    rotated = rows * cos
    # The other half is neither negated nor copied: a + (-b) * s and a - b * s are the same bits.
    rotated[..., :half] -= rows[..., half:] * sin[..., :half]
    rotated[..., half:] += rows[..., :half] * sin[..., half:]
    return rotated


def _items(
    function: str,
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_query_lens: Tensor | None,
    sliding_window: int | None,
    softcap: float | None,
    plan: Work | None,
) -> list[Item]:
    """Return the step's items; the first call with arguments of these shapes checks them and builds the items."""
    key = (function, query.shape, query.dtype, k_pool.shape, k_pool.dtype, v_pool.shape, sliding_window, softcap)
    kept = {} if plan is None else plan.scratch.setdefault("torch_items", {})
    if key in kept:
        return kept[key]
    shape = check_attention(function, query, k_pool, v_pool, block_table, seq_lens, cu_query_lens, sliding_window, softcap)
    if plan is None:
        plan = work_from_tensors(block_table, cu_query_lens, seq_lens, block_size=shape.block_size, backend="torch")
    if sum(plan.query_lens) != shape.num_tokens:
        raise ValueError(f"{function}: plan must be for {shape.num_tokens} query tokens, got {sum(plan.query_lens)}")
    as_sdpa = plan.round_as_sdpa and query.dtype.itemsize < 4 and _has_flash(query, softcap)
    compute_dtype = query.dtype if as_sdpa else torch.promote_types(query.dtype, torch.float32)
    builder = ItemBuilder(
        plan,
        num_kv_heads=shape.num_kv_heads,
        block_size=shape.block_size,
        block_bytes=shape.num_kv_heads * shape.block_size * shape.head_dim * compute_dtype.itemsize,
        window=sliding_window,
        causal_calls=_has_flash(query, softcap),
        merges=not as_sdpa,
        dtype=compute_dtype,
        device=query.device,
    )
    kept[key] = builder.build()
    if plan.lens is not None and sliding_window is None:
        most_blocks = 2 * GATHER_BYTES // builder.block_bytes
        growing = plan.scratch.setdefault("torch_growing", {})
        growing[key] = GrowingRows(builder.single_rows, most_blocks)
    return kept[key]


def _attend_items(
    function: str,
    items: list[Item],
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    softcap: float | None,
    plan: Work | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend item by item; write or merge each result into the rows it belongs to."""
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    check_outputs(function, query, out, lse, compute_dtype)
    num_tokens, num_heads, head_dim = query.shape
    grouped = (num_tokens, k_pool.shape[1], num_heads // k_pool.shape[1])
    queries = query.view(*grouped, head_dim)
    if out is None and lse is None and len(items) == 1 and items[0].num_rows == num_tokens and isinstance(items[0].rows, slice):
        # One item is the whole step, so its result is the output; a tenth less for one row of 500 keys.
        item_out, item_lse = _attend(items[0], queries, k_pool, v_pool, scale, softcap, plan)
        return item_out.reshape(query.shape).to(query.dtype), item_lse.reshape(num_tokens, num_heads)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(query.shape[:2], dtype=compute_dtype, device=query.device) if lse is None else lse
    if sum(item.num_rows for item in items if not item.merge) < num_tokens:
        # Rows of empty sequences are in no item.
        out.zero_()
        lse.fill_(float("-inf"))
    outs, lses = out.view(*grouped, head_dim), lse.view(grouped)
    for item in items:
        item_out, item_lse = _attend(item, queries[item.rows], k_pool, v_pool, scale, softcap)
        if item.merge:
            before = lses[item.rows]
            merged = torch.logaddexp(before, item_lse)
            item_out = torch.lerp(outs[item.rows].to(compute_dtype), item_out, torch.exp(item_lse - merged).unsqueeze(-1))
            item_lse = merged
        outs[item.rows] = item_out.to(out.dtype)
        lses[item.rows] = item_lse
    return out, lse


def _attend(
    item: Item, query: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, softcap: float | None, plan: Work | None = None
) -> tuple[Tensor, Tensor]:
    """Return out and lse of the item's rows; query and out are `[num_rows, num_kv_heads, group, head_dim]`.

    With a plan, the item is all of the step, and what it gathers of a single whole sequence is kept for the decode steps to come.
    """
    attend = _attend_flash if _has_flash(query, softcap) else _attend_plain
    query = query.to(item.dtype)
    key, value = _gather(k_pool, item), _gather(v_pool, item)
    if plan is not None and plan.carried is not None and _is_whole(item, plan, k_pool):
        last_block = int(plan.block_ids[0][-1])
        plan.carried[k_pool.data_ptr()] = make_held(key, value, k_pool, v_pool, last_block, plan.seq_lens[0])
    key, value = (tensor.narrow(2, item.first_key, item.end_key - item.first_key) for tensor in (key, value))
    if item.num_rows == item.num_seqs:
        if item.dtype.itemsize < 4 and item.mask is None:
            return _attend_by_head(query, key, value, scale)
        # [num_seqs, num_kv_heads, group, head_dim] x [num_seqs, num_kv_heads, num_keys, head_dim]
        return attend(query, key, value, item, scale, softcap)
    # [num_kv_heads, group, num_rows, head_dim] x [num_kv_heads, group (broadcast), num_keys, head_dim]
    size = (-1, query.shape[2], -1, -1)
    key, value = key.transpose(0, 1).expand(size), value.transpose(0, 1).expand(size)
    out, lse = attend(query.permute(1, 2, 0, 3), key, value, item, scale, softcap)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _gather(pool: Tensor, item: Item) -> Tensor:
    """Return the item's blocks of keys or values `[num_seqs, num_kv_heads, num_keys, head_dim]` in the item's dtype."""
    num_blocks, num_kv_heads, block_size, head_dim = pool.shape
    tokens = pool.view(num_blocks * num_kv_heads, block_size * head_dim).index_select(0, item.gather).to(item.dtype)
    if item.dead is not None:
        tokens.view(-1, head_dim).index_fill_(0, item.dead, 0)
    return tokens.view(item.num_seqs, num_kv_heads, -1, head_dim)


def _is_whole(item: Item, plan: Work, k_pool: Tensor) -> bool:
    """Whether an item's keys are all those of the only sequence, as they lie in the pool, and not too many to keep."""
    whole = len(plan.seq_lens) == 1 and item.first_key == 0 and item.end_key == plan.seq_lens[0]
    return whole and item.dtype == k_pool.dtype and may_hold(item.end_key, k_pool)


def _attend_by_head(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend `[num_seqs, num_kv_heads, group, head_dim]`, each query head in a product of its own.

    A product of one row rounds otherwise than one of a whole group, and scaled_dot_product_attention makes one for each head.
    """
    group = query.shape[2]
    # [num_seqs * num_kv_heads, group, 1, head_dim] x [num_seqs * num_kv_heads, group (broadcast), num_keys, head_dim]
    key, value = (tensor.flatten(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for tensor in (key, value))
    out, lse = cpu_flash(query.flatten(0, 1).unsqueeze(2), key, value, 0.0, False, scale=scale)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def _attend_flash(query: Tensor, key: Tensor, value: Tensor, item: Item, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Attend `[batch, heads, num_rows, head_dim]` on a CPU; softcap is None."""
    return cpu_flash(query, key, value, 0.0, item.causal, attn_mask=item.mask, scale=scale)


def _attend_plain(query: Tensor, key: Tensor, value: Tensor, item: Item, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Attend `[batch, heads, num_rows, head_dim]` by the formula, on any device; the item is not causal."""
    # [batch, heads, num_rows, num_keys]
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if item.mask is not None:
        scores = scores + item.mask
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse


def _has_flash(query: Tensor, softcap: float | None) -> bool:
    """Whether cpu_flash can attend here."""
    return query.device.type == "cpu" and softcap is None
