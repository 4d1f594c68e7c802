"""The prompts that `generate_many` is given, read one by one, and what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from radixkv.sequence import TOKEN_BYTES
from radixkv.token_key import token_key

FinishReason = Literal["eos", "length", "stop", "error", "interrupted"]


@dataclass(frozen=True)
class Answer:
    """What `generate_many` made of one prompt.

    Attributes:
        tokens: the new ones, an end-of-sequence token included; of a prompt that failed or was interrupted those it had until then.
        text: of them, without special tokens; None without a tokenizer.
        finish_reason: "eos", "length" (max_new_tokens), "stop" (a stop string), "error", or "interrupted" (by Ctrl-C).
        error: what was wrong; None unless finish_reason is "error".
        prompt_tokens: tokens of the prompt. cached_tokens: those that were not computed for it.
    """

    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """A prompt on its way.

    Attributes:
        index: its number among the prompts. key: its tokens, then those of its answer, int32 little-endian. num_prompt, num_new: how many
            they are. cached_tokens: as in `Answer`; None before it was computed. place: its number among those that are not
            refused at once.
    """

    index: int
    key: bytearray
    num_prompt: int
    num_new: int = 0
    place: int = -1
    cached_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_new

    def add(self, token: int) -> None:
        self.key += token.to_bytes(TOKEN_BYTES, "little")
        self.num_new += 1

    def answer(self, reason: FinishReason, tokenizer: Any, error: str | None = None) -> Answer:
        tokens = tuple(np.frombuffer(bytes(self.key), dtype="<i4")[self.num_prompt :].tolist())
        text = None if tokenizer is None else tokenizer.decode(list(tokens), skip_special_tokens=True)
        return Answer(tokens, text, reason, error, self.num_prompt, self.cached_tokens or 0)


def read_prompt(index: int, prompt: Any, tokenizer: Any, *, vocab_size: int, max_positions: int | None, max_stored: int) -> Request:
    """The request of one prompt.

    Args:
        prompt: a string, or token ids: a list, a tuple, a numpy array or a tensor [n] or [1, n].
        tokenizer: for strings. vocab_size: ids are below it. max_positions: of the model, None for any number.
        max_stored: tokens that the pool holds.

    Raises:
        ValueError: no prompt that could be computed; the message says why.
    """
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    if getattr(ids, "ndim", 1) == 2 and ids.shape[0] == 1:
        ids = ids[0]
    key = token_key(ids)
    num_tokens = len(key) // TOKEN_BYTES
    if not num_tokens:
        raise ValueError("the prompt is empty")
    largest = int(np.frombuffer(key, dtype="<i4").max())
    if largest >= vocab_size:
        raise ValueError(f"token id {largest} is not below {vocab_size}, the size of the model's vocabulary")
    if max_positions is not None and num_tokens >= max_positions:
        raise ValueError(f"the prompt of {num_tokens} tokens leaves no room for an answer: the model's limit is {max_positions}")
    if num_tokens > max_stored:
        raise ValueError(f"the prompt of {num_tokens} tokens is longer than the pool, which holds {max_stored}: raise num_blocks")
    return Request(index, bytearray(key), num_tokens)


def require_prompts(prompts: Any, tokenizer: Any) -> Sequence[Any]:
    """The prompts as a sequence.

    Raises:
        ValueError: they are none, or strings without a tokenizer, or the tokenizer is none.
    """
    is_scalar = isinstance(prompts, (torch.Tensor, np.ndarray)) and not prompts.ndim
    if isinstance(prompts, (str, bytes, Mapping)) or is_scalar or not hasattr(prompts, "__iter__"):
        raise ValueError(f"generate_many: prompts must be a list of strings or of token lists, got {type(prompts).__name__}")
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"generate_many: tokenizer must be one of transformers, got {type(tokenizer).__name__}")
    found = list(prompts)
    if found and all(map(_is_number, found)):
        raise ValueError("generate_many: prompts must be a list of prompts, got the token ids of one: wrap them in a list")
    if tokenizer is None and any(isinstance(prompt, str) for prompt in found):
        raise ValueError("generate_many: prompts that are strings need tokenizer=, or model.radixkv.tokenizer set once")
    return found


def _is_number(prompt: Any) -> bool:
    """Whether a prompt is a single token id: an int, or what numpy and torch make of one."""
    return isinstance(prompt, (int, np.integer)) or (isinstance(prompt, (torch.Tensor, np.ndarray)) and not prompt.ndim)
