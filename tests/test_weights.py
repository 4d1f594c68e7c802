"""Changed weights are noticed, whatever changed them, and K/V of other weights is never served."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import radixkv
from radixkv.integration.weights import WeightsWatch
from tests.models import prompt, tiny_qwen2

GREEDY = {"max_new_tokens": 8, "do_sample": False}


class LowRank(nn.Module):
    """An adapter by hand: a linear layer, and beside it a product of two thin ones times a scale."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = 1.0
        self.active = ["default"]
        self.settings = {"default": {"ranks": (rank, rank)}}

    def forward(self, x):
        return self.base(x) + self.scale * len(self.active) * self.up(self.down(x))


@pytest.fixture(scope="module")
def model():
    """One small model for the changes that can be taken back; with an adapter and a parameter of a single value."""
    model = tiny_qwen2()
    model.model.layers[1].self_attn.v_proj = LowRank(model.model.layers[1].self_attn.v_proj)
    model.model.layers[0].gate = nn.Parameter(torch.ones(1))
    return model


def optimizer_step(model):
    weight = model.model.layers[2].mlp.up_proj.weight
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight]).step()
    weight.grad = None


def loaded(model, **options):
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, **options)


def written(model, how=torch.no_grad):
    with how():
        model.lm_head.weight.copy_(model.lm_head.weight * 2)


def replaced(model, name, new):
    module, _, name = name.rpartition(".")
    setattr(model.get_submodule(module), name, new)


def moved_there_and_back(model):
    model.half()
    model.float()


ADAPTER = "model.layers.1.self_attn.v_proj"
CHANGES = {
    "an optimizer's step": optimizer_step,
    "load_state_dict": loaded,
    "load_state_dict that assigns": lambda model: loaded(model, assign=True),
    "copy_ without gradients": written,
    "copy_ in inference mode": lambda model: written(model, torch.inference_mode),
    "one element": lambda model: model.model.norm.weight.detach().__setitem__(3, 2.0),
    "other data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
    "cast and cast back": moved_there_and_back,
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
    "a replaced parameter": lambda model: replaced(model, "lm_head.weight", nn.Parameter(model.lm_head.weight.detach().clone())),
    "a replaced parameter of one equal value": lambda model: replaced(model, "model.layers.0.gate", nn.Parameter(torch.ones(1))),
    "a parameter of another shape": lambda model: replaced(model, "model.norm.weight", nn.Parameter(torch.ones(3))),
    "a parameter set to None": lambda model: replaced(model, "model.layers.0.self_attn.q_proj.bias", None),
    "a removed parameter": lambda model: delattr(model.model.layers[0], "gate"),
    "a parameter more": lambda model: model.model.norm.register_parameter("bias", nn.Parameter(torch.zeros(8))),
    "the first parameter of a module": lambda model: model.model.layers[2].mlp.register_parameter("sink", nn.Parameter(torch.ones(1))),
    "a parameter put in by hand": lambda model: model.lm_head._parameters.update(bias=nn.Parameter(torch.zeros(997))),
    "a replaced module": lambda model: replaced(model, "model.layers.0.mlp.up_proj", copy.deepcopy(model.model.layers[0].mlp.up_proj)),
    "a module more": lambda model: model.model.layers[0].mlp.up_proj.add_module("extra", nn.Identity()),
    "layers in another order": lambda model: replaced(model, "model.layers", nn.ModuleList(reversed(model.model.layers))),
    "an adapter": lambda model: replaced(model, "model.layers.0.self_attn.k_proj", LowRank(model.model.layers[0].self_attn.k_proj)),
    "an adapter's scale": lambda model: replaced(model, f"{ADAPTER}.scale", 0.5),
    "an adapter's list": lambda model: model.get_submodule(ADAPTER).active.append("other"),
    "an adapter's nested setting": lambda model: model.get_submodule(ADAPTER).settings["default"].update(ranks=(4, 8)),
    "a new setting of an adapter": lambda model: replaced(model, f"{ADAPTER}.disabled", True),
    "a setting that is gone": lambda model: delattr(model.get_submodule(ADAPTER), "active"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(model, change):
    changed = copy.deepcopy(model)
    watch, other = WeightsWatch(changed), WeightsWatch(model)
    assert not watch.changed()
    with torch.no_grad() if change is not optimizer_step else torch.enable_grad():
        change(changed)
    assert watch.changed() and not other.changed()
    assert not WeightsWatch(changed).changed()


def test_what_is_no_change_is_not_noticed(model):
    """Reading, gradients, modes and the order of calls leave the cache alone."""
    watched = copy.deepcopy(model)
    watch = WeightsWatch(watched)
    ids = prompt(20, seed=1)[None]
    watched.generate(ids, **GREEDY)
    watched.train()
    watched(ids, labels=ids).loss.backward()
    watched.zero_grad()
    watched.eval()
    watched.requires_grad_(False)
    watched.state_dict()
    copy.deepcopy(watched)
    watched.lm_head.register_forward_hook(lambda module, args, output: None)
    assert not watch.changed()


def test_parameters_made_in_inference_mode_are_watched_as_far_as_they_can_be():
    """They count no writes, and asking for the count raises."""
    with torch.inference_mode():
        model = tiny_qwen2()
        watch = WeightsWatch(model)
        assert not watch.changed()
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    assert watch.changed()


def test_the_check_does_not_take_python_a_step_per_parameter():
    """It ran through all modules and parameters in Python, 300 us for 30 layers."""
    steps = []
    for num_layers in (2, 30):
        watch = WeightsWatch(tiny_qwen2(num_layers=num_layers, heads=(1, 1, 32)))
        steps.append(count_calls(watch.changed))
    assert steps[0] == steps[1] <= 20


def count_calls(operation) -> int:
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        operation()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)


def assert_answers_as_if_fresh(patched, ids):
    """The answer is that of an unpatched copy, the first time and from the cache, which then serves the prompt."""
    fresh = radixkv.unpatch_model(copy.deepcopy(patched)).generate(ids, **GREEDY)
    for _ in range(2):
        assert torch.equal(patched.generate(ids, **GREEDY), fresh)
    before = patched.radixkv.stats().cached_tokens
    patched.generate(ids, **GREEDY)
    assert patched.radixkv.stats().cached_tokens == before + ids.shape[1] - 1
    patched.radixkv.check()
    return fresh


@pytest.fixture
def patched():
    return radixkv.patch_model(tiny_qwen2(), num_blocks=60, block_size=16)


def test_an_adapter_made_by_hand(patched):
    ids = prompt(50, seed=2)[None]
    answers = [assert_answers_as_if_fresh(patched, ids)]
    attention = patched.model.layers[0].self_attn
    attention.v_proj = adapter = LowRank(attention.v_proj)
    for scale in (1.0, 8.0, -8.0):
        adapter.scale = scale
        answers.append(assert_answers_as_if_fresh(patched, ids))
    attention.v_proj = adapter.base
    answers.append(assert_answers_as_if_fresh(patched, ids))
    assert torch.equal(answers[0], answers[-1])
    assert not torch.equal(answers[0], answers[2]) and not torch.equal(answers[2], answers[3])


def test_adapters_of_peft(patched, tmp_path):
    """Added, chosen, turned off, scaled, merged and loaded by peft's own methods."""
    ids = prompt(50, seed=3)[None]
    answers = {"base": assert_answers_as_if_fresh(patched, ids)}

    def answer(name: str) -> None:
        answers[name] = assert_answers_as_if_fresh(patched, ids)

    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = get_peft_model(patched, settings, adapter_name="first")
    assert model.get_base_model() is patched
    answer("a")
    model.add_adapter("b", settings)
    model.set_adapter("b")
    answer("b")
    assert torch.equal(model.generate(input_ids=ids, **GREEDY), answers["b"])
    model.set_adapter("first")
    answer("a again")
    with model.disable_adapter():
        answer("disabled")
    answer("enabled")
    layers: list[Any] = [module for module in patched.modules() if hasattr(module, "set_scale")]
    for layer in layers:
        layer.set_scale("first", 30.0)
    answer("scaled")
    for layer in layers:
        layer.scaling["first"] = -30.0
    answer("scaled through the dict")
    model.merge_adapter(["first"])
    answer("merged")
    model.unmerge_adapter()
    model.save_pretrained(tmp_path, selected_adapters=["b"])
    model.load_adapter(tmp_path / "b", "c")
    model.set_adapter("c")
    answer("loaded")
    assert torch.equal(answers["disabled"], answers["base"])
    assert torch.equal(answers["enabled"], answers["a"]) and torch.equal(answers["a again"], answers["a"])
    assert torch.equal(answers["loaded"], answers["b"])
    distinct = [answers[name] for name in ("base", "a", "b", "scaled", "scaled through the dict")]
    assert all(not torch.equal(one, other) for i, one in enumerate(distinct) for other in distinct[:i])
