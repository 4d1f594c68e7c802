"""The model families that radixkv attaches to, and what it needs to know of a model of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

# Class name: what its tests cover.
SUPPORTED = {"Qwen2ForCausalLM": "Qwen2, Qwen2.5 and models distilled into them; with and without sliding windows"}

# Rotary embeddings that rotate a position alike whatever the length of the sequence; only then may K be reused in a longer one.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model's attention, and where and in what type it computes."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def model_shape(model: PreTrainedModel) -> ModelShape:
    """Read a supported model's shape.

    Raises:
        TypeError: not a model of a supported class.
        NotImplementedError: its layers are spread over several devices, or its rotary embedding depends on the sequence's length.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or name not in SUPPORTED:
        raise TypeError(f"patch_model: {name} is not supported; supported classes: {', '.join(SUPPORTED)}")
    config = model.config
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or "meta" in {device.type for device in devices}:
        raise NotImplementedError(
            f"patch_model: all weights must lie on one device, this model's lie on {', '.join(sorted(map(str, devices)))}: "
            "load it without device_map, or with everything on one device"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise NotImplementedError(
            f"patch_model: rotary embeddings of type {rope_type!r} are not supported, because they change with the length of a prompt; "
            f"supported types: {', '.join(ROPE_TYPES)}"
        )
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=model.dtype,
        device=devices.pop(),
    )
