"""`patch_model` and `unpatch_model`: one model instance becomes one whose generate() reuses K/V, and back."""

from __future__ import annotations

import copy
import functools
import logging
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from radixkv.cache import require_namespace
from radixkv.integration.families import model_shape
from radixkv.integration.fused import fuse_attention, unfuse_attention
from radixkv.integration.handle import CacheOptions, ModelCache
from radixkv.integration.hf_cache import GenerationCache, cache_argument
from radixkv.integration.packing import packed_forward
from radixkv.integration.subclass import BASE_CLASS, make_subclass
from radixkv.tree import Lease

logger = logging.getLogger("radixkv")


@dataclass
class _Call:
    """One generate() of a patched model, from the wrapper to the forwards inside it."""

    model: Any
    lease: Lease | None
    positions_given: bool
    cache: GenerationCache | None = None
    decided: bool = False


# The call of this thread; generate() may run inside generate() (an assistant, a processor that generates).
_current_call: ContextVar[_Call | None] = ContextVar("radixkv_call", default=None)


def patch_model(model: Any, options: CacheOptions) -> Any:
    """See `radixkv.patch_model`."""
    base: type = type(model)
    if hasattr(base, BASE_CLASS):
        raise ValueError("patch_model: this model is already patched; its handle is model.radixkv")
    require_namespace("patch_model", options.namespace)
    handle = ModelCache(model_shape(model), options)
    handle.follow(model)
    model.__class__ = _patched_class(base)
    model.radixkv = handle
    if handle.backend.name == "triton":
        fuse_attention(model)
    pool = handle.pool
    logger.info("patched %s: backend %s, %d blocks of %d tokens", base.__name__, handle.backend.name, pool.num_blocks, pool.block_size)
    return model


def unpatch_model(model: Any) -> Any:
    """See `radixkv.unpatch_model`."""
    base = getattr(type(model), BASE_CLASS, None)
    if base is None:
        raise ValueError("unpatch_model: this model is not patched")
    unfuse_attention(model)
    model.__class__ = base
    del model.radixkv
    return model


@functools.cache
def _patched_class(base: type[PreTrainedModel]) -> type:
    """A subclass of `base` under its name. An instance takes it by assignment, so that copies and hooks keep working."""
    argument = cache_argument(base)

    @functools.wraps(base.generate)
    def generate(self, *args, prefix_cache=None, **kwargs):
        return _generate(self, base, prefix_cache, args, kwargs)

    @functools.wraps(base.__call__)
    def call(self, *args, **kwargs):
        cache = kwargs.get(argument)
        if isinstance(cache, GenerationCache):
            # Hooks on the model belong around the padded call. An instance's own forward (accelerate's hooks) hides the class's below.
            if "forward" in self.__dict__:
                return _forward(self, functools.partial(base.__call__, self), cache, argument, args, kwargs)
        elif _current_call.get() is None:
            self.radixkv.count_stock_call()
        return base.__call__(self, *args, **kwargs)

    @functools.wraps(base.forward)
    def forward(self, *args, **kwargs):
        cache = kwargs.get(argument)
        if isinstance(cache, GenerationCache):
            return _forward(self, functools.partial(base.forward, self), cache, argument, args, kwargs)
        return base.forward(self, *args, **kwargs)

    def prepare_cache(self, generation_config, model_kwargs, generation_mode, *args, **kwargs):
        cache = _cache_for(self, generation_config, model_kwargs, generation_mode, argument)
        if cache is None:
            return base._prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs)
        model_kwargs[argument] = cache
        return None

    def stopping_criteria(self, *args, **kwargs):
        criteria = base._get_stopping_criteria(self, *args, **kwargs)
        current = _current_call.get()
        if current is None or current.model is not self or current.cache is None or not current.cache.skips_finished:
            return criteria
        # Only where an end-of-sequence criterion exists does generate() write pads behind a finished row.
        if not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
            return criteria
        return _WatchedCriteria(criteria, current.cache)

    def deep_copy(self, memo):
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if copied.radixkv.backend.name == "triton":
            fuse_attention(copied)
        copied.radixkv.follow(copied)
        return copied

    members = {
        "__call__": call,
        "__deepcopy__": deep_copy,
        "forward": forward,
        "generate": generate,
        "_prepare_cache_for_generation": prepare_cache,
        "_get_stopping_criteria": stopping_criteria,
    }
    return make_subclass(base, members)


def _generate(model: Any, base: type, lease: Lease | None, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The model's own generate(), with what it computes stored on every way out."""
    handle: ModelCache = model.radixkv
    handle.follow(model)
    if lease is not None:
        handle.require_usable(lease)
    if kwargs.get("custom_generate") is not None:
        raise NotImplementedError("radixkv does not support custom_generate yet: unpatch the model for this call")
    call = _Call(model, lease, positions_given=kwargs.get("position_ids") is not None)
    token = _current_call.set(call)
    output = None
    try:
        output = base.generate(model, *args, **kwargs)  # type: ignore[attr-defined]
    finally:
        _current_call.reset(token)
        batch = None if call.cache is None else call.cache.batch
        if batch is not None and lease is None:
            handle.store(batch)
        elif batch is not None and not isinstance(output, ModelOutput):
            handle.discard(batch)  # chosen by hand, and nothing was returned that could be inserted
    if not call.decided:
        raise RuntimeError("radixkv: this release of transformers prepares its caches in a way that radixkv does not know")
    return output


def _cache_for(
    model: Any, config: GenerationConfig, model_kwargs: dict[str, Any], mode: GenerationMode, argument: str
) -> GenerationCache | None:
    """The cache that this generate() shall use, None for the model's own."""
    call = _current_call.get()
    if call is None or call.model is not model:
        raise RuntimeError("radixkv: generate() of a patched model was entered without its wrapper: call model.generate()")
    call.decided = True
    reason = _stock_reason(call, model, config, model_kwargs, argument)
    if reason is not None:
        if call.lease is not None:
            raise ValueError(f"prefix_cache cannot be used in this call: {reason}")
        logger.info("generate() takes the model's own path: %s", reason)
        model.radixkv.count_stock_call()
        return None
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or config.is_assistant:
        what = "being an assistant model" if config.is_assistant else mode.value.replace("_", " ")
        raise NotImplementedError(
            f"radixkv does not support {what} yet: use greedy search or sampling, pass use_cache=False, or unpatch the model"
        )
    if config.prefill_chunk_size is not None:
        raise NotImplementedError("radixkv does not support prefill_chunk_size yet: leave it out, or unpatch the model")
    call.cache = GenerationCache(
        model.radixkv,
        model.radixkv.shape.num_layers,
        # With scores or logits returned, those of finished rows are part of the result.
        skips_finished=not (config.output_scores or config.output_logits),
    )
    return call.cache


def _stock_reason(
    call: _Call, model: Any, config: GenerationConfig, model_kwargs: dict[str, Any], argument: str
) -> str | None:
    """Why the model's own path must run, None when it need not."""
    mask = model_kwargs.get("attention_mask")
    reasons = {
        "use_cache=False": not config.use_cache,
        "a cache was given": model_kwargs.get(argument) is not None,
        "cache_implementation is set": config.cache_implementation is not None,
        "inputs_embeds were given": model_kwargs.get("inputs_embeds") is not None,
        "position_ids were given": call.positions_given,
        "attentions or hidden states are asked for": bool(config.output_attentions or config.output_hidden_states),
        "the model is in training mode": model.training,
        "the model runs under autocast": torch.is_autocast_enabled(model.device.type),
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


def _forward(model: Any, own_call: Any, cache: GenerationCache, argument: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    call = _current_call.get()
    if call is None or call.cache is not cache:
        return cache.update()  # raises: a cache outside its call
    if args:
        raise NotImplementedError("radixkv: generate() passed positional arguments to the model, which is not supported")
    handle: ModelCache = model.radixkv
    handle.note_adapters(cache.batch)
    if cache.batch is not None:
        if cache.batch.is_mixed:
            cache.graphs = None  # captured with other adapters
        return packed_forward(model, own_call, cache, argument, call.lease, dict(kwargs))
    output = packed_forward(model, own_call, cache, argument, call.lease, dict(kwargs))
    handle.note_adapters(cache.batch)
    return output


class _WatchedCriteria(StoppingCriteriaList):
    """generate()'s stopping criteria, which also tell the cache which rows they have ended: those need no more computing."""

    def __init__(self, criteria: StoppingCriteriaList, cache: GenerationCache):
        super().__init__(criteria)
        self._cache = cache

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        verdict = super().__call__(input_ids, scores, **kwargs)
        finished = verdict.to("cpu", torch.bool)
        self._cache.finished = finished if self._cache.finished is None else self._cache.finished | finished
        return verdict
