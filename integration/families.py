"""The model families that radixkv attaches to, and what it needs to know of a model of one."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from radixkv.integration.placement import layer_devices

# Class name: what its tests cover.
SUPPORTED = {
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5 and models distilled into them; with and without sliding windows",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-MoE; routing is by token, so packing does not change it",
    "Qwen3ForCausalLM": "Qwen3; norms of q and k before the rotation",
    "LlamaForCausalLM": "Llama 2, 3, SmolLM2 and models of that form",
    "MistralForCausalLM": "Mistral; a sliding window in every layer, or none",
    "Gemma2ForCausalLM": "Gemma 2; windows in every other layer, soft-capped scores where the model's own attention caps them",
    "Gemma3ForCausalLM": "Gemma 3, text; windows in five of six layers, which rotate by another base",
}

# Rotary embeddings that rotate a position alike whatever the length of the sequence; only then may K be reused in a longer one.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


# Settings of a configuration under which K/V of a token would not depend on the tokens up to it alone, or a forward would not be packed.
_UNSUPPORTED_SETTINGS = {
    "use_bidirectional_attention": "a token attends to later ones, so that no prefix can be reused",
    "output_router_logits": "the loss of the routers is of padded batches; set it to False for generation",
}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model's attention, in what type it computes, and on which device in each layer."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]

    @property
    def device(self) -> torch.device:
        """That of the first layer, where what belongs to no layer is put."""
        return self.devices[0]


def model_shape(model: PreTrainedModel) -> ModelShape:
    """Read a supported model's shape.

    Raises:
        TypeError: not a model of a supported class.
        NotImplementedError: its weights lie where they cannot be computed with, see `layer_devices`; its rotary embedding depends on the
            sequence's length; or it is a class that the installed transformers does not allow to attach to.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or name not in SUPPORTED:
        raise TypeError(f"patch_model: {name} is not supported; supported classes: {', '.join(SUPPORTED)}")
    own = next((base for base in type(model).__mro__ if base.__module__.startswith("transformers.models.")), None)
    if own is not None and not hasattr(sys.modules[own.__module__], "ALL_ATTENTION_FUNCTIONS"):
        raise NotImplementedError(
            f"patch_model: {name} of transformers {transformers.__version__} does not look its attention up where it can be replaced: "
            "install a newer release"
        )
    config = model.config
    devices = layer_devices(model)
    for rope_type in _rope_types(config):
        if rope_type not in ROPE_TYPES:
            raise NotImplementedError(
                f"patch_model: rotary embeddings of type {rope_type!r} are not supported, because they change with the length of a prompt; "
                f"supported types: {', '.join(ROPE_TYPES)}"
            )
    for field, meaning in _UNSUPPORTED_SETTINGS.items():
        if getattr(config, field, None):
            raise NotImplementedError(f"patch_model: {field}={getattr(config, field)!r} is not supported: {meaning}")
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=model.dtype,
        devices=devices,
    )


def _rope_types(config: PretrainedConfig) -> list[str]:
    """The type of each rotary embedding of a model: mostly one, of some families one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return [str(parameters.get("rope_type", parameters.get("type", "default"))) for parameters in each]
