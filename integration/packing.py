"""A padded batch as the model is called with, packed into the rows that must be computed, and its logits put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from radixkv.integration.attention import attention_configs
from radixkv.integration.columns import Columns, appended, check_history, check_positions, holds, resumed
from radixkv.integration.graphs import can_capture
from radixkv.integration.packed_model import PackedModel
from radixkv.integration.paged_cache import GenerationCache, PagedCache
from radixkv.plan import Plan
from radixkv.sequence import TOKEN_BYTES
from radixkv.tree import Lease

# Of a packed forward these would come back packed.
_REFUSED = ("labels", "output_attentions", "output_hidden_states", "inputs_embeds")


def generation_forward(
    model: torch.nn.Module, call: Callable[..., Any], cache: GenerationCache, argument: str, lease: Lease | None, inputs: dict[str, Any]
) -> Any:
    """Run one forward of generate() on the packed tokens alone.

    Args:
        model: the patched model. call: its class's own `forward` (or `__call__`), bound.
        cache: what generate() was shown; its rows are found by the first forward and grow with each later one.
        argument: the name under which the model takes a cache.
        lease: the prefix chosen by hand, or None to search. Read by the first forward.
        inputs: the keyword arguments of the call: input_ids int64 [rows, columns], attention_mask [rows, all columns] or None,
            logits_to_keep and what else generate() sends. Changed.

    Returns:
        The model's output with logits [rows, kept columns, vocabulary] and `cache` as its cache. Logits of pad columns, and of rows that
        have finished, are never read by generate() and hold no meaning (they are finite).
    """
    input_ids, mask, keep = _take_inputs(inputs, argument)
    inputs.pop("position_ids", None)
    rows = cache.rows
    if not cache.begun:
        rows.refresh()
    in_prompt = cache.mask_width is not None and rows.num_columns + input_ids.shape[1] <= cache.mask_width
    if cache.begun and not in_prompt and _is_decode(rows, input_ids):
        active = list(range(rows.num_rows))
        if cache.finished is not None and bool(cache.finished.any()):
            active = (~cache.finished).nonzero()[:, 0].tolist()
        output = _decode(model, call, rows, argument, active, input_ids, inputs)
    else:
        columns = _prompt_columns(cache, input_ids.cpu().numpy(), mask, keep)
        if columns is None:
            output = _unread_logits(model, len(input_ids), keep, input_ids.device)
            output[argument] = cache
            return output
        is_prompt = not (cache.begun and cache.is_draft_checked)
        if lease is not None:
            is_last = cache.mask_width is None or rows.num_columns + input_ids.shape[1] >= cache.mask_width
            _require_lease(rows, columns, lease, is_last=is_last)
        output = _prompt(model, call, rows, argument, columns, lease, is_prompt, input_ids.device, inputs)
    cache.begun = True
    output[argument] = cache
    return output


def own_forward(model: torch.nn.Module, call: Callable[..., Any], rows: PagedCache, argument: str, inputs: dict[str, Any]) -> Any:
    """Run one forward of a caller's own loop; arguments and result as for `generation_forward`, but that `rows` is the cache.

    Raises:
        ValueError: an argument that a packed forward cannot serve, or that contradicts what the rows hold.
    """
    for name in _REFUSED:
        if inputs.get(name) is not None and inputs[name] is not False:
            raise ValueError(f"{name} cannot be used together with a PagedCache: leave it out, or use a DynamicCache for this call")
    if model.training:
        raise ValueError("a PagedCache cannot be used while the model is in training mode: call model.eval() first")
    rows.refresh()
    as_tuple = inputs.pop("return_dict", None) is False
    input_ids, mask, keep = _take_inputs(inputs, argument)
    positions = inputs.pop("position_ids", None)
    columns = appended(rows, input_ids.cpu().numpy(), mask, keep, None)
    if not columns.real.any():
        raise ValueError("attention_mask marks none of the new columns as tokens: there is nothing to compute")
    check_history(rows, mask)
    check_positions(rows, positions, columns)
    with torch.no_grad():
        if _is_decode(rows, input_ids):
            active = columns.real[:, 0].nonzero()[0].tolist()
            output = _decode(model, call, rows, argument, active, input_ids, inputs)
        else:
            output = _prompt(model, call, rows, argument, columns, None, True, input_ids.device, inputs)
    output[argument] = rows
    return output.to_tuple() if as_tuple else output


def _prompt_columns(cache: GenerationCache, ids: np.ndarray, mask: torch.Tensor | None, keep: int) -> Columns | None:
    """The columns of one forward of generate(); None for a chunk that a cache holds which the caller passed in."""
    rows, width = cache.rows, cache.mask_width
    if not cache.resumes or cache.begun:
        return appended(rows, ids, mask, keep, width)
    if cache.is_chunked:
        ids = ids if cache.skipped is None else np.concatenate([cache.skipped, ids], 1)
        if width is not None and ids.shape[1] < width and holds(rows, ids, mask):
            cache.skipped = ids
            return None
    return resumed(rows, ids, mask, keep, width, is_chunked=cache.is_chunked)


def _require_lease(rows: PagedCache, columns: Columns, lease: Lease, *, is_last: bool) -> None:
    """Raise ValueError if a row is not, or ends before, the prefix that was chosen for it. A chunk of a prompt may hold a part of that."""
    for row, (length, key) in enumerate(zip(rows.row_lens or [0] * len(columns.keys), columns.keys, strict=True)):
        wanted = lease.tokens[length * TOKEN_BYTES :]  # what was known before was looked at before
        if not (key.startswith(wanted) or (not is_last and wanted.startswith(key))):
            raise ValueError(f"prefix_cache: row {row} of input_ids does not begin with the {lease.length} tokens of the lease")


def _take_inputs(inputs: dict[str, Any], argument: str) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Take input_ids, attention_mask and logits_to_keep out of a call's arguments, and what a packed forward makes itself."""
    input_ids, mask, keep = inputs.pop("input_ids", None), inputs.pop("attention_mask", None), inputs.pop("logits_to_keep", 0)
    for name in ("cache_position", "inputs_embeds", argument):
        inputs.pop(name, None)
    if not isinstance(keep, int) or keep < 0:
        raise ValueError(f"logits_to_keep must be an int of at least 0 for a patched model, got {keep!r}")
    if not isinstance(input_ids, torch.Tensor):
        raise ValueError(f"input_ids must be int64 [rows, columns], got {type(input_ids).__name__}")
    if input_ids.dtype not in (torch.int32, torch.int64) or input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must be int64 [rows, columns] with at least one token, got {input_ids.dtype} {list(input_ids.shape)}")
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise ValueError(f"attention_mask must be a tensor [rows, all columns], got {type(mask).__name__}")
    if mask is not None and (mask.ndim != 2 or mask.shape[0] not in (1, input_ids.shape[0])):
        raise ValueError(f"attention_mask must be [{input_ids.shape[0]}, all columns], got {list(mask.shape)}")
    return input_ids, mask, input_ids.shape[1] if keep == 0 else min(keep, input_ids.shape[1])


def _is_decode(rows: PagedCache, input_ids: torch.Tensor) -> bool:
    """Whether a call adds one token to rows that hold all their others."""
    return rows.batch is not None and rows.is_open and input_ids.shape[1] == 1 and all(row.num_stored for row in rows.batch.sequences)


def _prompt(
    model: torch.nn.Module,
    call: Callable,
    rows: PagedCache,
    argument: str,
    columns: Columns,
    lease: Lease | None,
    is_prompt: bool,
    device: torch.device,
    inputs: dict[str, Any],
) -> Any:
    _prepare(model, rows, inputs)
    kept = columns.kept
    if not columns.real.any():  # a chunk of pads
        rows.add_columns(columns.real)
        return _unread_logits(model, len(kept), columns.keep, device)
    with rows.prompt_step(columns.keys, kept.sum(1).tolist(), lease, is_prompt=is_prompt) as (active, step):
        # The last real token of a row is its last packed row; a pad column takes some row, which is never read.
        plan = step.plan
        assert isinstance(plan, Plan), "prompts have a plan of their own"
        ends = np.zeros(len(kept), dtype=np.int64)
        ends[active] = [*plan.starts[1:], plan.num_tokens]
        back = kept[:, ::-1].cumsum(1)[:, ::-1]  # 1 at the last real column, 2 at the one before, ...
        packed = np.where(kept, ends[:, None] - back, 0)
        output = PackedModel(rows.configs, call, argument, None).run(step, plan.token_ids[None], packed.reshape(-1), inputs)
    rows.set_columns(columns.real) if columns.is_whole else rows.add_columns(columns.real)
    output.logits = output.logits.reshape(len(kept), columns.keep, -1).to(device)
    return output


def _unread_logits(model: torch.nn.Module, num_rows: int, keep: int, device: torch.device) -> Any:
    """The output of a chunk for which there is nothing to compute."""
    vocabulary = model.get_output_embeddings().weight  # type: ignore[operator]
    return CausalLMOutputWithPast(logits=torch.zeros(num_rows, keep, len(vocabulary), dtype=vocabulary.dtype, device=device))


def _decode(
    model: torch.nn.Module,
    call: Callable,
    rows: PagedCache,
    argument: str,
    active: list[int],
    input_ids: torch.Tensor,
    inputs: dict[str, Any],
) -> Any:
    _prepare(model, rows, inputs)
    num_rows = input_ids.shape[0]
    assert rows.batch is not None
    tokens = input_ids if len(active) == num_rows else input_ids[active]
    packed = PackedModel(rows.configs, call, argument, rows.graphs)
    output, logits = packed.decode(rows.prefix_cache, rows.batch, active, tokens[:, 0], inputs)
    real = np.zeros((num_rows, 1), dtype=bool)
    real[active] = True
    rows.add_columns(real)
    if len(active) < num_rows:
        computed, logits = logits, logits.new_zeros(num_rows, logits.shape[-1])
        logits[active] = computed
    output.logits = logits[:, None]
    return output


def _prepare(model: torch.nn.Module, rows: PagedCache, inputs: dict[str, Any]) -> None:
    """Find out, once for the rows, what their forwards need to know of the model."""
    if not rows.configs:
        rows.configs = attention_configs(model)
        graphs = rows.prefix_cache.graphs
        rows.graphs = graphs if graphs is not None and can_capture(model, inputs) else None
