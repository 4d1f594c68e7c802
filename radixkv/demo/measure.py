"""Running a model and counting what it computed; comparing two answers token by token."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache


@dataclass(frozen=True)
class Generation:
    """What one call of `generate()` gave and cost."""

    answers: list[list[int]]  # the new tokens of each row, its end token included
    computed: int  # tokens that entered the first layer, padding included
    num_forwards: int  # calls of the first layer
    seconds: float

    @property
    def num_new(self) -> int:
        return sum(map(len, self.answers))


@dataclass
class TokenCount:
    """Tokens and calls that the first layer of a model has seen."""

    tokens: int = 0
    calls: int = 0


@contextmanager
def count_tokens(model: Any) -> Iterator[TokenCount]:
    """Count the tokens that enter the first decoder layer, by a hook that knows nothing of this library.

    Args:
        model: A Qwen2ForCausalLM.
    """
    count = TokenCount()

    def add(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        count.tokens += hidden_states.shape[0] * hidden_states.shape[1]
        count.calls += 1

    handle = model.model.layers[0].register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield count
    finally:
        handle.remove()


def generate(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, end_tokens: Sequence[int] = (), **options: Any
) -> Generation:
    """Greedy answers to prompts, or others where `options` say so, given as one left-padded batch.

    Args:
        model: A Qwen2ForCausalLM, patched or not.
        prompts: Token ids, one sequence per row; rows may differ in length.
        max_new_tokens: Most tokens of an answer.
        end_tokens: An answer is cut behind the first of them; rows are padded with the first.
        options: Handed on to `model.generate()`.
    """
    width = max(map(len, prompts))
    pad = end_tokens[0] if end_tokens else 0
    input_ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in prompts], device=model.device)
    attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=model.device)
    with count_tokens(model) as count:
        start = read_clock(model.device)
        output = model.generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            **{"do_sample": False, "repetition_penalty": 1.0, **options},
        )
        seconds = read_clock(model.device) - start
    answers = [_cut(row, end_tokens) for row in output[:, width:].tolist()]
    return Generation(answers, count.tokens, count.calls, seconds)


@dataclass(frozen=True)
class Difference:
    """The first position where a patched answer leaves the stock one, and whether the stock model itself is sure of it."""

    what: str
    position: int
    margin: float
    noise: float
    is_tie: bool

    def __str__(self) -> str:
        verdict = "a tie" if self.is_tie else "a difference"
        return f"{self.what}: {verdict} at token {self.position}, margin {self.margin:.4g}, stock noise {self.noise:.4g}"


def compare(
    model: Any, what: str, prompt: Sequence[int], shared_len: int, stock: Sequence[int], patched: Sequence[int]
) -> Difference | None:
    """Compare two greedy answers to one prompt.

    In half precision a difference is a tie where the stock model prefers its own token by less than twice the noise that it shows
    itself, between running this sequence whole and running it behind a cached prefix: the document, half of the sequence, or all of it
    but the last token, as `generate()` does. In float32 nothing is a tie.

    Args:
        model: The unpatched model.
        what: Names the answer in the result.
        prompt: The tokens asked with.
        shared_len: Tokens of the document, the first prefix to be cached.
        stock: The unpatched model's answer.
        patched: The patched model's answer.

    Returns:
        None when the answers are equal.
    """
    if list(stock) == list(patched):
        return None
    position = next((i for i, (one, other) in enumerate(zip(stock, patched, strict=False)) if one != other), min(len(stock), len(patched)))
    if position == min(len(stock), len(patched)):
        # One answer is the beginning of the other, though both may go on to the same length: that is no matter of rounding.
        return Difference(what, position, float("nan"), 0.0, False)
    tokens = [*prompt, *stock[:position]]
    runs = [_logits_both_ways(model, tokens, prefix_len) for prefix_len in {shared_len, len(tokens) // 2, len(tokens) - 1}]
    last = runs[0][0][-1]
    margin = float((last[stock[position]] - last[patched[position]]).abs())
    noise = max(float((whole - cached).abs().max()) for whole, cached in runs)
    return Difference(what, position, margin, noise, model.dtype != torch.float32 and margin < 2 * noise)


def compare_all(model: Any, what: str, prompts: Iterable[Any], stock: Generation, patched: Generation) -> list[Difference]:
    """`compare` for each row of a batch; `prompts` are `Prompt`s in the order of the rows."""
    found = []
    for row, (prompt, one, other) in enumerate(zip(prompts, stock.answers, patched.answers, strict=True)):
        difference = compare(model, f"{what}, row {row + 1}", prompt.tokens, prompt.shared_len, one, other)
        if difference is not None:
            found.append(difference)
    return found


def cache_keyword(model: Any) -> str:
    """The name under which this release of transformers takes a cache."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def prefill_cache(model: Any, prefix: Sequence[int]) -> DynamicCache:
    """transformers' own cache, holding the K/V of a prefix."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([list(prefix)], device=model.device), use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})
    return cache


def read_clock(device: torch.device) -> float:
    """Seconds, once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _logits_both_ways(model: Any, tokens: Sequence[int], prefix_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [positions after the prefix, vocabulary] of one sequence, run whole and run behind its cached prefix."""
    ids = torch.tensor([list(tokens)], device=model.device)
    cache = prefill_cache(model, tokens[:prefix_len])
    with torch.no_grad():
        whole = model(ids, logits_to_keep=len(tokens) - prefix_len).logits[0]
        rest = model(ids[:, prefix_len:], use_cache=True, **{cache_keyword(model): cache}).logits[0]
    return whole.float(), rest.float()


def _cut(tokens: list[int], end_tokens: Sequence[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in end_tokens), len(tokens))
    return tokens[: end + 1]
