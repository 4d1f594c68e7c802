"""Adapters of peft: each has a cache of its own, which is found again when it is switched on again, and stale when it has changed."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import radixkv
from radixkv.events import Evicted
from radixkv.integration.graphs import DecodeGraphs
from tests.models import left_pad, prompt, tiny_qwen2
from tests.test_graphs import Recorded
from tests.test_weights import GREEDY as EIGHT
from tests.test_weights import assert_answers_as_if_fresh

peft = pytest.importorskip("peft", reason="peft is not installed")

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
IDS = prompt(50, seed=3)[None]
WAYS = ["peft", "transformers"]
NAMES = ["one", "two", "three"]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options})


class Adapted:
    """A patched model with adapters, used by the methods of peft's wrapper or by those of transformers."""

    def __init__(self, way: str, *configs: Any, **options: Any) -> None:
        """The adapters are named one, two, ...; the first is switched on."""
        self.way = way
        self.patched = radixkv.patch_model(tiny_qwen2(num_layers=2), **{"num_blocks": 120, "block_size": 16, **options})
        torch.manual_seed(1)
        self.model = peft.get_peft_model(self.patched, configs[0], adapter_name="one") if way == "peft" else self.patched
        for name, config in zip(NAMES[way == "peft" :], configs[way == "peft" :], strict=False):
            self.model.add_adapter(*((name, config) if way == "peft" else (config, name)))
        with torch.no_grad():  # some kinds of adapters begin by changing nothing
            for parameter in self.adapter_parameters(""):
                parameter.add_(torch.randn_like(parameter) * 0.3)
        self.model.eval()
        self.switch("one")

    @property
    def handle(self) -> Any:
        return self.patched.radixkv

    def adapter_parameters(self, name: str) -> list[torch.nn.Parameter]:
        parts = (("lora_", "hada_", "lokr_", "ia3_", "vera_", "modules_to_save"), f".{name}.", f".{name}")
        return [
            parameter
            for key, parameter in self.patched.named_parameters()
            if any(f".{part}" in key for part in parts[0]) and (parts[1] in key or key.endswith(parts[2]) or not name)
        ]

    def switch(self, name: str | None) -> None:
        """To an adapter, or to none."""
        if self.way == "peft":
            self.model.base_model.enable_adapter_layers()
            self.model.base_model.disable_adapter_layers() if name is None else self.model.set_adapter(name)
        elif name is None:
            self.model.disable_adapters()
        else:
            self.model.enable_adapters()
            for module in self.patched.modules():  # transformers leaves the modules that are saved switched off
                if hasattr(module, "modules_to_save"):
                    module.enable_adapters(True)
            self.model.set_adapter(name)

    def expected(self, ids: torch.Tensor = IDS) -> torch.Tensor:
        """The answer by the model's own path, which knows nothing of any cache."""
        return self.patched.generate(ids, **GREEDY, use_cache=False)

    def reused(self, ids: torch.Tensor = IDS) -> int:
        """Tokens of a prompt that are not computed by a generate(), whose answer is that of the model without us."""
        expected, before = self.expected(ids), self.handle.stats().cached_tokens
        assert torch.equal(self.model.generate(input_ids=ids, **GREEDY), expected)
        self.handle.check()
        return self.handle.stats().cached_tokens - before

    def fill(self, *names: str | None) -> None:
        for name in names:
            self.switch(name)
            assert self.reused() == 0 and self.reused() == 49


KINDS: dict[str, Any] = {
    "LoRA": lora(),
    "rsLoRA": lora(use_rslora=True, lora_alpha=3),
    "DoRA": lora(use_dora=True),
    "LoRA with bias and patterns": lora(lora_bias=True, alpha_pattern={"v_proj": 30}, rank_pattern={"q_proj": 2}),
    "LoRA of embeddings and head": lora(target_modules=["embed_tokens", "lm_head", "up_proj"]),
    "modules that are saved": lora(modules_to_save=["lm_head", "embed_tokens"]),
    "LoHa": peft.LoHaConfig(r=4, target_modules=["k_proj", "down_proj"], init_weights=False),
    "LoKr": peft.LoKrConfig(r=4, target_modules=["k_proj", "down_proj"], init_weights=False),
    "IA3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False),
}


@pytest.fixture(autouse=True)
def any_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 asks for a peft that no index has yet; what it uses of it here, the present one has."""
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.0.0")


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


def step(adapted: Adapted, name: str) -> None:
    weight = adapted.adapter_parameters(name)[0]
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()
    weight.grad = None


def load(adapted: Adapted, name: str) -> None:
    state = {key: 2 * value for key, value in adapted.patched.state_dict().items() if f".{name}." in key}
    adapted.patched.load_state_dict(state, strict=False)


def replace_data(adapted: Adapted, name: str) -> None:
    weight = adapted.adapter_parameters(name)[-1]
    weight.data = -weight.data


def layers(adapted: Adapted) -> list[Any]:
    return [module for module in adapted.patched.modules() if hasattr(module, "scaling") and hasattr(module, "lora_A")]


def set_scale(adapted: Adapted, name: str) -> None:
    layers(adapted)[-1].set_scale(name, 9.0)


def scale_through_dict(adapted: Adapted, name: str) -> None:
    layers(adapted)[0].scaling[name] = -9.0


def scale_through_new_dict(adapted: Adapted, name: str) -> None:
    """An equal one in its place, then a change: the dictionary that was watched is nobody's."""
    layer = layers(adapted)[0]
    layer.scaling = dict(layer.scaling)
    adapted.reused()
    layer.scaling[name] = -9.0


CHANGES = [step, load, replace_data, set_scale, scale_through_dict]


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
