"""Adapters of peft beside everything else: in the middle of answers, by hand, in files, tiers and captured steps, at random."""

from __future__ import annotations

import copy
import random
from typing import Any

import peft
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import radixkv
from radixkv.integration.graphs import DecodeGraphs
from tests.adapted import CHANGES, GREEDY, IDS, KINDS, WAYS, Adapted, lora, set_scale, step
from tests.models import left_pad, prompt, tiny_qwen2
from tests.test_graphs import Recorded
from tests.test_weights import GREEDY as EIGHT
from tests.test_weights import assert_answers_as_if_fresh

pytestmark = pytest.mark.usefixtures("any_peft")


def test_rows_with_adapters_of_their_own() -> None:
    """They were computed with adapters that the namespace did not name, and served to the one that it did."""
    adapted = Adapted("peft", lora(), lora())
    options = {**GREEDY, "adapter_names": ["two"]}
    adapted.switch("two")
    expected = adapted.expected()
    adapted.switch("one")
    assert torch.equal(adapted.model.generate(input_ids=IDS, **options), expected)
    assert adapted.reused() == 0
    ids, mask = left_pad([IDS[0], prompt(30, seed=4)])
    rows = adapted.model.generate(input_ids=ids, attention_mask=mask, **GREEDY, adapter_names=["two", "__base__"])
    assert torch.equal(rows[0], expected[0])


class SwitchAt(LogitsProcessor):
    """Does something to the model when so many tokens were generated."""

    def __init__(self, actions: dict[int, Any]) -> None:
        self.actions, self.calls = actions, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.actions.get(self.calls, lambda: None)()
        self.calls += 1
        return scores


def test_a_switch_in_the_middle_of_an_answer() -> None:
    """Its tokens are of two adapters, and so is its K/V, which belongs into neither's cache."""
    adapted = Adapted("peft", lora(), lora())
    adapted.fill("two", "one")
    ids = prompt(40, seed=8)[None]
    actions = {1: lambda: adapted.switch("two"), 3: lambda: adapted.switch("one")}
    mixed = adapted.patched.generate(ids, **GREEDY, logits_processor=LogitsProcessorList([SwitchAt(actions)]))
    for name in ("one", "two"):
        adapted.switch(name)
        assert adapted.reused(mixed) == 0
    adapted.handle.check()


def test_an_answer_inside_an_answer_with_another_adapter() -> None:
    """The outer one runs with its own adapter all the time, and is stored."""
    adapted = Adapted("peft", lora(), lora())
    ids, inner = prompt(40, seed=8)[None], prompt(30, seed=9)[None]
    answer = adapted.expected(ids)

    def ask_b() -> None:
        adapted.switch("two")
        adapted.patched.generate(inner, **GREEDY)
        adapted.switch("one")

    processors = LogitsProcessorList([SwitchAt({1: ask_b, 3: ask_b})])
    assert torch.equal(adapted.patched.generate(ids, **GREEDY, logits_processor=processors), answer)
    assert adapted.reused(answer) == 43
    adapted.switch("two")
    assert adapted.reused(inner) == 29


def test_by_hand_after_a_switch() -> None:
    """What is looked up, pinned and inserted belongs to the adapter that is switched on then, not to that of the last generate()."""
    adapted = Adapted("peft", lora(), lora(), pin_budget=1.0)
    adapted.fill("one")
    adapted.switch("two")
    assert adapted.handle.match_prefix(IDS[0]).length == 0
    stock = radixkv.unpatch_model(copy.deepcopy(adapted.patched))
    computed = stock.generate(IDS, **GREEDY, return_dict_in_generate=True)
    adapted.switch("one")
    adapted.reused()
    adapted.switch("two")
    held = getattr(computed, "cache", None) or computed.past_key_values
    adapted.handle.insert(computed.sequences, held)
    assert adapted.reused() == 49
    adapted.switch("one")
    with adapted.handle.match_prefix(IDS[0]) as prefix:
        assert prefix.length == 50
        adapted.switch("two")
        with pytest.raises(ValueError, match="prefix_cache is of namespace"):
            adapted.patched.generate(IDS, **GREEDY, prefix_cache=prefix)
        pin = adapted.handle.pin(IDS[0])
        adapted.switch("one")
        kept = adapted.handle.pin(IDS[0])
        step(adapted, "two")
        adapted.reused()
        assert pin.released and not kept.released


def test_an_output_is_inserted_where_it_was_computed() -> None:
    adapted = Adapted("peft", lora(), lora())
    adapted.reused(prompt(20, seed=5)[None])
    outputs = []
    for name in ("one", "two"):
        adapted.switch(name)
        with adapted.handle.match_prefix(IDS[0]) as prefix:
            outputs.append(adapted.patched.generate(IDS, **GREEDY, prefix_cache=prefix, return_dict_in_generate=True))
    step(adapted, "two")
    adapted.reused(prompt(20, seed=6)[None])
    for output in outputs:
        adapted.handle.insert(output)
    assert adapted.reused() == 0
    adapted.switch("one")
    assert adapted.reused() == 49


def test_nothing_crosses_not_even_hits() -> None:
    adapted = Adapted("transformers", lora(), lora())
    adapted.fill("one", "two", None)
    roots = [root for root in adapted.handle.tree.nodes() if root.parent is None]
    hits = {root.namespace_key: sum(child.hits for child in root.children.values()) for root in roots}
    adapted.switch("one")
    adapted.reused()
    after = {root.namespace_key: sum(child.hits for child in root.children.values()) for root in roots}
    assert sorted(after[key] - hits[key] for key in hits) == [0, 0, 1]


def test_explain_tells_of_other_adapters_and_of_older_ones() -> None:
    adapted = Adapted("peft", lora(), lora())
    adapted.fill("one")
    adapted.switch("two")
    adapted.patched.generate(prompt(20, seed=5)[None], **GREEDY)
    assert adapted.handle.explain(IDS[0]).reason == "other namespace"
    adapted.switch("one")
    step(adapted, "one")
    adapted.patched.generate(prompt(20, seed=5)[None], **GREEDY)
    assert adapted.handle.explain(IDS[0]).reason == "older weights"


def test_saved_and_loaded(tmp_path: Any) -> None:
    """Each adapter's prefixes come back as that adapter's, whichever is switched on where they are loaded."""
    adapted, other = (Adapted("peft", lora(), lora()) for _ in range(2))
    adapted.fill("one", "two", None)
    step(adapted, "two")
    step(other, "two")
    adapted.switch("two")
    adapted.reused()
    adapted.handle.save(tmp_path / "prefixes")
    other.switch(None)
    report = other.handle.load(tmp_path / "prefixes")
    assert report.loaded_tokens == 3 * 53
    for name in ("one", "two", None):
        other.switch(name)
        assert other.reused() == 49, name
    set_scale(other, "one")
    with pytest.raises(ValueError, match="settings is"):
        other.handle.load(tmp_path / "prefixes")


def test_second_tier() -> None:
    """Evicted blocks come back to their own adapter, and those of a changed one never do."""
    adapted = Adapted("peft", lora(), lora(), num_blocks=8, host_bytes=1 << 22)
    others = [prompt(90, seed=20 + i)[None] for i in range(2)]
    for name in ("one", "two"):
        adapted.switch(name)
        adapted.reused()
        adapted.reused(others[0])
    adapted.switch("one")
    assert adapted.reused() >= 48
    step(adapted, "two")
    adapted.switch("two")
    assert adapted.reused() == 0


def test_captured_steps_are_each_adapters_own() -> None:
    adapted = Adapted("peft", lora(), lora(), backend="triton")
    adapted.handle.graphs = graphs = DecodeGraphs(Recorded())
    for name in ("one", "two", "one", "two"):
        adapted.switch(name)
        ids = prompt(20, seed=3)[None]
        assert torch.equal(adapted.patched.generate(ids, **GREEDY), adapted.expected(ids))
    assert graphs.num_captures == 2
    step(adapted, "two")
    adapted.patched.generate(prompt(20, seed=3)[None], **GREEDY)
    assert graphs.num_captures == 3


@pytest.mark.parametrize("seed", range(3))
def test_random_switches_and_changes(seed: int) -> None:
    """Whatever is done to the adapters, the answers are those of the model without us."""
    choose = random.Random(seed)
    adapted = Adapted(choose.choice(WAYS), *choose.sample([lora(), lora(use_dora=True), KINDS["modules that are saved"]], 2))
    prompts = [prompt(n, seed=n)[None] for n in (20, 33)]
    reused = 0
    for _ in range(25):
        action = choose.random()
        name = choose.choice(["one", "two"])
        if action < 0.6:
            adapted.switch(choose.choice(["one", "two", None]))
        elif action < 0.8:
            choose.choice(CHANGES)(adapted, name)
        elif action < 0.85:
            with torch.no_grad():
                adapted.patched.model.norm.weight.mul_(1.1)
        reused += adapted.reused(choose.choice(prompts))
    assert reused


def test_adapters_of_peft(tmp_path: Any) -> None:
    """Added, chosen, turned off, scaled, merged and loaded by peft's own methods."""
    patched = radixkv.patch_model(tiny_qwen2(), num_blocks=60, block_size=16)
    ids = prompt(50, seed=3)[None]
    answers = {"base": assert_answers_as_if_fresh(patched, ids)}

    def answer(name: str) -> None:
        answers[name] = assert_answers_as_if_fresh(patched, ids)

    settings = lora()
    torch.manual_seed(1)
    model = peft.get_peft_model(patched, settings, adapter_name="first")
    assert model.get_base_model() is patched
    answer("one")
    model.add_adapter("two", settings)
    model.set_adapter("two")
    answer("two")
    assert torch.equal(model.generate(input_ids=ids, **EIGHT), answers["two"])
    model.set_adapter("first")
    answer("a again")
    with model.disable_adapter():
        answer("disabled")
    answer("enabled")
    scaled: list[Any] = [module for module in patched.modules() if hasattr(module, "set_scale")]
    for layer in scaled:
        layer.set_scale("first", 30.0)
    answer("scaled")
    for layer in scaled:
        layer.scaling["first"] = -30.0
    answer("scaled through the dict")
    model.merge_adapter(["first"])
    answer("merged")
    model.unmerge_adapter()
    model.save_pretrained(tmp_path, selected_adapters=["two"])
    model.load_adapter(tmp_path / "two", "three")
    model.set_adapter("three")
    answer("loaded")
    assert torch.equal(answers["disabled"], answers["base"])
    assert torch.equal(answers["enabled"], answers["one"]) and torch.equal(answers["a again"], answers["one"])
    assert torch.equal(answers["loaded"], answers["two"])
    distinct = [answers[name] for name in ("base", "one", "two", "scaled", "scaled through the dict")]
    assert all(not torch.equal(one, other) for i, one in enumerate(distinct) for other in distinct[:i])
