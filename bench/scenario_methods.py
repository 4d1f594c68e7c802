"""The ways to answer the requests of bench/scenarios.py, each with what it remembers between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria

import radixkv
from radixkv.bench.generate_methods import ContinuousBatching, PrefixCopies, has_generate_batch
from radixkv.bench.scenario_cases import Request, Scenario
from radixkv.bench.scenario_results import BATCH, COPIED, NO_CACHE, OURS, PLAIN
from radixkv.demo.measure import TokenCount, count_tokens, generate, read_clock
from radixkv.demo.models import share_weights

PAGE_SIZE = 16
WARM_UP = Request(-1, tuple(range(5, 45)), "warm-up", 20)


@dataclass(frozen=True)
class Answered:
    """What one request gave and cost.

    Attributes:
        answers: the new tokens of each sample, its end token included. prompt_computed: tokens computed until the first new one was there.
        computed: all of them. first_token_seconds, seconds: from the call until the first new token was there, and until the last.
    """

    answers: list[list[int]]
    prompt_computed: int
    computed: int
    first_token_seconds: float
    seconds: float


class FirstToken(StoppingCriteria):
    """Stops nothing; notes the clock and the tokens computed when `generate()` has chosen its first token.

    Args:
        count: of the running call. device: of the model.
    """

    def __init__(self, count: TokenCount, device: torch.device):
        self._count, self._device = count, device
        self.clock: float | None = None
        self.computed = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self.clock is None:
            self.clock, self.computed = read_clock(self._device), self._count.tokens
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Method:
    """One way.

    Args:
        name: as the rows call it. model: what it runs.
    """

    def __init__(self, name: str, model: Any):
        self.name, self.model = name, model

    def begin(self, scenario: Scenario) -> None:
        """Answer something that is not measured, and forget it and all requests before; not timed."""

    def answer(self, scenario: Scenario, request: Request, seed: int) -> Answered:
        """Answer one request; `seed` is of the samples, where any are drawn."""
        raise NotImplementedError

    def end(self) -> None:
        """Let go of what is held between requests."""


class WithGenerate(Method):
    """`generate()`, of an unpatched model, with a cache, a copied one or none, or of a patched one.

    Args:
        name, model: see `Method`. options: what to give to `generate()` for a request, made within its time.
        forget: called where a scenario begins. expands: whether `generate()` itself makes rows of one prompt, one for each sample.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        *,
        options: Callable[[Scenario, Request], dict[str, Any]] = lambda _scenario, _request: {},
        forget: Callable[[], None] = lambda: None,
        expands: bool = True,
    ):
        super().__init__(name, model)
        self._options, self._forget, self._expands = options, forget, expands

    def begin(self, scenario: Scenario) -> None:
        self.answer(replace(scenario, num_new=2), WARM_UP, 0)
        self._forget()

    def answer(self, scenario: Scenario, request: Request, seed: int) -> Answered:
        end_tokens = end_tokens_of(self.model)
        rows = [request.prompt]
        options: dict[str, Any] = {}
        if scenario.fixed_len:
            options["min_new_tokens"] = scenario.num_new
        if scenario.num_samples > 1:
            options["do_sample"] = True
            if self._expands:
                options["num_return_sequences"] = scenario.num_samples
            else:
                rows *= scenario.num_samples
        with count_tokens(self.model) as count:
            first = FirstToken(count, self.model.device)
            start = read_clock(self.model.device)
            options |= self._options(scenario, request)
            torch.manual_seed(seed)
            run = generate(self.model, rows, scenario.num_new, end_tokens=end_tokens, stopping_criteria=[first], **options)
            seconds = read_clock(self.model.device) - start
        assert first.clock is not None
        return Answered(run.answers, first.computed, count.tokens, first.clock - start, seconds)

    def end(self) -> None:
        self._forget()


class WithGenerateBatch(Method):
    """`generate_batch()` with a manager that lives on and small pages, one request to a call.

    The times are those of the tokens, as it notes them itself. A call returns up to a second after its last token, when the manager's
    thread has stopped; that is left out, for a server of one's own would not stop it.

    Args:
        name, model: see `Method`. num_tokens: that its pool is to hold.
    """

    def __init__(self, name: str, model: Any, num_tokens: int):
        super().__init__(name, model)
        self._settings = {"page_size": PAGE_SIZE, "num_blocks": -(-num_tokens // PAGE_SIZE), "max_batch_tokens": 4096}
        self._batching: ContinuousBatching | None = None

    def begin(self, scenario: Scenario) -> None:
        end_tokens = [] if scenario.fixed_len else end_tokens_of(self.model)
        config = GenerationConfig(
            max_new_tokens=scenario.num_new,
            do_sample=scenario.num_samples > 1,
            num_return_sequences=scenario.num_samples,
            eos_token_id=end_tokens or -1,
        )
        # A manager serves one kind of call only, so there is one for each scenario. Starting it answers a prompt too.
        self._batching = ContinuousBatching(self.model, config, self._settings)
        self._batching.start_anew()

    def answer(self, scenario: Scenario, request: Request, seed: int) -> Answered:
        assert self._batching is not None, "begin() comes first"
        with count_tokens(self.model) as count:
            start = read_clock(self.model.device)
            outputs = self._batching.call([request.prompt], record_timestamps=True)
        answers = [list(output.generated_tokens) for output in outputs]
        if len(answers) != scenario.num_samples or not all(output.timestamps for output in outputs):
            raise RuntimeError(f"generate_batch() gave {len(answers)} answers of {scenario.num_samples}")
        first = min(output.timestamps[0] for output in outputs) - start
        last = max(output.timestamps[-1] for output in outputs) - start
        return Answered(answers, count.tokens - sum(len(answer) - 1 for answer in answers), count.tokens, first, last)

    def end(self) -> None:
        if self._batching is not None:
            self._batching.stop()
            self._batching = None


def build_methods(scenario: Scenario, stock: Any, num_tokens: int, *, with_generate_batch: bool) -> list[Method]:
    """The ways to answer the requests of a scenario, the plain one first.

    Args:
        scenario: what is asked. stock: the unpatched model; all ways share its weights.
        num_tokens: of the cache that each way which manages one gets. with_generate_batch: whether to measure that, if it is there.
    """
    plain = WithGenerate(PLAIN, stock)
    block_size = 64
    patched = radixkv.patch_model(share_weights(stock), num_blocks=-(-num_tokens // block_size), block_size=block_size)
    methods: list[Method] = [plain]
    if scenario.fixed_len:
        methods.append(WithGenerate(NO_CACHE, stock, options=lambda _scenario, _request: {"use_cache": False}))
    else:
        copies = PrefixCopies(stock)

        def copy_prefix(scenario: Scenario, request: Request) -> dict[str, Any]:
            return copies.options(request.owner, request.prompt[: request.prefix_len], scenario.num_samples)

        methods.append(WithGenerate(COPIED, stock, options=copy_prefix, forget=copies.clear, expands=False))
    if with_generate_batch and has_generate_batch() and not scenario.fixed_len:
        methods.append(WithGenerateBatch(BATCH, share_weights(stock), num_tokens))
    methods.append(WithGenerate(OURS, patched, forget=patched.radixkv.clear))
    return methods


def end_tokens_of(model: Any) -> list[int]:
    """The tokens with which the model ends an answer."""
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
