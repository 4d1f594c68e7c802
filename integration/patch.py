"""`patch_model` and `unpatch_model`: one model instance becomes one whose generate() reuses K/V, and back."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from radixkv.integration.families import model_shape
from radixkv.integration.following import CacheOptions
from radixkv.integration.fused import fuse_attention, unfuse_attention
from radixkv.integration.handle import ModelCache
from radixkv.integration.packing import generation_forward, own_forward
from radixkv.integration.paged_cache import GenerationCache, PagedCache
from radixkv.integration.stock_path import ROW_MODES, stock_reason
from radixkv.integration.subclass import BASE_CLASS, make_subclass
from radixkv.integration.versions import cache_argument, mask_width
from radixkv.sequence import CallOptions
from radixkv.token_key import require_namespace
from radixkv.tree import Lease

logger = logging.getLogger("radixkv")


@dataclass
class _Call:
    """One generate() of a patched model, from the wrapper to the forwards inside it.

    Attributes:
        lease, options, positions: what the caller asked for; options is None where that was nothing. num_columns: of its input_ids.
        cache: what the model's own generate() was shown, None on the model's own path. decided: whether that was decided.
        stores: whether what was computed is stored in the end.
    """

    model: Any
    lease: Lease | None
    options: CallOptions | None
    positions: torch.Tensor | None
    num_columns: int | None
    cache: GenerationCache | None = None
    decided: bool = False
    stores: bool = True


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
    logger.info("patched %s: %s", base.__name__, handle.describe())
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
    def generate(self, *args, prefix_cache=None, namespace=None, reuse=True, store=True, **kwargs):
        options = _call_options(prefix_cache, namespace, reuse, store)
        call = _Call(self, prefix_cache, options, kwargs.get("position_ids"), _num_columns(args, kwargs))
        return _generate(self, base, call, args, kwargs)

    @functools.wraps(base.__call__)
    def call(self, *args, **kwargs):
        cache = _given_cache(kwargs, argument)
        if isinstance(cache, (GenerationCache, PagedCache)):
            # Hooks on the model belong around the padded call. An instance's own forward (accelerate's hooks) hides the class's below.
            if "forward" in self.__dict__:
                return _forward(self, base, functools.partial(base.__call__, self), cache, argument, args, kwargs)
        elif _current_call.get() is None:
            self.radixkv.count_stock_call("the model was called without a cache that model.radixkv.new_cache() made")
        return base.__call__(self, *args, **kwargs)

    @functools.wraps(base.forward)
    def forward(self, *args, **kwargs):
        cache = _given_cache(kwargs, argument)
        if isinstance(cache, (GenerationCache, PagedCache)):
            return _forward(self, base, functools.partial(base.forward, self), cache, argument, args, kwargs)
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

    members = {
        "__call__": call,
        "__deepcopy__": _deep_copy,
        "forward": forward,
        "generate": generate,
        "_prepare_cache_for_generation": prepare_cache,
        "_get_stopping_criteria": stopping_criteria,
    }
    return make_subclass(base, members)


def _deep_copy(model: Any, memo: dict[int, Any]) -> Any:
    copied = model.__class__.__new__(model.__class__)
    memo[id(model)] = copied
    copied.__dict__.update(copy.deepcopy(model.__dict__, memo))
    if copied.radixkv.backend.name == "triton":
        fuse_attention(copied)
    copied.radixkv.follow(copied)
    return copied


def _num_columns(args: tuple, kwargs: dict[str, Any]) -> int | None:
    """Of the input_ids of a call of generate(), which are its first argument, `inputs` by name; None without any."""
    given = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    return given.shape[-1] if isinstance(given, torch.Tensor) and given.ndim else None


def _call_options(lease: Lease | None, namespace: tuple | None, reuse: bool, store: bool) -> CallOptions | None:
    """What the keywords of generate() ask for; None where they are all left alone."""
    for name, value in (("reuse", reuse), ("store", store)):
        if not isinstance(value, bool):
            raise ValueError(f"generate: {name} must be True or False, got {value!r}")
    if namespace is not None:
        require_namespace("generate", namespace)
    if lease is not None and not (reuse and store):
        raise ValueError("generate: prefix_cache= reuses the prefix that it names and stores by insert(): leave out reuse= and store=")
    if namespace is None and reuse and store:
        return None
    return CallOptions(namespace or (), reuse, store)


def _generate(model: Any, base: type, call: _Call, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The model's own generate(), with what it computes stored on every way out."""
    handle: ModelCache = model.radixkv
    handle.follow(model)
    if call.lease is not None:
        handle.require_usable(call.lease, None if call.options is None else call.options.namespace)
    if kwargs.get("custom_generate") is not None:
        if call.lease is not None:
            raise ValueError("prefix_cache cannot be used in this call: custom_generate uses the model in a way of its own")
        handle.count_stock_call("custom_generate was given")
    token = _current_call.set(call)
    output = None
    with handle.occupants.staying(call):
        try:
            output = base.generate(model, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            _current_call.reset(token)
            rows = None if call.cache is None else call.cache.rows
            if rows is not None and call.stores:
                rows.store()
            elif rows is not None and call.lease is not None and not isinstance(output, ModelOutput):
                rows.close()  # chosen by hand, and nothing was returned that could be inserted
            elif rows is not None and not rows.options.store:
                rows.close()
    if not call.decided and kwargs.get("custom_generate") is None:
        raise RuntimeError("radixkv: this release of transformers prepares its caches in a way that radixkv does not know")
    if isinstance(output, ModelOutput):
        for name, value in output.items():
            if isinstance(value, GenerationCache):
                output[name] = value.rows
    return output


def _cache_for(
    model: Any, config: GenerationConfig, model_kwargs: dict[str, Any], mode: GenerationMode, argument: str
) -> GenerationCache | None:
    """The cache that this generate() shall use, None for the model's own."""
    call = _current_call.get()
    if call is None or call.model is not model:
        raise RuntimeError("radixkv: generate() of a patched model was entered without its wrapper: call model.generate()")
    call.decided = True
    given = model_kwargs.get(argument)
    reason = stock_reason(model, config, mode, given, call.positions, call.num_columns, model_kwargs)
    if reason is not None:
        asked = "prefix_cache" if call.lease is not None else "a PagedCache" if isinstance(given, PagedCache) else None
        if asked is not None:
            raise ValueError(f"{asked} cannot be used in this call: {reason}")
        model.radixkv.count_stock_call(reason)
        return None
    rows = PagedCache(model.radixkv, call.options or CallOptions()) if given is None else _usable_rows(call, model, given)
    resumes = rows.batch is not None
    # The rounds of an assistant go on with what the one before left, most of which is rejected: its prompt is all that is worth storing.
    call.stores = call.lease is None and (call.options or rows.options).store and not (config.is_assistant and resumes)
    checked = mode == GenerationMode.ASSISTED_GENERATION
    call.cache = GenerationCache(
        rows,
        # With scores or logits returned, those of finished rows are part of the result. Beams end by rules of their own.
        skips_finished=mode in ROW_MODES and not (config.output_scores or config.output_logits),
        is_draft_checked=checked,
        is_chunked=config.prefill_chunk_size is not None,
        mask_width=mask_width(model_kwargs.get("attention_mask"), config),
    )
    return call.cache


def _usable_rows(call: _Call, model: Any, given: PagedCache) -> PagedCache:
    """The cache that the caller passed in, if this call can go on with it."""
    if given.prefix_cache is not model.radixkv:
        raise ValueError("the PagedCache is of another model: it can only be passed to the model whose handle made it")
    if call.lease is not None:
        raise ValueError("prefix_cache= and a PagedCache cannot be used in one call: both say what is known of the prompt")
    if call.options is not None and (call.options.namespace or given.options.namespace) != given.options.namespace:
        raise ValueError(f"the PagedCache is of namespace {given.options.namespace}, this call asks for {call.options.namespace}")
    if call.options is not None and given.options.reuse and not call.options.reuse:
        raise ValueError("reuse=False does not go with a PagedCache that may reuse: make it with new_cache(reuse=False), or leave it out")
    return given


def _given_cache(kwargs: dict[str, Any], argument: str) -> Any:
    """The cache among a call's arguments; a `PagedCache` under the older name counts, wherever it can be told from others'."""
    cache = kwargs.get(argument)
    if cache is None and isinstance(kwargs.get("past_key_values"), PagedCache):
        kwargs[argument] = cache = kwargs.pop("past_key_values")
    return cache


def _forward(
    model: Any, base: Any, own_call: Any, cache: GenerationCache | PagedCache, argument: str, args: tuple, kwargs: dict[str, Any]
) -> Any:
    inputs = dict(kwargs)
    if isinstance(cache, PagedCache):
        if cache.prefix_cache is not model.radixkv:
            raise ValueError("the PagedCache is of another model: it can only be passed to the model whose handle made it")
        inputs |= inspect.signature(base.forward).bind_partial(model, *args).arguments
        inputs.pop("self", None)
        model.radixkv.follow(model)
        return own_forward(model, own_call, cache, argument, inputs)
    call = _current_call.get()
    if call is None or call.cache is not cache:
        return cache.update()  # raises: a cache outside its call
    if args:
        raise NotImplementedError("radixkv: generate() passed positional arguments to the model, which is not supported")
    handle: ModelCache = model.radixkv
    handle.note_adapters(cache.rows.batch)
    output = generation_forward(model, own_call, cache, argument, call.lease, inputs)
    handle.note_adapters(cache.rows.batch)
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
