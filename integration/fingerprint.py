"""What K/V of a model depends on: its weights, its configuration, its rotary embedding; and what gave the token ids their meaning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from radixkv.integration.placement import named_weights
from radixkv.progress import progress_bar

_WORDS_PER_ROW = 1024
# Rows summed at a time, whose products take 8 KB each: on a CPU what stays in its caches, on a GPU what fills it.
_ROWS_CPU, _ROWS_GPU = 256, 8192
# Fields of a configuration that say where a model came from or what is done with its outputs, but not how it computes. What the rotary
# embedding makes of its own fields is looked at itself.
_IRRELEVANT = frozenset(
    {
        "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id",
        "id2label", "initializer_range", "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
        "return_dict", "rope_parameters", "rope_scaling", "rope_theta", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip


def model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """All but the weights that decides a model's K/V, each fact under its name; nothing that depends on where it was loaded from."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    return {
        "model": type(model).__name__,
        "config": {name: value for name, value in config.items() if name not in _IRRELEVANT},
        "rope": _rope_facts(model),
    }


def _rope_facts(model: PreTrainedModel) -> dict[str, Any]:
    """The parameters as configured, and what the rotary embeddings made of them, which alone would do but tells nobody anything."""
    config = model.config
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    facts: dict[str, Any] = {"theta": given.get("rope_theta", getattr(config, "rope_theta", None))}
    facts["type"] = given.get("rope_type", given.get("type", "default"))
    for name, module in model.named_modules():
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, Tensor):
            scaling = getattr(module, "attention_scaling", None)
            # To four digits: devices compute powers that differ in the last bit; a cast to half precision changes the third digit.
            digits = " ".join(f"{frequency:.3e}" for frequency in frequencies.flatten().tolist())
            facts[name] = {"frequencies": hashlib.sha256(digits.encode()).hexdigest(), "attention_scaling": scaling}
    return facts


def digest_weights(model: nn.Module, progress: bool | None = False) -> str:
    """A digest of every byte of a model's parameters and buffers, with their names, types and shapes; the same on every device.

    Each tensor is read as rows of 1,024 32-bit words, and each row summed as sum(word * factor) modulo 2**64, on the device that has it;
    SHA-256 takes in the sums, a 512th of the bytes. Nothing is sampled. All factors are odd and so invertible: a change within any one
    32-bit word always changes its row's sum, and any other change does but for chance, which is 2**-32 at most. It costs one pass over
    the weights: 2 to 4 GB/s on one core of an AMD EPYC, on a GPU a small multiple of the time to read them.

    Args:
        model: whose. progress: see `radixkv.progress.progress_bar`.
    """
    digest = hashlib.sha256()
    sums: dict[torch.device, _RowSums] = {}
    total = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    with torch.no_grad(), progress_bar("digest of the weights", total, progress) as advance:
        for name, tensor in named_weights(model):
            advance(tensor.nbytes)
            if name.rpartition(".")[2] in ("inv_freq", "original_inv_freq"):
                continue  # part of the facts on the rotary embedding
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            if tensor.device not in sums:
                sums[tensor.device] = _RowSums(tensor.device)
            digest.update(sums[tensor.device](tensor.detach()))
    return digest.hexdigest()


def digest_settings(settings: Iterable[tuple[str, Any]]) -> str:
    """A digest of attributes with their names, in any order: numbers, strings and the like, and collections of those."""
    return hashlib.sha256("\n".join(sorted(f"{name} {_readable(value)}" for name, value in settings)).encode()).hexdigest()


def _readable(value: Any) -> str:
    """The same for equal values, however a set or a dictionary was filled."""
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{_readable(name)}: {_readable(part)}" for name, part in value.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_readable, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_readable, value)) + "]"
    return repr(value)


def digest_tokenizer(tokenizer: Any) -> str:
    """A digest of what a tokenizer makes of text: its whole state where it is a fast one, else its class and vocabulary.

    Raises:
        TypeError: it is no tokenizer of transformers.
    """
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise TypeError(f"tokenizer must be a tokenizer of transformers, got {type(tokenizer).__name__}")
    parts = [json.dumps(sorted(tokenizer.get_vocab().items())), json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        parts.append(type(tokenizer).__name__)
    else:
        # Calls with padding or truncation leave their settings in it.
        state = json.loads(backend.to_str())
        parts.append(json.dumps({name: value for name, value in state.items() if name not in ("padding", "truncation")}))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class _RowSums:
    """The sums of the rows of words of a tensor, on one device; with a buffer, because to get one anew takes longer than to sum."""

    def __init__(self, device: torch.device) -> None:
        self._factors = torch.from_numpy(_factors()).to(device)
        num_rows = _ROWS_CPU if device.type == "cpu" else _ROWS_GPU
        self._products = torch.empty(num_rows, _WORDS_PER_ROW, dtype=torch.int64, device=device)

    def __call__(self, tensor: Tensor) -> bytes:
        """Little-endian int64; what does not fill a word is filled up with zeros."""
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        if data.storage_offset() % 4:
            data = data.clone()
        whole = len(data) // (4 * _WORDS_PER_ROW) * (4 * _WORDS_PER_ROW)
        rows = data[:whole].view(torch.int32).view(-1, _WORDS_PER_ROW)
        rest = nn.functional.pad(data[whole:], (0, -(len(data) - whole) % 4)).clone().view(torch.int32)
        sums = torch.empty(len(rows) + 1, dtype=torch.int64, device=data.device)
        for begin in range(0, len(rows), len(self._products)):
            part = rows[begin : begin + len(self._products)]
            products = torch.mul(part, self._factors, out=self._products[: len(part)])
            torch.sum(products, 1, out=sums[begin : begin + len(part)])
        torch.sum(rest * self._factors[: len(rest)], 0, out=sums[-1])
        return sums.cpu().numpy().tobytes()


def _factors() -> np.ndarray:
    """int64 [1024], odd, and otherwise as random as SHAKE-128 makes them."""
    return np.frombuffer(hashlib.shake_128(b"radixkv weights").digest(8 * _WORDS_PER_ROW), "<i8") | 1
