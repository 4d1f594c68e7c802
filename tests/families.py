"""Small random models of every supported family, as varied as `tests.models.tiny_qwen2`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from radixkv.bench.models import spread_weights
from tests.models import BOS, EOS, PAD, TRANSFORMERS_MAJOR, VOCAB_SIZE

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 48, "sliding_window": 24, "hidden_activation": "gelu_pytorch_tanh"}

# Name in tests: the family's prefix in transformers, and what is particular to the model.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("Qwen2", {}),
    "Qwen2 with windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "Qwen2-MoE": (
        "Qwen2Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    ),
    "Qwen3": ("Qwen3", {"head_dim": 64}),
    "Llama": ("Llama", {}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mistral with windows": ("Mistral", {"sliding_window": 24}),
    "Gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}),
    "Gemma3": ("Gemma3", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
}


# Its attention can be replaced from transformers 5 on.
USABLE = [name for name in FAMILIES if name != "Qwen2-MoE" or TRANSFORMERS_MAJOR >= 5]


def family_class(prefix: str) -> type[PreTrainedModel]:
    return getattr(transformers, f"{prefix}ForCausalLM")


def tiny_model(name: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A model of a family in float32, whose greedy continuation varies."""
    prefix, particular = FAMILIES[name]
    make_config: Callable[..., Any] = getattr(transformers, "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    config = make_config(**{**COMMON, **particular, **settings})
    config.name_or_path = name
    torch.manual_seed(seed)
    model = spread_weights(family_class(prefix)(config))
    model.generation_config.cache_implementation = None  # Gemma asks for one of its own in some releases
    return model
