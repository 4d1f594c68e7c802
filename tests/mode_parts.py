"""What the modes of tests/modes.py are made of: prompts, what a caller brings along, and ways to ask a model other than generate()."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import DynamicCache, LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria, TextStreamer, pipeline

import radixkv
from radixkv.integration.versions import cache_argument, held_cache
from tests.families import tiny_model
from tests.models import PAD, VOCAB_SIZE, left_pad, prompt, tiny_qwen2

SHARED_TOKEN = 150  # a pad, an end and a token of prompts at once

Inputs = dict[str, torch.Tensor]


# Prompts ------------------------------------------------------------------------------------------------------------------------------


def single() -> Inputs:
    return {"input_ids": prompt(60, seed=1)[None]}


def short() -> Inputs:
    return {"input_ids": prompt(30, seed=3)[None]}


def repetitive() -> Inputs:
    """A prompt in which the lookup of drafts finds something."""
    ids = prompt(40, seed=2)
    return {"input_ids": torch.cat([ids, ids, ids[:7]])[None]}


def ragged() -> Inputs:
    """Rows of different lengths, two of which begin alike; some are longer than any window."""
    rows = [prompt(length, seed=length) for length in (50, 33, 5, 1)]
    ids, mask = left_pad([*rows, torch.cat([rows[0][:41], prompt(5, seed=4)])])
    return {"input_ids": ids, "attention_mask": mask}


def with_special_tokens() -> Inputs:
    """Prompts that hold the token that is also the pad and an end."""
    ids = prompt(40, seed=15)
    ids[10] = ids[20] = ids[39] = SHARED_TOKEN
    batch, mask = left_pad([ids, prompt(12, seed=16), prompt(27, seed=18)])
    batch[mask == 0] = SHARED_TOKEN
    return {"input_ids": batch, "attention_mask": mask}


def two_rows() -> Inputs:
    ids, mask = left_pad([prompt(30, 7), prompt(18, 8)])
    return {"input_ids": ids, "attention_mask": mask}


def padded_on_the_right() -> Inputs:
    return {name: tensor.flip(1) for name, tensor in two_rows().items()}


def with_positions() -> Inputs:
    """Rows whose positions leave every other one out."""
    inputs = two_rows()
    return {**inputs, "position_ids": (2 * inputs["attention_mask"].cumsum(1) - 2).clamp(min=0)}


# What a caller brings along -----------------------------------------------------------------------------------------------------------


class Ban(LogitsProcessor):
    """A processor of the caller's own, which looks at the tokens so far."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -3:], -100.0)


class EndAtGreatTokens(StoppingCriteria):
    """Ends a row at a token of the upper third, by no list of ends."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] > VOCAB_SIZE * 2 // 3


class Collect(TextStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def words(_model: Any = None) -> PreTrainedTokenizerFast:
    """A tokenizer for stop strings and chats: its tokens are one or two letters or digits."""
    letters = string.ascii_lowercase + string.digits
    pairs = list(itertools.product(letters, letters))[: VOCAB_SIZE - len(letters)]
    vocabulary = {token: i for i, token in enumerate([*letters, *map("".join, pairs)])}
    tokenizer = Tokenizer(BPE(vocabulary, pairs))
    tokenizer.decoder = decoders.Fuse()
    template = "{% for message in messages %}{{ message['role'] }}{{ message['content'] }}{% endfor %}assistant"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


def right_draft(model: Any) -> Any:
    """A model that says what the given one says."""
    return tiny_model(model.config.name_or_path)


def wrong_draft(_model: Any) -> Any:
    """A model that mostly says something else."""
    return tiny_qwen2(7, num_layers=1)


def patched_draft(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: radixkv.patch_model(make(model), num_blocks=60, block_size=16)


# Other ways to ask --------------------------------------------------------------------------------------------------------------------


def with_patched_draft(model: Any, inputs: Inputs, **arguments: Any) -> Any:
    """generate() with a draft that is patched too: which path it took, and that nothing of it is lost."""
    output = model.generate(**inputs, **arguments)
    handle = arguments["assistant_model"].radixkv
    handle.check()
    assert handle.stats().stock_calls == 0 < handle.stats().requests
    return output


def streamed(model: Any, inputs: Inputs, **arguments: Any) -> Any:
    """The output of generate(), and what it gave to its streamer."""
    return model.generate(**inputs, **arguments), arguments["streamer"].tokens


def own_loop(model: Any, inputs: Inputs, **arguments: Any) -> Any:
    """A prompt, two tokens at once and then single ones, with radixkv's cache or transformers' own; the tokens and logits of each step."""
    is_patched = hasattr(model, "radixkv")
    cache = model.radixkv.new_cache(**arguments) if is_patched else DynamicCache(config=model.config)
    feed = tokens = inputs["input_ids"]
    logits = []
    for step in range(9):
        with torch.no_grad():
            output = model(feed, use_cache=True, logits_to_keep=1, **{cache_argument(type(model)): cache})
        assert held_cache(output) is cache
        logits.append(output.logits[:, -1])
        feed = logits[-1].argmax(-1, keepdim=True)
        if step == 0:
            feed = torch.cat([feed, torch.full_like(feed, 77)], 1)
        tokens = torch.cat([tokens, feed], 1)
    if is_patched:
        cache.store()
    return tokens, logits


def branches(model: Any, inputs: Inputs, **arguments: Any) -> list[torch.Tensor]:
    """Three continuations of one prefix."""
    ids = inputs["input_ids"]
    if not hasattr(model, "radixkv"):
        return [model.generate(ids, **arguments) for _ in range(3)]
    with model.radixkv.branch(ids) as branch:
        return [model.generate(ids, past_key_values=fork, **arguments) for fork in branch.fork(3)]


def by_hand(model: Any, inputs: Inputs, **arguments: Any) -> torch.Tensor:
    """Search, use, store."""
    ids = inputs["input_ids"]
    if not hasattr(model, "radixkv"):
        return model.generate(ids, **arguments)
    output = model.generate(ids, prefix_cache=model.radixkv.match_prefix(ids[0]), return_dict_in_generate=True, **arguments)
    model.radixkv.insert(output)
    return output.sequences


def two_turns(model: Any, inputs: Inputs, **arguments: Any) -> torch.Tensor:
    """A batch, and the same one continued: a patched model is given the cache that it returned."""
    first = model.generate(**inputs, return_dict_in_generate=True, **arguments)
    ids = torch.cat([first.sequences, torch.stack([prompt(4, seed) for seed in range(len(first.sequences))])], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(ids), ids.shape[1] - inputs["input_ids"].shape[1], dtype=torch.int64)], 1)
    known = {"past_key_values": held_cache(first)} if hasattr(model, "radixkv") else {}
    return model.generate(ids, attention_mask=mask, **known, **arguments)


def many(model: Any, inputs: Inputs, max_new_tokens: int) -> list[list[int]]:
    """generate_many(), or one generate() for each prompt."""
    rows = [row[mask == 1] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    if hasattr(model, "radixkv"):
        return [list(answer.tokens) for answer in model.radixkv.generate_many(rows, max_new_tokens, max_batch_tokens=70)]
    answers = [model.generate(row[None], max_new_tokens=max_new_tokens, do_sample=False) for row in rows]
    return [answer[0, len(row) :].tolist() for answer, row in zip(answers, rows, strict=True)]


def chat(model: Any, inputs: Inputs, tokenizer: Any = None, **arguments: Any) -> list[Any]:
    """transformers' text-generation pipeline with a chat template, two turns of a conversation."""
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer or words())
    turns = [{"role": "user", "content": "tell" * 20}]
    first = pipe(turns, pad_token_id=PAD, **arguments)
    turns += [{"role": "assistant", "content": "once" * 9}, {"role": "user", "content": "more" * 5}]
    return [first, pipe(turns, pad_token_id=PAD, **arguments)]


def plain_forward(model: Any, inputs: Inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def stock_loop(model: Any, inputs: Inputs) -> list[torch.Tensor]:
    """A loop of one's own that knows nothing of radixkv."""
    with torch.no_grad():
        first = model(inputs["input_ids"], use_cache=True)
        second = model(first.logits[:, -1:].argmax(-1), use_cache=True, **{cache_argument(type(model)): held_cache(first)})
    return [first.logits, second.logits]


def from_embeddings(model: Any, inputs: Inputs, **arguments: Any) -> torch.Tensor:
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    return model.generate(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], **arguments)


def custom_loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A decoding loop that somebody passes in as custom_generate."""
    for _ in range(4):
        input_ids = torch.cat([input_ids, model(input_ids).logits[:, -1:].argmax(-1)], 1)
    return input_ids
