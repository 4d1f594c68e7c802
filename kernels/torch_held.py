"""What a single sequence keeps on a CPU from step to step: its keys and values, gathered once.

A pool is read in blocks, so that attending costs a gather; a sequence that decodes alone would gather nearly the same every step. It keeps
what it gathered, appends each new token, and gathers anew only when a block begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.kernels.checks import check_attention
from radixkv.kernels.torch_items import Item
from radixkv.kernels.work import Work

# Attends without materialising scores and returns the LSE too, which torch.nn.functional.scaled_dot_product_attention keeps to itself.
# It reads keys by their strides, so a broadcast axis costs no copy; it must not be given 0 keys, nor rows whose keys are all masked.
cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# A single sequence that decodes keeps what it gathered of a layer's K and V up to this size each; beyond it, it gathers anew every step.
HELD_BYTES = 4 << 20


@dataclass
class Held:
    """The gathered K and V of one layer of one sequence, `[num_kv_heads, group (broadcast), capacity, head_dim]`, num_keys of them written.

    The tails are views of the last block, `[num_kv_heads, block_size, head_dim]`: here, and in the pools.
    """

    key: Tensor
    value: Tensor
    num_keys: int
    tail_start: int
    key_tail: Tensor
    value_tail: Tensor
    pool_key_tail: Tensor
    pool_value_tail: Tensor


def hold(arguments: tuple, plan: Work) -> Held | None:
    """Return all K and V of the only sequence, grown by the token that the pool got last; None where that does not apply.

    The arguments are those of a decode step without window or softcap, in the order of check_attention.
    This runs once per layer and step and is all that a decode step adds to the attention itself, so it is written for few operations.
    """
    carried, num_keys = plan.carried, plan.seq_lens[0]
    k_pool = arguments[1]
    assert carried is not None
    held: Held | None = carried.get(k_pool.data_ptr())
    if held is not None and held.num_keys == num_keys - 1 and num_keys <= held.key.shape[2]:
        offset = held.num_keys - held.tail_start
        held.key_tail.select(1, offset).copy_(held.pool_key_tail.select(1, offset))
        held.value_tail.select(1, offset).copy_(held.pool_value_tail.select(1, offset))
        held.num_keys = num_keys
        return held
    query, _, v_pool = arguments[:3]
    if len(plan.seq_lens) != 1 or not has_flash(query, None):
        return None
    num_blocks, num_kv_heads, block_size, head_dim = k_pool.shape
    if num_keys * num_kv_heads * head_dim * k_pool.element_size() > HELD_BYTES:
        return None
    # A new block began. Gathering whole blocks leaves room for the tokens up to the end of the last one.
    check_attention("decode_attention", *arguments)
    heads = (plan.block_ids[0] * num_kv_heads + torch.arange(num_kv_heads)[:, None]).flatten()
    key, value = (
        pool.view(num_blocks * num_kv_heads, block_size * head_dim).index_select(0, heads).view(1, num_kv_heads, -1, head_dim)
        for pool in (k_pool, v_pool)
    )
    held = carried[k_pool.data_ptr()] = make_held(key, value, query.shape[1] // num_kv_heads, plan, k_pool, v_pool)
    return held


def make_held(key: Tensor, value: Tensor, group: int, plan: Work, k_pool: Tensor, v_pool: Tensor) -> Held:
    """Wrap the gathered blocks `[1, num_kv_heads, capacity, head_dim]` of the only sequence."""
    last, start = int(plan.block_ids[0][-1]), key.shape[2] - k_pool.shape[2]
    tails = (key[0, :, start:], value[0, :, start:], k_pool[last], v_pool[last])
    key, value = (tensor[0].unsqueeze(1).expand(-1, group, -1, -1) for tensor in (key, value))
    return Held(key, value, plan.seq_lens[0], start, *tails)


def may_hold(item: Item, plan: Work, key: Tensor, k_pool: Tensor) -> bool:
    """Whether an item's keys are all those of the only sequence, as they lie in the pool, and not too many to keep."""
    whole = len(plan.seq_lens) == 1 and item.first_key == 0 and item.end_key == plan.seq_lens[0]
    return whole and item.dtype == k_pool.dtype and key.nbytes <= HELD_BYTES


def attend_held(held: Held, query: Tensor, scale: float, round_as_sdpa: bool) -> tuple[Tensor, Tensor]:
    """Attend `[1, num_heads, head_dim]` to all held keys; see Work for round_as_sdpa.

    Each query head is a product of its own, see attend_by_head; in fp32 too, since threads share out many small pieces more evenly.
    """
    key, value = held.key.narrow(2, 0, held.num_keys), held.value.narrow(2, 0, held.num_keys)
    # [num_kv_heads, group, 1, head_dim] x [num_kv_heads, group (broadcast), num_keys, head_dim]
    heads = query.reshape(*key.shape[:2], 1, query.shape[2])
    if query.dtype.itemsize < 4 and not round_as_sdpa:
        out, lse = cpu_flash(heads.float(), key.float(), value.float(), 0.0, False, scale=scale)
        return out.view(query.shape).to(query.dtype), lse.view(1, -1)
    out, lse = cpu_flash(heads, key, value, 0.0, False, scale=scale)
    return out.view(query.shape), lse.view(1, -1)


def attend_by_head(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend `[num_seqs, num_kv_heads, group, head_dim]`, each query head in a product of its own.

    A product of one row rounds otherwise than one of a whole group, and scaled_dot_product_attention makes one for each head.
    """
    group = query.shape[2]
    # [num_seqs * num_kv_heads, group, 1, head_dim] x [num_seqs * num_kv_heads, group (broadcast), num_keys, head_dim]
    key, value = (tensor.flatten(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for tensor in (key, value))
    out, lse = cpu_flash(query.flatten(0, 1).unsqueeze(2), key, value, 0.0, False, scale=scale)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def has_flash(query: Tensor, softcap: float | None) -> bool:
    """Whether cpu_flash can attend here."""
    return query.device.type == "cpu" and softcap is None
