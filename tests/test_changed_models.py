"""Models whose modules were copied, shared, hooked or nested in ways that transformers allows: the tokens are the unpatched model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import radixkv
from tests.models import prompt, tiny_qwen2

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
BACKENDS = ["torch", "triton"]


def own_config(model: Any) -> None:
    model.config = copy.deepcopy(model.config)


def copied_layer(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    model.model.layers[1].self_attn.layer_idx = 1


def deeper(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[2].self_attn.layer_idx = 2
    model.config.num_hidden_layers = 3
    model.config.layer_types = ["full_attention"] * 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", [own_config, copied_layer, deeper])
def test_layers_that_read_another_configuration(change: Callable[[Any], None], backend: str) -> None:
    model, stock = tiny_qwen2(seed=3, num_layers=2), tiny_qwen2(seed=3, num_layers=2)
    change(model)
    change(stock)
    radixkv.patch_model(model, num_blocks=16, block_size=16, backend=backend)
    rows = prompt(20, seed=1)[None]
    for _ in range(2):
        assert torch.equal(model.generate(rows, **GREEDY), stock.generate(rows, **GREEDY))


def test_two_models_that_share_a_body() -> None:
    first, second, stock = (tiny_qwen2(seed=3, num_layers=2) for _ in range(3))
    second.model = first.model
    for model in (first, second):
        radixkv.patch_model(model, num_blocks=16, block_size=16, backend="torch")
    rows = prompt(20, seed=1)[None]
    for model in (first, second, first):
        assert torch.equal(model.generate(rows, **GREEDY), stock.generate(rows, **GREEDY))


def test_a_layer_index_that_occurs_twice_is_an_error() -> None:
    model = tiny_qwen2(seed=3, num_layers=2)
    model.model.layers[1].self_attn.layer_idx = 0
    radixkv.patch_model(model, num_blocks=16, block_size=16, backend="torch")
    with pytest.raises(RuntimeError, match="1 layers stored their K/V and 2 attended to the pool, of 2"):
        model.generate(prompt(20, seed=1)[None], **GREEDY)
    model.radixkv.check()


@pytest.mark.parametrize("kind", ["kept", "expanded", "strided"])
def test_hooks_on_projections_see_what_they_would_without_us(kind: str) -> None:
    """What q_proj returns is its own: it may be kept, shared or strided."""
    seen: dict[str, list[torch.Tensor]] = {"stock": [], "patched": []}

    def hook(name: str) -> Callable[..., Any]:
        def on_output(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor | None:
            seen[name].append(output)
            if kind == "expanded":
                return output[:, :1].expand_as(output)
            return torch.stack([output, output], -1)[..., 0] if kind == "strided" else None

        return on_output

    rows, tokens = prompt(20, seed=1)[None], {}
    for name in seen:
        model = tiny_qwen2(seed=3, num_layers=2)
        if name == "patched":
            radixkv.patch_model(model, num_blocks=16, block_size=16, backend="triton")
        for layer in model.model.layers:
            layer.self_attn.q_proj.register_forward_hook(hook(name))
        tokens[name] = model.generate(rows, **GREEDY)
    assert torch.equal(tokens["stock"], tokens["patched"])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(seen["stock"], seen["patched"], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_generate_inside_a_layer(backend: str) -> None:
    """A hook on a layer may generate with the same model, in the middle of a step."""
    model, stock = tiny_qwen2(seed=3, num_layers=2), tiny_qwen2(seed=3, num_layers=2)
    radixkv.patch_model(model, num_blocks=32, block_size=16, backend=backend)
    rows, inner = prompt(20, seed=1)[None], prompt(33, seed=2)[None]
    expected, expected_inner = stock.generate(rows, **GREEDY), stock.generate(inner, **GREEDY)
    inside: list[Any] = []

    def generate_too(*_: Any) -> None:
        if len(inside) < 12 and not inside.count(None):
            inside.append(None)
            result = model.generate(inner, **GREEDY)
            inside[-1] = result

    model.model.layers[0].register_forward_hook(generate_too)
    assert torch.equal(model.generate(rows, **GREEDY), expected)
    assert len(inside) == 5 and all(torch.equal(result, expected_inner) for result in inside)
    model.radixkv.check()


def test_a_patched_model_inside_another_is_its_own() -> None:
    outer, draft = tiny_qwen2(seed=3, num_layers=2), tiny_qwen2(seed=4, num_layers=2)
    for model in (outer, draft):
        radixkv.patch_model(model, num_blocks=16, block_size=16, backend="triton")
    outer.draft = draft
    classes = [type(module) for module in draft.modules()]
    radixkv.unpatch_model(outer)
    assert [type(module) for module in draft.modules()] == classes
    assert radixkv.unpatch_model(draft) is draft


@pytest.mark.parametrize("keyword", ["exact", "cuda_graphs"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_switches_are_true_or_false(keyword: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{keyword} must be True or False, got {value!r}"):
        radixkv.patch_model(tiny_qwen2(seed=3, num_layers=1), num_blocks=8, **{keyword: value})
