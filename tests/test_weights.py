"""Changed weights are noticed, whatever changed them, and K/V of other weights is never served."""

from __future__ import annotations

import copy
import timeit
from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn

import radixkv
from radixkv.integration.model_weights import ModelWeights
from radixkv.integration.weights import WeightsWatch
from tests.calls import count_calls
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
    watch, other = WeightsWatch(changed.named_modules()), WeightsWatch(model.named_modules())
    assert not watch.changed()
    with torch.no_grad() if change is not optimizer_step else torch.enable_grad():
        change(changed)
    assert watch.changed() and not other.changed()
    assert watch.difference() and not other.difference()
    assert not WeightsWatch(changed.named_modules()).changed()


def test_what_is_no_change_is_not_noticed(model):
    """Reading, gradients, modes and the order of calls leave the cache alone."""
    watched = copy.deepcopy(model)
    watch = WeightsWatch(watched.named_modules())
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
        watch = WeightsWatch(model.named_modules())
        assert not watch.changed()
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    assert watch.changed()


def test_the_check_does_not_take_python_a_step_per_parameter():
    """It ran through all modules and parameters in Python, 300 us for 30 layers."""
    steps = []
    for num_layers in (2, 30):
        watch = WeightsWatch(tiny_qwen2(num_layers=num_layers, heads=(1, 1, 32)).named_modules())
        steps.append(count_calls(watch.changed))
    assert steps[0] == steps[1] <= 20


def test_the_check_takes_little_more_than_a_look_at_each_tensor():
    """It took half as long again as reading every tensor's count of writes and address, 61 us for the 363 parameters of 30 layers."""
    model = tiny_qwen2(num_layers=30, heads=(1, 1, 32))
    weights, tensors = ModelWeights(model), list(model.parameters())

    def look() -> None:
        list(map(attrgetter("_version"), tensors))
        list(map(Tensor.data_ptr, tensors))

    def check() -> None:
        assert weights.look(model) is None

    # In turns, a few each time, so that whatever else runs disturbs both alike, and the fastest of many is hardly disturbed.
    looks, checks = zip(*((timeit.timeit(look, number=10), timeit.timeit(check, number=10)) for _ in range(600)), strict=True)
    assert len(tensors) == 363 and min(checks) <= 1.35 * min(looks)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (written, "lm_head.weight was written to"),
        (lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()), "lm_head.weight was written to"),
        (lambda model: replaced(model, "lm_head.weight", nn.Parameter(torch.ones(2))), "lm_head.weight was added, replaced or removed"),
        (lambda model: replaced(model, f"{ADAPTER}.scale", 0.5), f"attribute scale of {ADAPTER} (a LowRank) was changed"),
        (lambda model: replaced(model, f"{ADAPTER}.scale", torch.ones(2)), f"attribute scale of {ADAPTER} (a LowRank) was changed"),
        (lambda model: replaced(model, f"{ADAPTER}.calls", 1), f"{ADAPTER} (a LowRank) got or lost an attribute"),
    ],
)
def test_what_has_changed_is_told(change, reason, caplog):
    """A module that counts its calls makes every prefix stale, call after call, and nothing said so."""
    model = tiny_qwen2()
    model.model.layers[1].self_attn.v_proj = LowRank(model.model.layers[1].self_attn.v_proj)
    patched = radixkv.patch_model(model, num_blocks=20, block_size=16)
    ids = prompt(20, seed=1)[None]
    patched.generate(ids, **GREEDY)
    assert patched.radixkv.last_change is None
    with torch.no_grad(), caplog.at_level("INFO", "radixkv"):
        change(patched)
        patched.radixkv.match_prefix(ids[0])
    assert patched.radixkv.last_change == reason and reason in caplog.text


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
