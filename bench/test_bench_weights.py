"""What `generate()` pays to know that no weight has changed: at most 50 us for the 363 parameters of a 30-layer model."""

from __future__ import annotations

import peft
import pytest
import torch

from radixkv.bench.models import random_qwen2
from radixkv.bench.tree_cases import time_cycles
from radixkv.integration.model_weights import ModelWeights

# Layers with biases of q, k and v, or without; the parameters that they make; the limit on the time.
MODELS = [
    pytest.param(30, False, 273, 50, id="273 parameters"),
    pytest.param(28, True, 339, 50, id="339 parameters, Qwen2 7B"),
    pytest.param(30, True, 363, 50, id="363 parameters"),
    pytest.param(80, True, 963, None, id="963 parameters, Qwen2 72B"),
]


@pytest.mark.parametrize(("num_layers", "with_biases", "num_parameters", "limit_us"), MODELS)
def test_check(benchmark, num_layers, with_biases, num_parameters, limit_us):
    model = random_qwen2(100, hidden=32, num_layers=num_layers, tie_word_embeddings=False)
    if not with_biases:
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).bias = None
    weights = ModelWeights(model)
    assert len(list(model.parameters())) == num_parameters
    us = time_check(benchmark, weights, model)
    assert limit_us is None or us <= limit_us
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    change = weights.look(model)
    assert change is not None and change.everything


@pytest.mark.parametrize("num_adapters", [1, 4])
def test_check_with_adapters(benchmark, num_adapters):
    """LoRA on q and v of 30 layers; no limit, as peft itself looks at every layer when one is switched."""
    model = random_qwen2(100, hidden=32, num_layers=30, tie_word_embeddings=False)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config, adapter_name="0")
    for i in range(1, num_adapters):
        adapted.add_adapter(str(i), config)
    weights = ModelWeights(model)
    time_check(benchmark, weights, model)
    with torch.no_grad():
        model.model.layers[3].self_attn.q_proj.lora_A["0"].weight.mul_(2)
    change = weights.look(model)
    assert change is not None and not change.everything and dict(change.adapters) == {"0": 1}


def time_check(benchmark, weights, model) -> float:
    def check(_) -> None:
        assert weights.look(model) is None
        weights.selection.namespace()

    us, _ = time_cycles(benchmark, check, range(20), rounds=200)
    benchmark.extra_info["num_parameters"] = len(list(model.parameters()))
    benchmark.extra_info["us"] = us
    return us
