"""The ways to answer the prompts of bench/generate.py: transformers' own, and radixkv's."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from radixkv.bench.generate_cases import Case, Tokens
from radixkv.demo.measure import Generation, cache_keyword, count_tokens, generate, prefill_cache, read_clock

Answers = list[list[int]]
# Of free memory, for the K/V of generate_batch(). Left to itself it takes nearly all of it, and filling that takes longer than any answer.
MEMORY_SHARE = 0.25


class Method:
    """One way.

    Args:
        name: for the table. num_new: tokens of every answer.
    """

    def __init__(self, name: str, num_new: int):
        self.name, self.num_new = name, num_new

    def prepare(self) -> None:
        """What a user does once, before any prompt; not timed."""

    def answer(self, case: Case) -> Answers:
        """The new tokens of each prompt; timed."""
        raise NotImplementedError

    def serves(self, case: Case) -> bool:
        """Whether it is a way to do this case."""
        return True

    def counted(self, model: Any, case: Case) -> Generation:
        """Answers, tokens that the model computed, padding included, and seconds."""
        self.prepare()
        with count_tokens(model) as count:
            start = read_clock(model.device)
            answers = self.answer(case)
            seconds = read_clock(model.device) - start
        return Generation(answers, count.tokens, count.calls, seconds)


class Plain(Method):
    """generate(), one by one or as one padded batch."""

    def __init__(self, name: str, model: Any, num_new: int, *, batched: bool, prepare: Callable[[], None] = lambda: None):
        super().__init__(name, num_new)
        self._model, self._batched, self._prepare = model, batched, prepare

    def prepare(self) -> None:
        self._prepare()

    def serves(self, case: Case) -> bool:
        return case.one_call or not self._batched

    def answer(self, case: Case) -> Answers:
        if self._batched:
            return generate(self._model, case.prompts, self.num_new).answers
        return [generate(self._model, [prompt], self.num_new).answers[0] for prompt in case.prompts]


class PrefixCopies:
    """transformers' documented recipe: a DynamicCache filled with each prefix once, and a deep copy of it for each prompt.

    Args:
        model: the unpatched one.
    """

    def __init__(self, model: Any):
        self._model = model
        self._caches: dict[Hashable, Any] = {}

    def options(self, owner: Hashable, prefix: Tokens, num_rows: int = 1) -> dict[str, Any]:
        """What to give to `generate()` for a prompt, of which so many rows are asked for, that begins with the owner's prefix."""
        if owner not in self._caches:
            self._caches[owner] = prefill_cache(self._model, prefix)
        cache = copy.deepcopy(self._caches[owner])
        if num_rows > 1:
            cache.batch_repeat_interleave(num_rows)
        return {cache_keyword(self._model): cache}

    def clear(self) -> None:
        """Forget every prefix."""
        self._caches.clear()


class CopiedPrefix(Method):
    """That recipe, one prompt after the other."""

    def __init__(self, name: str, model: Any, num_new: int):
        super().__init__(name, num_new)
        self._model = model

    def answer(self, case: Case) -> Answers:
        copies = PrefixCopies(self._model)
        answers = []
        for prompt, owner in zip(case.prompts, case.owners, strict=True):
            answers += generate(self._model, [prompt], self.num_new, **copies.options(owner, case.documents[owner])).answers
        return answers


class ContinuousBatching:
    """transformers' `generate_batch()`.

    Args:
        model: one of its own: it changes the attention of the model that it runs on.
        config: of all calls. One manager serves them while it stays the same.
        settings: of `ContinuousBatchingConfig`, for one manager that lives on from call to call; None for the default, which does not.
            Both keep to MEMORY_SHARE.
    """

    def __init__(self, model: Any, config: GenerationConfig, settings: dict[str, Any] | None):
        self._model, self._config, self._settings = model, config, settings
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

    def start_anew(self) -> None:
        """Let go of any manager that an earlier call on the model left behind; where one is to live on, make it, with an empty cache."""
        self.stop()
        if self._settings is not None:
            self.call([(5, 6, 7)])

    def stop(self) -> None:
        """Let go of the manager."""
        self._model.destroy_cached_continuous_batching_manager()

    def call(self, prompts: Sequence[Tokens], **options: Any) -> list[Any]:
        """One GenerationOutput for each answer, in the order of the prompts."""
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        settings = {"max_memory_percent": MEMORY_SHARE} | (self._settings or {})
        options |= {"continuous_batching_config": ContinuousBatchingConfig(**settings), "persistent_manager": self._settings is not None}
        outputs = self._model.generate_batch([list(prompt) for prompt in prompts], generation_config=self._config, **options)
        return list(outputs.values())


class GenerateBatch(Method):
    """transformers' continuous batching, as it is by default, or at its best: one manager for all calls, small pages."""

    def __init__(self, name: str, model: Any, num_new: int, *, best: bool):
        super().__init__(name, num_new)
        config = GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1)
        self._batching = ContinuousBatching(model, config, {"page_size": 16} if best else None)

    def prepare(self) -> None:
        # A new manager for each measurement, whose prefixes are then new too; it is made before the clock starts.
        self._batching.start_anew()

    def answer(self, case: Case) -> Answers:
        calls = [list(case.prompts)] if case.one_call else [[prompt] for prompt in case.prompts]
        return [list(output.generated_tokens) for prompts in calls for output in self._batching.call(prompts)]


class Many(Method):
    """model.radixkv.generate_many, all prompts at once or call by call."""

    def __init__(self, name: str, model: Any, num_new: int):
        super().__init__(name, num_new)
        self._model = model
        self._config = GenerationConfig(max_new_tokens=num_new, do_sample=False)

    def prepare(self) -> None:
        self._model.radixkv.clear()

    def answer(self, case: Case) -> Answers:
        calls = [list(case.prompts)] if case.one_call else [[prompt] for prompt in case.prompts]
        answers = []
        for prompts in calls:
            answers += self._model.radixkv.generate_many(prompts, generation_config=self._config, progress=False)
        return [list(answer.tokens) for answer in answers]


def build_methods(stock: Any, patched: Any, batching: Any, num_new: int) -> list[Method]:
    """All ways, the plain one first.

    Args:
        stock: the unpatched model. patched: a patched one with the same weights. batching: one more with the same weights, for
            generate_batch; None leaves that out. num_new: tokens of every answer.
    """
    clear = patched.radixkv.clear
    methods: list[Method] = [
        Plain("generate(), one by one", stock, num_new, batched=False),
        Plain("generate(), one padded batch", stock, num_new, batched=True),
        CopiedPrefix("generate() with a copied prefix cache, one by one", stock, num_new),
    ]
    if batching is not None:
        methods += [
            GenerateBatch("generate_batch(), as it is by default", batching, num_new, best=False),
            GenerateBatch("generate_batch(), persistent manager, pages of 16", batching, num_new, best=True),
        ]
    return [
        *methods,
        Plain("radixkv: generate(), one by one", patched, num_new, batched=False, prepare=clear),
        Plain("radixkv: generate(), one padded batch", patched, num_new, batched=True, prepare=clear),
        Many("radixkv: generate_many()", patched, num_new),
    ]


def has_generate_batch() -> bool:
    """Whether the installed transformers has generate_batch() with pages of a chosen size (from 5.17 on)."""
    try:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
    except ImportError:
        return False
    return "page_size" in ContinuousBatchingConfig.__dataclass_fields__


def no_end(model: Any) -> Any:
    """The model, whose answers now all have the same length."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    assert isinstance(model, torch.nn.Module)
    return model
