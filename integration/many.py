"""`generate_many`: its arguments, its prompts and its answers; what is computed in between see engine.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from radixkv.cache import require_namespace
from radixkv.integration.answers import Answer, FinishReason, Request, read_prompt, require_prompts
from radixkv.integration.attention import attention_configs
from radixkv.integration.engine import MODEL_INPUTS, Engine
from radixkv.integration.graphs import can_capture
from radixkv.integration.interrupts import Interrupts
from radixkv.integration.packed_model import PackedModel
from radixkv.integration.sampling import Sampler, Stopping, read_settings
from radixkv.integration.subclass import BASE_CLASS
from radixkv.integration.versions import cache_argument
from radixkv.progress import Advance, progress_bar, require_progress
from radixkv.schedule import Order, Waiting
from radixkv.sequence import CallOptions

if TYPE_CHECKING:
    from radixkv.integration.handle import ModelCache

# Tokens of one forward, where the user names no number: more are no faster, and their activations take memory.
MAX_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class ManyOptions:
    """What the user asked of `ModelCache.generate_many`; see there."""

    max_new_tokens: int | None
    generation_config: GenerationConfig | None
    on_result: Callable[[int, Answer], Any] | None
    max_batch_tokens: int | None
    order: Order
    tokenizer: Any
    seed: int | None
    namespace: tuple
    progress: bool | None


def generate_many(model: Any, cache: ModelCache, prompts: Any, options: ManyOptions) -> list[Answer]:
    """See `ModelCache.generate_many`."""
    if model.training or cache.runs_under_autocast():
        raise ValueError("generate_many: the model is in training mode or under autocast: call model.eval() first, outside of autocast")
    require_namespace("generate_many", options.namespace)
    require_progress("generate_many", options.progress)
    limit = MAX_BATCH_TOKENS if options.max_batch_tokens is None else options.max_batch_tokens
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"generate_many: max_batch_tokens must be an int of at least 1, got {limit!r}")
    seed = options.seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ValueError(f"generate_many: seed must be an int of at least 0, got {seed!r}")
    tokenizer = cache.tokenizer if options.tokenizer is None else options.tokenizer
    given = require_prompts(prompts, tokenizer)
    if options.on_result is not None and not callable(options.on_result):
        raise ValueError(f"generate_many: on_result must be a function of a number and an answer, got {type(options.on_result).__name__}")
    settings = read_settings(model, options.generation_config, options.max_new_tokens)
    if seed is None:
        # Greedy answers take no random numbers, from torch's generator neither.
        seed = int(torch.randint(2**62, ())) if settings.do_sample else 0
    sampler, stopping = Sampler(settings, seed, cache.shape.device), Stopping(settings, tokenizer)
    cache.follow(model)
    bar = progress_bar("generate_many", len(given), options.progress, unit="prompt")
    with bar as advance, Interrupts() as interrupts, torch.no_grad():
        book = _Book(len(given), tokenizer, options.on_result, advance)
        try:
            requests = book.read(given, model, cache)
            known = [cache.known_prefix(bytes(request.key), options.namespace)[0] for request in requests]
            waiting = Waiting([bytes(request.key) for request in requests], known, options.order)
            where = _packed_model(model, cache), cache, CallOptions(options.namespace), limit, settings.max_new_tokens
            Engine(*where, requests, waiting, sampler, stopping, book.note).run(interrupts)
        except KeyboardInterrupt:
            book.interrupt()
        return book.answers()


def _packed_model(model: Any, cache: ModelCache) -> PackedModel:
    base = getattr(type(model), BASE_CLASS, None)
    if base is None:
        raise ValueError("generate_many: the model of this cache is not patched any more")
    # Hooks on the model, and a forward of the instance's own (accelerate's), run around its class's call.
    is_hooked = bool(model._forward_hooks or model._forward_pre_hooks) or "forward" in model.__dict__
    call = partial(base.__call__ if is_hooked else base.forward, model)
    graphs = cache.graphs if cache.graphs is not None and not is_hooked and can_capture(model, MODEL_INPUTS) else None
    return PackedModel(attention_configs(model), call, cache_argument(base), graphs)


class _Book:
    """The answers so far.

    Args:
        num_prompts: of the call. tokenizer: for texts, or None. on_result: the user's. advance: moves the progress bar on.
    """

    def __init__(self, num_prompts: int, tokenizer: Any, on_result: Callable[[int, Answer], Any] | None, advance: Advance):
        self._answers: list[Answer | None] = [None] * num_prompts
        self._tokenizer, self._on_result, self._advance = tokenizer, on_result, advance
        self._requests: list[Request] = []

    def read(self, prompts: Sequence[Any], model: Any, cache: ModelCache) -> list[Request]:
        """The requests of the prompts that can be computed; the others have failed."""
        vocab_size = model.get_input_embeddings().weight.shape[0]
        max_positions = getattr(model.config, "max_position_embeddings", None)
        limits = {"vocab_size": vocab_size, "max_positions": max_positions, "max_stored": cache.pool.num_blocks * cache.pool.block_size}
        for index, prompt in enumerate(prompts):
            try:
                self._requests.append(read_prompt(index, prompt, self._tokenizer, **limits))
            except (ValueError, TypeError) as error:
                self._answers[index] = Answer((), None, "error", str(error))
        for place, request in enumerate(self._requests):
            request.place = place
        for index, answer in enumerate(self._answers):
            if answer is not None:
                self._tell(index)
        return self._requests

    def note(self, requests: Sequence[Request], reasons: Sequence[FinishReason], error: str | None) -> None:
        """Prompts are done."""
        # All are noted before the user hears of the first, who may raise.
        for request, reason in zip(requests, reasons, strict=True):
            self._answers[request.index] = request.answer(reason, self._tokenizer, error)
        for request in requests:
            self._tell(request.index)

    def interrupt(self) -> None:
        """All that are not done are not going to be."""
        for request in self._requests:
            if self._answers[request.index] is None:
                self._answers[request.index] = request.answer("interrupted", self._tokenizer)

    def answers(self) -> list[Answer]:
        """Of all prompts, in the order given."""
        return [Answer((), None, "interrupted") if answer is None else answer for answer in self._answers]

    def _tell(self, index: int) -> None:
        self._advance(1)
        if self._on_result is not None:
            answer = self._answers[index]
            assert answer is not None
            self._on_result(index, answer)
