"""A padded batch as generate() sends it, packed into the rows that must be computed, and its logits put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from radixkv.integration.attention import STEP_ARGUMENT, attention_configs, packed_attention
from radixkv.integration.graphs import DecodeGraphs, can_capture
from radixkv.integration.hf_cache import GenerationCache, StepCache
from radixkv.plan import Plan
from radixkv.sequence import Batch
from radixkv.step import Step
from radixkv.token_key import token_key


def packed_forward(
    model: torch.nn.Module, call: Callable[..., Any], cache: GenerationCache, argument: str, lease: Any, inputs: dict[str, Any]
) -> Any:
    """Run one forward of generate() on the packed tokens alone.

    Args:
        model: the patched model. call: its class's own `forward` (or `__call__`), bound.
        cache: the rows; admitted by the first forward, one token longer after each later one.
        argument: the name under which the model takes a cache.
        lease: the prefix chosen by hand, or None to search. Read by the first forward.
        inputs: the keyword arguments of the call: input_ids int64 [rows, columns], attention_mask [rows, all columns] or None,
            logits_to_keep and what else generate() sends.

    Returns:
        The model's output with logits [rows, kept columns, vocabulary] and `cache` as its cache. Logits of pad columns, and of rows that
        have finished, are never read by generate() and hold no meaning (they are finite).
    """
    input_ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask", None)
    keep = inputs.pop("logits_to_keep", 0)
    for name in ("position_ids", "cache_position", "inputs_embeds", argument):
        inputs.pop(name, None)
    if not isinstance(keep, int) or keep < 0:
        raise ValueError(f"logits_to_keep must be an int of at least 0 in generate() of a patched model, got {keep!r}")
    if input_ids.dtype not in (torch.int32, torch.int64) or input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must be int64 [rows, columns] with at least one token, got {input_ids.dtype} {list(input_ids.shape)}")
    num_rows, num_columns = input_ids.shape
    keep = num_columns if keep == 0 else min(keep, num_columns)

    def run(step: Step, token_ids: torch.Tensor, kept: torch.Tensor | int) -> Any:
        return _run(cache.configs, call, step, argument, token_ids, kept, inputs)

    if cache.batch is None:
        cache.graphs = _usable_graphs(model, cache, inputs)
        cache.configs = attention_configs(model)
        output = _prompt(cache, input_ids, mask, keep, lease, run)
        output.logits = output.logits.reshape(num_rows, keep, -1)
    elif num_columns != 1:
        raise NotImplementedError("radixkv: generate() sent several new tokens at once, which is not supported yet (assisted decoding)")
    else:
        # A captured step computes with the adapters that were switched on then, which the namespace's first parts name.
        output = _decode(cache, cache.batch, input_ids, run, f"{sorted(inputs.items())} {cache.batch.namespace[:-2]}")
    cache.num_columns += num_columns
    output[argument] = cache
    return output


def _prompt(
    cache: GenerationCache, input_ids: torch.Tensor, mask: torch.Tensor | None, keep: int, lease: Any, run: Callable
) -> Any:
    ids = input_ids.cpu().numpy()
    if mask is None:
        real = np.ones(ids.shape, dtype=bool)
    elif mask.shape[1] != ids.shape[1] or mask.shape[0] not in (1, ids.shape[0]):
        raise ValueError(f"attention_mask must be {list(ids.shape)} like input_ids, got {list(mask.shape)}")
    else:
        real = np.broadcast_to(mask.cpu().numpy() != 0, ids.shape)
    num_real = real.sum(1)
    if not num_real.all():
        raise ValueError(f"input_ids: row {int(num_real.argmin())} holds no token, its attention_mask is all zeros")
    keys = [token_key(row[row_real]) for row, row_real in zip(ids, real, strict=True)]
    kept = real[:, -keep:]
    batch = cache.prefix_cache.admit(keys, kept.sum(1).tolist(), lease)
    cache.take(batch)
    with cache.prefix_cache.prompt_step(batch) as step:
        # The last real token of a row is its last packed row; a pad column takes the row's first, which is never read.
        plan = step.plan
        assert isinstance(plan, Plan), "prompts have a plan of their own"
        ends = np.array([*plan.starts[1:], plan.num_tokens])
        back = kept[:, ::-1].cumsum(1)[:, ::-1]  # 1 at the last real column, 2 at the one before, ...
        rows = np.where(kept, ends[:, None] - back, np.array(plan.starts)[:, None])
        return run(step, plan.token_ids[None], torch.from_numpy(rows.reshape(-1)).to(input_ids.device))


def _usable_graphs(model: torch.nn.Module, cache: GenerationCache, inputs: dict[str, Any]) -> DecodeGraphs | None:
    graphs = getattr(cache.prefix_cache, "graphs", None)
    return graphs if graphs is not None and can_capture(model, inputs) else None


def _decode(cache: GenerationCache, batch: Batch, input_ids: torch.Tensor, run: Callable, flags: str) -> Any:
    graphs, num_rows = cache.graphs, input_ids.shape[0]
    rows, tokens = list(range(num_rows)), input_ids
    if cache.finished is not None and bool(cache.finished.any()):
        rows = (~cache.finished).nonzero()[:, 0].tolist()
        tokens = input_ids[rows]
    capacity = None if graphs is None else graphs.rows_for(len(rows))
    with cache.prefix_cache.decode_step(batch, rows, tokens[:, 0].tolist(), capacity) as step:
        if graphs is None:
            output = run(step, tokens.view(1, -1), 0)  # 0: the logits of all rows
            logits = output.logits[0]
        else:
            logits = graphs.run(step, tokens[:, 0], lambda ids: run(step, ids, 0).logits[0], flags)
            # Copied here, where no other thread can replay the graph, which would overwrite them.
            logits = logits[: len(rows)].clone()
            output = CausalLMOutputWithPast()
    if len(rows) < num_rows:
        computed, logits = logits, logits.new_zeros(num_rows, logits.shape[-1])
        logits[rows] = computed
    output.logits = logits[:, None]
    return output


def _run(
    configs: Sequence[PretrainedConfig],
    call: Callable,
    step: Step,
    argument: str,
    token_ids: torch.Tensor,
    kept: torch.Tensor | int,
    inputs: dict[str, Any],
) -> Any:
    step.begin()
    with packed_attention(configs):
        output = call(
            input_ids=token_ids,
            position_ids=step.positions[None],
            # Every mask builder returns a 4-d mask untouched, and pool attention needs none.
            attention_mask=torch.empty(1, 1, 1, 1, device=token_ids.device),
            logits_to_keep=kept,
            **{argument: StepCache(step, step.pool.num_layers), STEP_ARGUMENT: step},
            **inputs,
        )
    if not step.is_complete:
        raise RuntimeError(
            f"radixkv: {step.num_stored_layers} layers stored their K/V and {step.num_attended_layers} attended to the pool, of "
            f"{step.pool.num_layers}: the model's layers were changed, or two have the same layer_idx; unpatch the model, or patch it again"
        )
    return output
