"""Every way of decoding that generate() has, and what else a model may be asked, as one table for whatever compares two models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    Qwen2ForCausalLM,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache

from radixkv.integration.versions import cache_argument
from tests import mode_parts as parts
from tests.mode_parts import SHARED_TOKEN, Inputs, padded_on_the_right, ragged, repetitive, short, single, two_rows
from tests.models import EOS, prompt

GREEDY = {"max_new_tokens": 8, "do_sample": False}
SAMPLING = {"max_new_tokens": 8, "do_sample": True, "top_k": 40, "temperature": 1.5}
LOOKUP = {"prompt_lookup_num_tokens": 5, "eos_token_id": EOS}
NUMBERS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
# A third of all tokens: rows end here and there.
ENDS = list(range(100, 430))


@dataclass(frozen=True)
class Mode:
    """One way to ask a model.

    Attributes:
        inputs: makes the prompts, `input_ids` and whatever goes with them.
        arguments: of the call. A value that is a function makes it from the model, anew for each call.
        patched_arguments: those that only a patched model takes, beside them.
        reference_arguments: where the unpatched model is asked otherwise, for the same answer.
        run: asks a model; its own generate() if not said otherwise.
        reuses: whether a second call finds what the first one computed.
        num_distinct: so many different tokens a reference must hold to prove anything.
        ends_early: whether some rows end before others.
    """

    inputs: Callable[[], Inputs]
    arguments: dict[str, Any] = field(default_factory=dict)
    patched_arguments: dict[str, Any] = field(default_factory=dict)
    reference_arguments: dict[str, Any] = field(default_factory=dict)
    run: Callable[..., Any] | None = None
    reuses: bool = True
    num_distinct: int = 5
    ends_early: bool = False


def ask(model: Any, mode: Mode, inputs: Inputs | None = None, **more: Any) -> Any:
    """What a model answers in a mode, from a fixed seed.

    Args:
        inputs: prompts in place of the mode's own.
        more: further arguments of the call, as they are.
    """
    particular = mode.patched_arguments if hasattr(model, "radixkv") else mode.reference_arguments
    made = {name: value(model) if callable(value) else value for name, value in {**mode.arguments, **particular}.items()}
    arguments = {**made, **more}
    inputs = mode.inputs() if inputs is None else inputs
    torch.manual_seed(11)
    return model.generate(**inputs, **arguments) if mode.run is None else mode.run(model, inputs, **arguments)


def leaves(answer: Any) -> Iterator[Any]:
    """Whatever stands in an answer, one after the other; caches say nothing by themselves."""
    if isinstance(answer, dict):
        answer = list(answer.values())
    if isinstance(answer, list | tuple):
        for value in answer:
            yield from leaves(value)
    elif not isinstance(answer, Cache):
        yield answer


# What the prefix cache serves.
MODES: dict[str, Mode] = {
    "greedy": Mode(single, GREEDY),
    "greedy, ragged": Mode(ragged, GREEDY),
    "greedy, scores and logits": Mode(ragged, {**GREEDY, **NUMBERS}),
    "logits of several tokens": Mode(single, {**GREEDY, **NUMBERS, "logits_to_keep": 3}),
    "sampling": Mode(single, SAMPLING),
    "sampling, ragged": Mode(ragged, SAMPLING),
    "several sequences": Mode(single, {**SAMPLING, "num_return_sequences": 3}),
    "several sequences, scores and logits": Mode(ragged, {**SAMPLING, **NUMBERS, "num_return_sequences": 2}),
    "top-p, min-p and penalties": Mode(
        ragged, {**SAMPLING, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    ),
    "beams": Mode(single, {**GREEDY, "num_beams": 4}),
    "beams, ragged": Mode(ragged, {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}),
    "beams, scores and logits": Mode(ragged, {**GREEDY, **NUMBERS, "num_beams": 3}),
    "beams that end early": Mode(ragged, {**GREEDY, "num_beams": 3, "eos_token_id": ENDS, "early_stopping": True}, ends_early=True),
    "beam sampling": Mode(ragged, {**SAMPLING, "num_beams": 3}),
    "prompt lookup": Mode(repetitive, {**GREEDY, **LOOKUP}),
    "prompt lookup, scores and logits": Mode(repetitive, {**GREEDY, **LOOKUP, **NUMBERS}),
    "prompt lookup, sampling": Mode(repetitive, {**SAMPLING, **LOOKUP}),
    "a draft that is always right": Mode(single, {**GREEDY, "assistant_model": parts.right_draft}),
    "a draft that is mostly wrong": Mode(single, {**GREEDY, "assistant_model": parts.wrong_draft}),
    "a draft, sampling": Mode(single, {**SAMPLING, "assistant_model": parts.wrong_draft}),
    "a patched draft": Mode(single, {**GREEDY, "assistant_model": parts.patched_draft(parts.right_draft)}, run=parts.with_patched_draft),
    "a patched draft, mostly wrong": Mode(
        single, {**GREEDY, "assistant_model": parts.patched_draft(parts.wrong_draft)}, run=parts.with_patched_draft
    ),
    "chunked prefill": Mode(single, {**GREEDY, "prefill_chunk_size": 16}),
    "chunked prefill off the blocks": Mode(single, {**GREEDY, "prefill_chunk_size": 7}),
    # Of a chunk of one token nothing can be saved.
    "chunked prefill by single tokens": Mode(short, {**GREEDY, "prefill_chunk_size": 1}, reuses=False),
    # Which 4.57 computes wrongly itself.
    "chunked prefill, ragged": Mode(ragged, {**GREEDY, "prefill_chunk_size": 7}, reference_arguments={"prefill_chunk_size": None}),
    "a streamer": Mode(single, {**GREEDY, "streamer": lambda _: parts.Collect()}, run=parts.streamed),
    "stopping criteria": Mode(
        ragged, {**GREEDY, "stopping_criteria": lambda _: StoppingCriteriaList([parts.EndAtGreatTokens()])}, num_distinct=3
    ),
    "no end in a criterion": Mode(ragged, {**GREEDY, "stopping_criteria": lambda _: StoppingCriteriaList([MaxTimeCriteria(1000.0)])}),
    "max_time": Mode(single, {**GREEDY, "max_time": 1000.0}),
    "max_time that is over": Mode(ragged, {**GREEDY, "max_time": 1e-9}, num_distinct=3),
    "stop strings": Mode(
        ragged, {**GREEDY, "stop_strings": ["a", "e", "q3"], "tokenizer": parts.words, "eos_token_id": EOS}, ends_early=True
    ),
    "end of sequence": Mode(ragged, {**GREEDY, "eos_token_id": ENDS}, ends_early=True),
    "end of sequence, scores and logits": Mode(ragged, {**GREEDY, **NUMBERS, "eos_token_id": ENDS}, ends_early=True),
    "pads, ends and tokens of prompts are one": Mode(
        parts.with_special_tokens,
        {**GREEDY, "pad_token_id": SHARED_TOKEN, "eos_token_id": [SHARED_TOKEN, *ENDS]},
        ends_early=True,
        num_distinct=3,
    ),
    "processors": Mode(
        ragged, {**GREEDY, "logits_processor": lambda _: LogitsProcessorList([parts.Ban(), MinLengthLogitsProcessor(5, EOS)])}
    ),
    "guidance": Mode(single, {**GREEDY, "guidance_scale": 1.5}),
    "guidance with a negative prompt": Mode(single, {**GREEDY, "guidance_scale": 1.5, "negative_prompt_ids": prompt(9, seed=5)[None]}),
    "a pipeline with a chat template": Mode(single, GREEDY, run=parts.chat),
    "a namespace": Mode(ragged, GREEDY, {"namespace": ("anna",)}),
    "no reuse": Mode(ragged, GREEDY, {"reuse": False}, reuses=False),
    "nothing stored": Mode(single, GREEDY, {"store": False}, reuses=False),
    "search, use and store by hand": Mode(single, GREEDY, run=parts.by_hand),
    "two turns with the cache returned": Mode(ragged, GREEDY, run=parts.two_turns),
    "a loop of one's own": Mode(single, run=parts.own_loop),
    "branches": Mode(single, SAMPLING, run=parts.branches),
    "generate_many": Mode(ragged, {"max_new_tokens": 8}, run=parts.many),
}

STATES = {**GREEDY, "return_dict_in_generate": True}

# What it cannot serve and the model's own path must run, or refuse.
STOCK_MODES: dict[str, Mode] = {
    "use_cache=False": Mode(two_rows, {**GREEDY, "use_cache": False}),
    "cache_implementation=static": Mode(two_rows, {**GREEDY, "cache_implementation": "static"}),
    **{
        f"own dynamic cache as {name}=": Mode(two_rows, {**GREEDY, name: lambda model: DynamicCache(config=model.config)})
        for name in sorted({"past_key_values", cache_argument(Qwen2ForCausalLM)})
    },
    "own static cache": Mode(two_rows, {**GREEDY, "past_key_values": lambda model: StaticCache(config=model.config, max_cache_len=64)}),
    "inputs_embeds": Mode(two_rows, GREEDY, run=parts.from_embeddings),
    "hidden states": Mode(two_rows, {**STATES, "output_hidden_states": True}),
    "attentions": Mode(two_rows, {**STATES, "output_attentions": True}),
    "position_ids": Mode(parts.with_positions, GREEDY),
    "right padding": Mode(padded_on_the_right, GREEDY),
    "group beams": Mode(short, {**GREEDY, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}),
    "contrastive": Mode(short, {**GREEDY, "penalty_alpha": 0.6, "top_k": 4}),
    "early exit": Mode(short, {**GREEDY, "assistant_early_exit": 1}),
    "custom_generate": Mode(short, {**GREEDY, "custom_generate": lambda _: parts.custom_loop}),
    "plain forward": Mode(two_rows, run=parts.plain_forward),
    "a loop that knows nothing of radixkv": Mode(short, run=parts.stock_loop),
}
