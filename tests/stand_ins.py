"""Small models and a tokenizer in place of those that a document names: no test downloads anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tests.models import tiny_qwen2

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<pad>", "<bos>", "<eos>")  # their ids are PAD, BOS and EOS of tests/models.py
# Keywords of from_pretrained that say where and how weights are held; any other one would be ignored here unseen.
PLACEMENT = {"dtype", "device_map", "attn_implementation"}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, so that any text can be written and read; pads on the left, and has a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, padding_side="left", chat_template=CHAT_TEMPLATE
    )


def small_model(tokenizer: Any) -> Qwen2ForCausalLM:
    """A Qwen2 of random weights for that tokenizer; an answer that nobody limits has 8 tokens."""
    model = tiny_qwen2(num_layers=2, vocab_size=len(tokenizer)).eval()
    model.generation_config.max_new_tokens = 8
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def stand_in_for_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `AutoModelForCausalLM` and `AutoTokenizer` give the small ones for every name that is no folder."""
    load_model = transformers.AutoModelForCausalLM.from_pretrained
    load_tokenizer = transformers.AutoTokenizer.from_pretrained

    def model(name: Any, **options: Any) -> Any:
        if Path(name).is_dir():
            return load_model(name, **options)
        assert options.keys() <= PLACEMENT, f"the stand-in for {name} knows nothing of {sorted(options.keys() - PLACEMENT)}"
        dtype = options.get("dtype", torch.float32)
        return small_model(byte_tokenizer()).to(torch.float32 if dtype == "auto" else dtype)

    def tokenizer(name: Any, **options: Any) -> Any:
        if Path(name).is_dir():
            return load_tokenizer(name, **options)
        assert not options, f"the stand-in for the tokenizer of {name} knows nothing of {sorted(options)}"
        return byte_tokenizer()

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", tokenizer)
