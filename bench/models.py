"""Small models of random weights: what is measured or checked does not depend on what a model says."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def random_qwen2(vocab_size: int, *, hidden: int, num_layers: int, **settings: Any) -> Qwen2ForCausalLM:
    """A Qwen2 of random weights with heads of 64 elements, four query heads to a K/V head, whose answers do not end by themselves."""
    heads = max(1, hidden // 64)
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3 // 64 * 64 or 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape | settings)).eval()
    # Weights as transformers makes them give nearly flat logits, whose greatest rounding decides.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.4 * parameter.shape[1] ** -0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def spread_weights(model: Any) -> Any:
    """Give a model random weights under which its greedy continuation varies and its top two logits lie far apart; returns it.

    It has no end of sequence then: who wants one asks for it.
    """
    deviation = 1.4 / model.config.hidden_size**0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.0 if "embed" in name else deviation)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
    model.generation_config.eos_token_id = None
    return model.eval()
