"""The attention function that transformers calls in a packed forward, and the switch that selects it for just that forward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from radixkv.step import Step

STEP_ARGUMENT = "radixkv_step"  # the keyword under which a packed forward hands its step down to attention
# Read and written past what configurations do at every access (aliases, in transformers 5 validation), which costs more than all else of a
# switch.
_IMPLEMENTATION = "_attn_implementation_internal"


class _Switches:
    """Which configurations are switched to pool attention now, how often, and what they had before.

    Models may share one configuration object, and run packed forwards in several threads at once: the first to come switches, the last to
    leave switches back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: dict[int, tuple[int, str]] = {}

    def enter(self, configs: Sequence[PretrainedConfig]) -> None:
        with self._lock:
            for config in configs:
                count, replaced = self._active.get(id(config)) or (0, object.__getattribute__(config, _IMPLEMENTATION))
                if not count:
                    object.__setattr__(config, _IMPLEMENTATION, _register_over(replaced))
                self._active[id(config)] = (count + 1, replaced)

    def leave(self, configs: Sequence[PretrainedConfig]) -> None:
        with self._lock:
            for config in configs:
                count, replaced = self._active.pop(id(config))
                if count > 1:
                    self._active[id(config)] = (count - 1, replaced)
                else:
                    object.__setattr__(config, _IMPLEMENTATION, replaced)


_switches = _Switches()


def attention_configs(model: torch.nn.Module) -> list[PretrainedConfig]:
    """Every configuration that some module of a model reads: mostly one, but a layer that was copied has its own."""
    found = (module.__dict__.get("config") for module in model.modules())
    return list({id(config): config for config in found if isinstance(config, PretrainedConfig)}.values())


class packed_attention:  # noqa: N801 - a context manager, as a class because a generator takes longer
    """Let every layer that reads one of `configs` use the pool's attention inside this block.

    The switch lasts for one forward, so that whatever else a model does runs on the implementation it had. A forward of another thread or
    model that reads the same config meanwhile carries no step, and gets what the switch replaced.
    """

    def __init__(self, configs: Sequence[PretrainedConfig]):
        self._configs = configs

    def __enter__(self) -> None:
        _switches.enter(self._configs)

    def __exit__(self, *error: object) -> None:
        _switches.leave(self._configs)


@cache  # a lookup in transformers' registries takes longer than the whole switch
def _register_over(replaced: str) -> str:
    """The name of pool attention in place of the implementation `replaced`, registered when first asked for."""
    # transformers tests names for "sdpa", "flash", "flex", "paged" and "/" as substrings: hexadecimal can hold none of them.
    name = f"radixkv_{replaced.encode().hex()}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[replaced])
        AttentionInterface.register(name, _attention_over(replaced))
    return name


def _attention_over(replaced: str) -> Callable:
    # transformers' SDPA attention ignores it; a model is to say what it said before.
    caps_scores = replaced != "sdpa"

    def pool_attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        step: Step | None = kwargs.get(STEP_ARGUMENT)
        if step is None:
            return _stock_attention(module, replaced)(module, query, key, value, attention_mask, **kwargs)
        scale = kwargs.get("scaling")
        out = step.attend(
            module.layer_idx,  # type: ignore[arg-type]
            query,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            sliding_window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap") if caps_scores else None,
        )
        return out, None

    return pool_attention


def _stock_attention(module: torch.nn.Module, name: str) -> Callable:
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]
