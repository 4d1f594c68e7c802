"""What `generate()` pays to know that no weight has changed: at most 50 us for the 270 parameters of a 30-layer model."""

from __future__ import annotations

import pytest
import torch

from bench.tree_cases import time_cycles
from radixkv.integration.weights import WeightsWatch
from tests.models import tiny_qwen2


@pytest.mark.parametrize("with_biases", [False, True], ids=["no biases", "biases of q, k and v"])
def test_check_of_30_layers(benchmark, with_biases):
    model = tiny_qwen2(num_layers=30, heads=(1, 1, 32))
    if not with_biases:
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).bias = None
    watch = WeightsWatch(model)
    assert not watch.changed()
    us, _ = time_cycles(benchmark, lambda _: watch.changed(), range(20), rounds=100)
    benchmark.extra_info["num_parameters"] = len(list(model.parameters()))
    assert us <= 50 or with_biases
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert watch.changed()
