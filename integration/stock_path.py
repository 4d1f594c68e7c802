"""The model's own path: which calls of generate() take it, as if the model were not patched, and why."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from radixkv.integration.paged_cache import PagedCache
from radixkv.integration.versions import chunks_pass_by_calls, mask_width

# Modes in which every row goes on by itself, and all that the prefix cache serves.
ROW_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
CACHED_MODES = (*ROW_MODES, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE, GenerationMode.ASSISTED_GENERATION)


def stock_reason(
    model: Any,
    config: GenerationConfig,
    mode: GenerationMode,
    given: Any,
    positions: torch.Tensor | None,
    num_columns: int | None,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why the model's own path must run, in words; None when it need not.

    Args:
        model: patched. config, mode: of the call. given: the cache that the caller passed in, or None.
        positions: the caller's position_ids, or None. num_columns: of the caller's input_ids, None without any.
        model_kwargs: what goes to the model's forward, as generate() has it by then.
    """
    mask = model_kwargs.get("attention_mask")
    implementation = config.cache_implementation
    reasons = {
        "use_cache=False": not config.use_cache,
        "a cache was given": given is not None and not isinstance(given, PagedCache),
        # Assisted decoding asks for the kind that radixkv is in any case.
        "cache_implementation is set": implementation is not None and not (config.is_assistant and implementation == "dynamic_full"),
        "inputs_embeds were given": model_kwargs.get("inputs_embeds") is not None,
        "position_ids were given that do not count tokens from 0": not _counts_tokens(positions, mask),
        "attentions or hidden states are asked for": bool(config.output_attentions or config.output_hidden_states),
        f"{mode.value.replace('_', ' ')} uses the model in a way of its own": mode not in CACHED_MODES,
        "an assistant that is a part of the model": getattr(config, "assistant_early_exit", None) is not None,
        "the model runs with fewer layers than it has": model.config.num_hidden_layers != model.radixkv.shape.num_layers,
        "prefill_chunk_size counts from the first token on: pass the whole sequence, which the cache is then looked for in": (
            config.prefill_chunk_size is not None
            and isinstance(given, PagedCache)
            and given.batch is not None
            and num_columns != mask_width(mask, config)
        ),
        "the chunks of prefill_chunk_size are hidden by hooks on the model in this release of transformers": (
            config.prefill_chunk_size is not None and chunks_pass_by_calls(model)
        ),
        "the model is in training mode": model.training,
        "the model runs under autocast": model.radixkv.runs_under_autocast(),
        "adapters are named for each row": model.radixkv.names_adapters_per_row(),
    }
    if mask is not None:
        real = mask != 0
        windowed = getattr(model.config, "sliding_window", None) is not None
        reasons |= {
            "the batch is padded on the right": not bool(real[:, -1].all()),
            "the attention mask holds more than 0 and 1": bool((real & (mask != 1)).any()),
            # A window counts columns; without the holes' columns it would reach further.
            "the attention mask has holes, and the model a sliding window": windowed and bool((real[:, :-1] & ~real[:, 1:]).any()),
        }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _counts_tokens(positions: torch.Tensor | None, mask: torch.Tensor | None) -> bool:
    """Whether positions [rows, columns] are those that tokens have by their order. An assistant's generate() is given them."""
    if positions is None:
        return True
    if mask is None:
        return bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all())
    if positions.ndim != 2 or positions.shape[1] > mask.shape[1]:
        return False
    expected = (mask != 0).cumsum(1)[:, -positions.shape[1] :] - 1
    return bool(((positions == expected) | (mask[:, -positions.shape[1] :] == 0)).all())
