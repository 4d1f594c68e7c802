"""A small patched model with adapters of peft, and everything that may happen to one of them."""

from __future__ import annotations

from typing import Any

import peft
import torch

import radixkv
from tests.models import prompt, tiny_qwen2

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
