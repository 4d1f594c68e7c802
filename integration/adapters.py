"""The adapters of peft in a model: what belongs to which, and which are switched on. Knows peft's layers without importing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from radixkv.integration.weights import join, settings_of

# Layers of peft (class by module) that compute with what they hold for each adapter that is switched on, one after the other, and with
# nothing that they hold for another. In any other layer the adapters cannot be told apart: all of it is watched as one with the model.
_LAYERS = {
    "peft.tuners.ia3.layer": {"Linear"},
    "peft.tuners.loha.layer": {"Linear"},
    "peft.tuners.lokr.layer": {"Linear"},
    "peft.tuners.lora.layer": {"Embedding", "Linear"},
    "peft.utils.other": {"ModulesToSaveWrapper"},
}
# Of the ways in which a LoRA layer may compute otherwise, those of which the same is true.
_VARIANTS = {"DoraEmbeddingVariant", "DoraLinearVariant"}
_ACTIVE, _DISABLED = "_active_adapter", "_disable_adapters"
_choice_of = itemgetter(_ACTIVE, _DISABLED)
# What peft's hooks hand to its layers for one call: an adapter for each row of the batch, and where in a row an adapter begins.
_PER_ROW = ("adapter_names", "alora_offsets")


@dataclass
class Part:
    """What belongs to one adapter, with names."""

    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)


@dataclass
class Division:
    """A model's modules, divided by the adapters that they belong to.

    Attributes:
        base: all modules that belong to no one adapter, with names. layers: those of them whose adapters are told apart, and the names of
            the attributes in which they are. tables: what these hold for each adapter; with names. adapters: what belongs to each.
        hooks: the forward pre-hooks of everything that peft put into the model.
    """

    base: list[tuple[str, nn.Module]] = field(default_factory=list)
    layers: dict[nn.Module, set[str]] = field(default_factory=dict)
    tables: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    adapters: dict[str, Part] = field(default_factory=dict)
    hooks: list[Mapping[int, Any]] = field(default_factory=list)

    def shared_settings(self, module: nn.Module) -> dict[str, Any] | None:
        """`settings_of` a module, less what belongs to one adapter or says which is switched on."""
        settings, by_adapter = settings_of(module), self.layers.get(module)
        if settings is None or by_adapter is None:
            return settings
        # The very dictionaries, so that others in their places are noticed.
        dictionaries = {name: value for name, value in vars(module).items() if name in by_adapter and isinstance(value, dict)}
        return {name: value for name, value in settings.items() if name not in (_ACTIVE, _DISABLED)} | dictionaries


def divide(model: nn.Module) -> Division:
    """Find out which module, tensor and setting of a model belongs to which adapter of peft."""
    division = Division()
    pending: list[tuple[str, nn.Module]] = [("", model)]
    seen: set[nn.Module] = set()
    while pending:
        where, module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        division.base.append((where, module))
        by_adapter: set[str] = set()
        if type(module).__module__.startswith("peft."):
            division.hooks.append(module._forward_pre_hooks)
            if _is_divisible(module):
                by_adapter = division.layers[module] = _names_by_adapter(module)
                for table in _tables_by_adapter(module, by_adapter, where):
                    _assign(division, *table)
        children = [(name, child) for name, child in module._modules.items() if child is not None and name not in by_adapter]
        pending += [(join(where, name), child) for name, child in reversed(children)]
    return division


class Selection:
    """Which adapters of a model are switched on.

    Args:
        division: of the model. numbers: of each of its adapters.
    """

    def __init__(self, division: Division, numbers: Mapping[str, int]) -> None:
        self._states = [vars(layer) for layer in division.layers]
        # Of a layer that knows only the adapters that it has, their names.
        wrapped = [layer._modules.get("modules_to_save") for layer in division.layers]
        self._wrapped = [None if adapters is None else frozenset(adapters._modules) for adapters in wrapped]
        self._hooks, self._numbers = division.hooks, numbers
        self._last: tuple[list, tuple] = ([], ())

    def namespace(self) -> tuple:
        """The part of a namespace that says it, in a tuple; () where none is.

        It is ("adapters", ((name, number), ...)) with the adapters in the order in which every layer applies those that it has, and where
        layers disagree a third element, the names that each has switched on.
        """
        if not self._states:
            return ()
        choices = list(map(_choice_of, self._states))
        last, namespace = self._last
        if choices != last:
            # Lists may be changed in place.
            copies = [(copy(active), disabled) for active, disabled in choices]
            self._last = copies, (namespace := self._read(copies))
        return namespace

    def is_per_row(self) -> bool:
        """Whether the rows of the present call name adapters of their own."""
        if not any(self._hooks):
            return False
        hooks = (hook for table in self._hooks for hook in table.values())
        return any(name in hook.keywords for hook in hooks if isinstance(hook, partial) for name in _PER_ROW)

    def _read(self, choices: list[tuple[Any, bool]]) -> tuple:
        chosen = [() if disabled else (active,) if isinstance(active, str) else tuple(active or ()) for active, disabled in choices]
        names = next((names for names, wrapped in zip(chosen, self._wrapped, strict=True) if wrapped is None), ())
        agree = all(
            theirs == (names if wrapped is None else tuple(name for name in names if name in wrapped))
            for theirs, wrapped in zip(chosen, self._wrapped, strict=True)
        )
        if not agree:
            names = tuple(dict.fromkeys(name for theirs in chosen for name in theirs))
        numbered = tuple((name, self._numbers[name]) for name in names if name in self._numbers)
        if agree:
            return (("adapters", numbered),) if numbered else ()
        return (("adapters", numbered, tuple(chosen)),)


def adapters_in(namespace: tuple) -> tuple[tuple[str, int], ...]:
    """The adapters, by name and number, of a full namespace of a model's cache."""
    return namespace[1][1] if namespace[1][0] == "adapters" else ()


def unnumbered(namespace: tuple) -> tuple:
    """A namespace without the weights' version, and without the numbers of adapters, for a file."""
    (tag, adapters, *layers), *others = namespace
    return namespace if tag != "adapters" else ((tag, tuple(name for name, _ in adapters), *layers), *others)


def numbered(namespace: tuple, numbers: Mapping[str, int]) -> tuple:
    """The namespace that `unnumbered` was given.

    Raises:
        ValueError: it is none, or one of adapters that have no number.
    """
    try:
        (tag, names, *layers), *others = namespace
        return namespace if tag != "adapters" else ((tag, tuple((name, numbers[name]) for name in names), *layers), *others)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"load: the file has prefixes of adapters that this model does not have: {namespace}") from None


def _is_divisible(layer: nn.Module) -> bool:
    kind, state = type(layer), vars(layer)
    return (
        kind.__name__ in _LAYERS.get(kind.__module__, ())
        and _ACTIVE in state
        and _DISABLED in state
        and isinstance(getattr(layer, "adapter_layer_names", None), tuple)
        and isinstance(getattr(layer, "other_param_names", None), tuple)
        and all(type(variant).__name__ in _VARIANTS for variant in state.get("lora_variant", {}).values())
    )


def _names_by_adapter(layer: Any) -> set[str]:
    return {*layer.adapter_layer_names, *layer.other_param_names, "lora_variant"}


def _tables_by_adapter(layer: nn.Module, names: set[str], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in sorted(names):
        holder = layer._modules.get(name)
        if holder is not None:
            yield from ((f"{where}.{name}", table) for table in (holder._modules, holder._parameters, holder._buffers))
        elif isinstance(values := vars(layer).get(name), dict):
            yield f"{where}.{name}", values


def _assign(division: Division, where: str, table: dict[str, Any]) -> None:
    division.tables.append((where, table))
    for adapter, value in table.items():
        part = division.adapters.setdefault(adapter, Part())
        if isinstance(value, nn.Module):
            part.modules += value.named_modules(prefix=f"{where}.{adapter}")
        elif isinstance(value, Tensor):
            part.tensors.append((f"{where}.{adapter}", value))
