"""Adapters of peft: each has a cache of its own, which is found again when it is switched on again, and stale when it has changed."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

from radixkv.events import Evicted
from tests.adapted import CHANGES, GREEDY, KINDS, WAYS, Adapted, layers, lora, scale_through_new_dict, step
from tests.models import prompt

pytestmark = pytest.mark.usefixtures("any_peft")


@pytest.mark.parametrize(
    ("kind", "way"), [*((kind, "peft") for kind in KINDS), ("LoRA", "transformers"), ("modules that are saved", "transformers")]
)
def test_each_adapter_finds_its_own_again(kind: str, way: str) -> None:
    """Switching dropped everything, the prefixes of the adapter that was switched off included."""
    adapted = Adapted(way, KINDS[kind], KINDS[kind])
    adapted.fill("one", "two", None)
    answers = []
    for name in ("one", None, "two", "one", "two", None):
        adapted.switch(name)
        assert adapted.reused() == 49, name
        answers.append(adapted.expected())
    assert len({tuple(answer[0].tolist()) for answer in answers}) == 3


@pytest.mark.parametrize(("change", "way"), [*((change, "peft") for change in CHANGES), (step, "transformers")])
def test_a_changed_adapter_loses_its_cache_and_no_other_does(change: Any, way: str) -> None:
    adapted = Adapted(way, lora(), lora())
    adapted.fill("one", "two", None)
    before = adapted.handle.full_namespace()
    change(adapted, "two")
    for name, reused in {"one": 49, None: 49, "two": 0}.items():
        adapted.switch(name)
        assert adapted.reused() == reused, name
    assert adapted.reused() == 49
    assert adapted.handle.full_namespace()[0] == before[0]
    assert ".two" in adapted.handle.last_change or "scaling" in adapted.handle.last_change


def test_a_dictionary_of_scales_that_was_replaced() -> None:
    adapted = Adapted("peft", lora(), lora())
    adapted.fill("one", "two")
    scale_through_new_dict(adapted, "two")
    assert adapted.reused() == 0


@pytest.mark.parametrize("way", WAYS)
def test_changed_weights_of_the_model_are_every_adapters(way: str) -> None:
    adapted = Adapted(way, lora(), lora())
    adapted.fill("one", "two", None)
    with torch.no_grad():
        adapted.patched.model.layers[1].mlp.up_proj.weight.mul_(-1)
    for name in ("one", "two", None):
        adapted.switch(name)
        assert adapted.reused() == 0, name


def test_an_adapter_that_is_loaded_under_the_name_of_another(tmp_path: Any) -> None:
    adapted = Adapted("peft", lora(), lora())
    adapted.fill("one", "two")
    adapted.model.save_pretrained(tmp_path, selected_adapters=["one"])
    adapted.model.load_adapter(tmp_path / "one", "two")
    adapted.switch("two")
    assert adapted.reused() == 0
    answer = adapted.expected()
    adapted.switch("one")
    assert adapted.reused() == 49 and torch.equal(adapted.expected(), answer)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_deleted_adapter_computed_goes_first(way: str) -> None:
    adapted = Adapted(way, lora(), lora(), num_blocks=12)
    adapted.fill("two", "one")
    adapted.model.delete_adapter("two")
    assert adapted.reused() == 49
    evicted: list[Evicted] = []
    adapted.handle.on_event(lambda event: evicted.append(event) if isinstance(event, Evicted) else None)
    adapted.patched.generate(prompt(100, seed=9)[None], **GREEDY)
    assert {adapters[1][0][0] for _, adapters, *_ in (event.namespace for event in evicted)} == {"two"}
    torch.manual_seed(5)
    adapted.model.add_adapter(*(("two", lora()) if way == "peft" else (lora(), "two")))
    adapted.switch("two")
    assert adapted.reused() == 0


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_more_takes_nothing_from_the_others(way: str) -> None:
    adapted = Adapted(way, lora(), lora())
    adapted.fill("one", "two")
    adapted.model.add_adapter(*(("three", lora(r=8)) if way == "peft" else (lora(r=8), "three")))
    adapted.fill("three")
    for name in ("one", "two"):
        adapted.switch(name)
        assert adapted.reused() == 49, name


def test_several_adapters_at_once() -> None:
    """Which they are, and their order, make the namespace; a change of one is a change of all that it takes part in."""
    adapted = Adapted("peft", lora(), lora())
    adapted.fill("one", "two")
    for names in (["one", "two"], ["two", "one"]):
        adapted.model.base_model.set_adapter(names)
        assert adapted.reused() == 0 and adapted.reused() == 49
    step(adapted, "one")
    for reused, names in ((0, ["one", "two"]), (0, ["one"]), (49, ["two"]), (0, ["two", "one"])):
        adapted.model.base_model.set_adapter(names)
        assert adapted.reused() == reused, names


def test_layers_that_disagree() -> None:
    """The same two adapters, each in the other's layers, are another model."""
    adapted = Adapted("peft", lora(), lora())
    adapted.fill("one", "two")
    ours = layers(adapted)
    for first, second, reused in (("one", "two", 0), ("two", "one", 0), ("one", "two", 49), ("two", "two", 49)):
        for layer in ours[:2]:
            layer.set_adapter(first)
        for layer in ours[2:]:
            layer.set_adapter(second)
        assert adapted.reused() == reused, (first, second)
    ours[0].enable_adapters(False)
    assert adapted.reused() == 0


def test_an_adapter_of_other_layers_than_the_first() -> None:
    """It puts layers into the model, which is then another; from there on each has its own."""
    adapted = Adapted("peft", lora(), lora(target_modules=["k_proj", "v_proj"], modules_to_save=["lm_head"]))
    adapted.fill("one", "two", None)
    for name in ("one", "two", None):
        adapted.switch(name)
        assert adapted.reused() == 49, name


def test_merged_adapters() -> None:
    adapted = Adapted("peft", lora(), lora())
    adapted.fill("one", "two")
    adapted.model.merge_adapter(["two"])
    assert adapted.reused() == 0 and adapted.reused() == 49
    adapted.model.unmerge_adapter()
    for name in ("two", "one"):
        adapted.switch(name)
        assert adapted.reused() == 0, name


class Stubborn(peft.tuners.lora.layer.Linear):  # type: ignore[name-defined]
    """A layer of someone's own, of which nobody knows how it uses its adapters: this one uses all."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = super().forward(x, *args, **kwargs)
        return result + sum(self.lora_B[name](self.lora_A[name](x)) for name in self.lora_A)


@pytest.mark.parametrize("kind", ["VeRA", "a subclass"])
def test_layers_that_are_not_known_change_everything(kind: str) -> None:
    config = peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"]) if kind == "VeRA" else lora()
    adapted = Adapted("peft", config, config)
    if kind == "a subclass":
        for layer in layers(adapted):
            layer.__class__ = Stubborn
    adapted.fill("one", "two")
    step(adapted, "one")
    assert adapted.reused() == 0
    adapted.switch("one")
    assert adapted.reused() == 0
