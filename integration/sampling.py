"""From a generation config to tokens: transformers' own processors, and for each prompt random numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixkv.integration.answers import FinishReason

# What a generation config may ask of generate_many; anything else must be as transformers has it by default.
SUPPORTED = (
    *("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("eos_token_id", "stop_strings"),
)
# Set by many checkpoints, and without a meaning where no row is padded, none begins empty, and max_new_tokens says how long it gets.
_MEANINGLESS = ("bos_token_id", "pad_token_id", "transformers_version", "max_length")


@dataclass(frozen=True)
class Settings:
    """What a generation config asks for, as far as generate_many can do it.

    Attributes:
        max_new_tokens: most tokens of an answer. do_sample: whether tokens are drawn; otherwise the most likely one is taken.
        penalty: repetition penalty, 1.0 for none. warpers: of the scores of tokens that are drawn.
        eos: token ids that end an answer. stop_strings: texts that end one.
    """

    max_new_tokens: int
    do_sample: bool
    penalty: float
    warpers: LogitsProcessorList
    eos: frozenset[int]
    stop_strings: tuple[str, ...]


def read_settings(model: Any, config: GenerationConfig | None, max_new_tokens: int | None) -> Settings:
    """The settings of a call, with the model's own where the call names none, as `generate()` merges them.

    Raises:
        ValueError: something is asked for that generate_many does not do (the message names it), or no length.
    """
    if config is not None and not isinstance(config, GenerationConfig):
        raise ValueError(f"generate_many: generation_config must be a GenerationConfig, got {type(config).__name__}")
    if config is not None:
        _require_supported(config)
    merged, _ = model._prepare_generation_config(config)
    _require_supported(merged)
    length = merged.max_new_tokens if max_new_tokens is None else max_new_tokens
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"generate_many: max_new_tokens must be an int of at least 1, here or in generation_config, got {length!r}")
    eos = merged.eos_token_id
    ids = () if eos is None else eos.tolist() if isinstance(eos, torch.Tensor) else eos
    stop_strings = merged.stop_strings or ()
    return Settings(
        length,
        bool(merged.do_sample),
        1.0 if merged.repetition_penalty is None else merged.repetition_penalty,
        _warpers(merged) if merged.do_sample else LogitsProcessorList(),
        frozenset([ids] if isinstance(ids, int) else ids),
        (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings),
    )


class Sampler:
    """Takes the next token of each row.

    What a row gets depends on its own scores and on the random numbers that it drew before, never on the rows beside it.

    Args:
        settings: of the call. seed: of the random numbers, with the number of the prompt. device: where scores are.
    """

    def __init__(self, settings: Settings, seed: int, device: torch.device):
        self._settings, self._seed = settings, seed
        self._generators: dict[int, torch.Generator] = {}
        self._penalty = RepetitionPenaltyLogitsProcessor(float(settings.penalty)) if settings.penalty != 1.0 else None
        self._seen = _SeenTokens(device)

    def open(self, prompt: int, tokens: np.ndarray) -> None:
        """Begin with a prompt, int32 [n], or go on with one that was closed."""
        if self._settings.do_sample and prompt not in self._generators:
            state = np.random.SeedSequence([self._seed, prompt]).generate_state(1, np.uint64)
            self._generators[prompt] = torch.Generator().manual_seed(int(state[0]))
        if self._penalty is not None:
            self._seen.open(prompt, tokens)

    def close(self, prompt: int) -> None:
        """Forget a prompt's tokens, though not how many random numbers it drew."""
        self._seen.close(prompt)

    def next_tokens(self, prompts: Sequence[int], logits: torch.Tensor) -> list[int]:
        """The next token of each of some prompts that are open, from their logits [rows, vocabulary]."""
        if not self._settings.do_sample and self._penalty is None:
            return logits.argmax(-1).tolist()
        scores = logits.to(torch.float32, copy=True)
        if self._penalty is not None:
            scores = self._penalty(self._seen.rows(prompts), scores)
        if self._settings.do_sample:
            # None of them looks at the ids.
            scores = self._settings.warpers(torch.empty((len(prompts), 0), dtype=torch.long, device=scores.device), scores)
            tokens = self._draw(prompts, scores).tolist()
        else:
            tokens = scores.argmax(-1).tolist()
        if self._penalty is not None:
            self._seen.add(prompts, tokens)
        return tokens

    def _draw(self, prompts: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """One token a row, by the inverse of the distribution function: one number a token, the same on every device."""
        draws = [torch.rand((), dtype=torch.float64, generator=self._generators[prompt]) for prompt in prompts]
        # In float64 a sum over any vocabulary loses no token.
        below = torch.softmax(scores, -1).cumsum(-1, dtype=torch.float64)
        wanted = torch.stack(draws).to(scores.device)[:, None] * below[:, -1:]
        return torch.searchsorted(below, wanted, right=True)[:, 0].clamp_(max=scores.shape[-1] - 1)


class Stopping:
    """Says which answers are at their end, and why.

    Args:
        settings: of the call. tokenizer: for stop strings.

    Raises:
        ValueError: stop strings without a tokenizer.
    """

    def __init__(self, settings: Settings, tokenizer: Any):
        self._settings = settings
        self._strings: StopStringCriteria | None = None
        if settings.stop_strings:
            if tokenizer is None:
                raise ValueError("generate_many: stop_strings need the tokenizer: pass tokenizer=")
            self._strings = StopStringCriteria(tokenizer, list(settings.stop_strings))

    def reasons(self, keys: Sequence[bytearray], num_new: Sequence[int], tokens: Sequence[int]) -> list[FinishReason | None]:
        """Why each answer ends, None if it does not.

        Args:
            keys: all tokens of each row, int32 little-endian. num_new: how many of them are new. tokens: the last of each.
        """
        stopped = [False] * len(keys) if self._strings is None else self._ends_in_string(keys)
        reasons: list[FinishReason | None] = []
        for token, count, is_stopped in zip(tokens, num_new, stopped, strict=True):
            is_full = count >= self._settings.max_new_tokens
            reasons.append("eos" if token in self._settings.eos else "stop" if is_stopped else "length" if is_full else None)
        return reasons

    def _ends_in_string(self, keys: Sequence[bytearray]) -> list[bool]:
        assert self._strings is not None
        stopped = [False] * len(keys)
        # A stop string has at most so many tokens as characters; a row that is shorter goes by itself.
        width = self._strings.maximum_token_len
        rows: dict[int, list[int]] = {}
        for row, key in enumerate(keys):
            rows.setdefault(min(width, len(key) // 4), []).append(row)
        for length, members in rows.items():
            last = b"".join([keys[row][-4 * length :] for row in members])
            ids = torch.from_numpy(np.frombuffer(last, dtype="<i4").astype(np.int64).reshape(len(members), length))
            for row, verdict in zip(members, self._strings(ids, None).tolist(), strict=True):
                stopped[row] = verdict
        return stopped


class _SeenTokens:
    """Which tokens each open row holds, each once, as one tensor: a row's are followed by its first one as often as needed."""

    def __init__(self, device: torch.device):
        self._ids = torch.zeros((0, 0), dtype=torch.long, device=device)
        self._known: dict[int, set[int]] = {}
        self._slots: dict[int, int] = {}
        self._free: list[int] = []

    def open(self, prompt: int, tokens: np.ndarray) -> None:
        unique = np.unique(tokens)
        if not self._free:
            self._free.append(len(self._slots))
        slot = self._slots[prompt] = self._free.pop()
        self._known[prompt] = set(unique.tolist())
        self._reserve(slot + 1, len(unique))
        self._ids[slot] = int(unique[0])
        self._ids[slot, : len(unique)] = torch.from_numpy(unique.astype(np.int64)).to(self._ids.device)

    def close(self, prompt: int) -> None:
        if prompt in self._slots:
            self._free.append(self._slots.pop(prompt))
            del self._known[prompt]

    def rows(self, prompts: Sequence[int]) -> torch.Tensor:
        """int64 [prompts, most tokens]."""
        return self._ids[[self._slots[prompt] for prompt in prompts]]

    def add(self, prompts: Sequence[int], tokens: Sequence[int]) -> None:
        new = [(prompt, token) for prompt, token in zip(prompts, tokens, strict=True) if token not in self._known[prompt]]
        if not new:
            return
        self._reserve(0, 1 + max(len(self._known[prompt]) for prompt, _ in new))
        places = [(self._slots[prompt], len(self._known[prompt]), token) for prompt, token in new]
        slots, columns, ids = torch.tensor(places, device=self._ids.device).unbind(1)
        self._ids[slots, columns] = ids
        for prompt, token in new:
            self._known[prompt].add(token)

    def _reserve(self, num_slots: int, width: int) -> None:
        """Room for so many slots of so many tokens; new columns repeat each slot's first token."""
        slots, columns = self._ids.shape
        if width > columns:
            added = self._ids[:, :1].expand(slots, 2 * width - columns) if columns else self._ids.new_zeros(slots, 2 * width)
            self._ids = torch.cat([self._ids, added], 1)
        if num_slots > slots:
            self._ids = torch.cat([self._ids, self._ids.new_zeros(num_slots, self._ids.shape[1])])


def _warpers(config: GenerationConfig) -> LogitsProcessorList:
    """The processors of drawn tokens, in the order in which generate() has them."""
    warpers = LogitsProcessorList()
    if config.temperature is not None and config.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k is not None and config.top_k != 0:
        warpers.append(TopKLogitsWarper(top_k=config.top_k, min_tokens_to_keep=1))
    if config.top_p is not None and config.top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p=config.top_p, min_tokens_to_keep=1))
    if config.min_p is not None:
        warpers.append(MinPLogitsWarper(min_p=config.min_p, min_tokens_to_keep=1))
    return warpers


def _require_supported(config: GenerationConfig) -> None:
    defaults = GenerationConfig()
    # From 5.0 on a config leaves out what is not set, and the defaults are told by a function.
    filled_in: dict[str, Any] = getattr(defaults, "_get_default_generation_params", dict)()
    for name, value in vars(config).items():
        if name.startswith("_") or name in SUPPORTED or name in _MEANINGLESS:
            continue
        default = getattr(defaults, name, None)
        default = filled_in.get(name) if default is None else default
        if value is not None and value != default and not (value is False and not default):
            raise ValueError(
                f"generate_many: {name}={value!r} is not supported; supported are {', '.join(SUPPORTED)}: leave it out of "
                "generation_config (and of model.generation_config), or use generate()"
            )
