"""What is particular to a family: soft caps, windows, quantised weights, and what is refused. tests/test_modes.py compares answers."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers

import radixkv
from radixkv.integration.families import SUPPORTED
from tests.families import FAMILIES, family_class, tiny_model
from tests.models import counted_tokens, prompt

GREEDY = {"max_new_tokens": 16, "do_sample": False}


def test_the_table_is_complete() -> None:
    assert {f"{prefix}ForCausalLM" for prefix, _ in FAMILIES.values()} == set(SUPPORTED)


@pytest.mark.parametrize("backend_attention", ["eager", "sdpa"] if family_class("Gemma2")._supports_sdpa else ["eager"])
def test_scores_are_capped_where_the_models_own_attention_caps_them(backend_attention: str) -> None:
    reference, patched = (tiny_model("Gemma2", attn_implementation=backend_attention) for _ in range(2))
    assert reference.config._attn_implementation == backend_attention
    radixkv.patch_model(patched, num_blocks=60, block_size=16)
    ids = prompt(40, seed=6)[None]
    wanted = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    expected = reference.generate(ids, **wanted)
    for _ in range(2):
        got = patched.generate(ids, **wanted)
        assert torch.equal(got.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=5e-4, rtol=2e-4)


def test_a_family_whose_attention_cannot_be_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers 4 that of Qwen2-MoE, which looks nothing up."""
    model = tiny_model("Qwen2-MoE")
    monkeypatch.delattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS", raising=False)
    with pytest.raises(NotImplementedError, match="install a newer release"):
        radixkv.patch_model(model)


def test_other_classes_are_refused_with_the_list() -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)
    with pytest.raises(TypeError, match="GPT2LMHeadModel is not supported; supported classes: Qwen2ForCausalLM, .*Gemma3ForCausalLM"):
        radixkv.patch_model(transformers.GPT2LMHeadModel(config))


@pytest.mark.parametrize(("family", "setting"), [("Gemma3", "use_bidirectional_attention"), ("Qwen2-MoE", "output_router_logits")])
def test_settings_that_a_packed_forward_cannot_serve(family: str, setting: str) -> None:
    model = tiny_model(family)
    setattr(model.config, setting, True)
    with pytest.raises(NotImplementedError, match=f"{setting}|install a newer release"):
        radixkv.patch_model(model)


class _Int8Linear(torch.nn.Module):
    """A linear layer with weights of 8 bits and a scale for each row, as quantised checkpoints have them."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight * self.scale, self.bias)


def quantised(model: Any) -> Any:
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, _Int8Linear(child))
    return model


def test_quantised_weights() -> None:
    """Attention's projections may be of any kind; a changed scale makes stale what was computed with it."""
    reference, patched = (quantised(tiny_model("Qwen2")) for _ in range(2))
    radixkv.patch_model(patched, num_blocks=60, block_size=16)
    ids = prompt(40, seed=8)[None]
    for computed in (40, 1):
        with counted_tokens(patched) as rows:
            assert torch.equal(patched.generate(ids, **GREEDY), reference.generate(ids, **GREEDY))
        assert rows[0] == computed
    for model in (reference, patched):
        model.model.layers[0].self_attn.k_proj.scale.mul_(2)
    with counted_tokens(patched) as rows:
        assert torch.equal(patched.generate(ids, **GREEDY), reference.generate(ids, **GREEDY))
    assert rows[0] == 40
