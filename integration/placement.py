"""Where the layers of a model compute, and which of its weights are brought there for a forward only: the hooks of accelerate.

Knows those hooks by their attributes, without importing accelerate. A weight that is offloaded is a tensor on the device "meta" between two
forwards, another one after each; its values are in the hook's `weights_map`, in memory or in files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

HOOK = "_hf_hook"


class Placed(NamedTuple):
    """A module of a model.

    Attributes:
        name, module: which. bringer: the hook that brings its tensors to a device, and the name of the module that has this hook; None if
            they stay where they are. attention: the number of the layer whose attention it is part of, if it is.
    """

    name: str
    module: nn.Module
    bringer: tuple[Any, str] | None
    attention: int | None


def is_dispatched(model: nn.Module) -> bool:
    """Whether hooks of accelerate move what comes into the model's modules to the devices on which these compute."""
    return any(HOOK in vars(module) for module in model.modules())


def layer_devices(model: PreTrainedModel) -> tuple[torch.device, ...]:
    """The device on which each layer's attention computes.

    Raises:
        NotImplementedError: weights lie on several devices and no hooks move activations between them; or those of one layer's attention
            do; or weights have no values.
    """
    num_layers = model.config.num_hidden_layers
    if not is_dispatched(model):
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) != 1 or "meta" in {device.type for device in devices}:
            raise NotImplementedError(
                f"patch_model: the weights lie on {', '.join(sorted(map(str, devices)))}, and nothing brings them together: load the model "
                "with device_map, or with everything on one device"
            )
        return (devices.pop(),) * num_layers
    found: dict[int, set[torch.device]] = {}
    for placed in _walk(model):
        for name, parameter in placed.module._parameters.items():
            if parameter is not None:
                device = _device_of(placed, name, parameter)
                if placed.attention is not None:
                    found.setdefault(placed.attention, set()).add(device)
    for layer in range(num_layers):
        devices = found.get(layer, set())
        if len(devices) != 1:
            raise NotImplementedError(
                f"patch_model: the attention of layer {layer} computes on {', '.join(sorted(map(str, devices))) or 'no known device'}, and "
                "its K/V can lie on one only: keep whole layers together in device_map"
            )
    return tuple(found[layer].pop() for layer in range(num_layers))


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers with their values, by name in alphabetical order; what is offloaded is read when it is its turn."""
    entries = dict([*model.named_parameters(), *model.named_buffers()])
    places: dict[str, Placed] = {}
    if is_dispatched(model):
        # Hooks put other tensors in the places of tied ones, each one's own.
        tied = getattr(model, "_tied_weights_keys", None) if getattr(model.config, "tie_word_embeddings", False) else None
        entries = {name: tensor for name, tensor in entries.items() if name not in (tied or ())}
        places = {placed.name: placed for placed in _walk(model)}
    for name, tensor in sorted(entries.items()):
        if tensor.device.type == "meta":
            placed = places[name.rpartition(".")[0]]
            assert placed.bringer is not None, "a model with weights without values is not patched"
            hook, where = placed.bringer
            tensor = hook.weights_map[name[len(where) + 1 :] if where else name].to(tensor.dtype)
        yield name, tensor


class OffloadWatch:
    """The weights of a model that are offloaded, at one moment, as far as they can be compared with what they are later.

    It sees hooks that are replaced or removed, weights that are added or removed, and files that are written to (by their time and size).
    Values that are in memory are for a `WeightsWatch` to compare, which is given `tables`.

    Args:
        model: what to watch; not changed.

    Attributes:
        tables: what holds the values, with names. passing: the ids of the tables of modules whose tensors are others after each forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tables: list[tuple[str, dict[str, Any]]] = []
        self.passing: set[int] = set()
        self._modules: list[tuple[str, nn.Module]] = []
        self._hooked: list[tuple[str, nn.Module]] = []
        files: set[str] = set()
        sources: dict[int, Any] = {}
        for placed in _walk(model):
            if placed.bringer is None or getattr(placed.bringer[0], "weights_map", None) is None:
                continue
            hook = placed.bringer[0]
            tables = [placed.module._parameters, *([placed.module._buffers] if hook.offload_buffers else [])]
            self.passing |= set(map(id, tables))
            self._modules.append((placed.name, placed.module))
            if HOOK in vars(placed.module):
                self._hooked.append((placed.name, placed.module))
            source = _unprefixed(hook.weights_map)
            sources[id(source)] = source
        for source in sources.values():
            tables = [getattr(source, name, None) for name in ("state_dict", "index")]
            self.tables += [("offloaded weights", table) for table in [source, *tables] if isinstance(table, dict)]
            if isinstance(index := tables[1], dict):
                files |= {_file_of(source, name, entry) for name, entry in index.items()}
        self._files = sorted(files)
        self._hooks, self._present, self._stamps = self._read_hooks(), self._read_present(), self._read_stamps()

    def changed(self) -> bool:
        """Whether anything that is watched is not as it was."""
        now = self._read_hooks(), self._read_present(), self._read_stamps()
        return now != (self._hooks, self._present, self._stamps)

    def difference(self) -> str:
        """The first thing that is not as it was, in words; "" if there is none."""
        for (name, _), now, before in zip(self._hooked, self._read_hooks(), self._hooks, strict=True):
            if now is not before:
                return f"the hook on {name} was replaced or removed"
        for (name, _), now, before in zip(self._modules, self._read_present(), self._present, strict=True):
            if now != before:
                return f"a weight of {name} was added, cast or removed"
        for file, now, before in zip(self._files, self._read_stamps(), self._stamps, strict=True):
            if now != before:
                return f"{file} was written to"
        return ""

    def _read_hooks(self) -> list[Any]:
        return [vars(module).get(HOOK) for _, module in self._hooked]

    def _read_present(self) -> list[list[tuple[str, torch.dtype]]]:
        tables = [(*module._parameters.items(), *module._buffers.items()) for _, module in self._modules]
        return [[(name, tensor.dtype) for name, tensor in entries if tensor is not None] for entries in tables]

    def _read_stamps(self) -> list[tuple[int, int] | None]:
        return list(map(_stamp, self._files))


def _walk(model: nn.Module) -> Iterator[Placed]:
    """All modules of a model, each once."""
    pending = [Placed("", model, None, None)]
    seen: set[nn.Module] = set()
    while pending:
        name, module, above, attention = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        hook = vars(module).get(HOOK)
        below = bringer = above
        for each in getattr(hook, "hooks", (hook,)):  # several of them are one hook
            # What moves a model as a whole before its forward says nothing of offloading.
            if each is not None and getattr(each, "offload", type(each).__name__ == "CpuOffload"):
                bringer = each, name
                below = bringer if getattr(each, "place_submodules", True) else above
        number = getattr(module, "layer_idx", None)
        if isinstance(number, int) and hasattr(module, "k_proj"):
            attention = number
        yield Placed(name, module, bringer, attention)
        children = [(child_name, child) for child_name, child in module._modules.items() if child is not None]
        pending += [Placed(f"{name}.{child_name}" if name else child_name, child, below, attention) for child_name, child in children]


def _device_of(placed: Placed, name: str, parameter: Tensor) -> torch.device:
    """Where a parameter is in a forward."""
    device = parameter.device if placed.bringer is None else placed.bringer[0].execution_device
    if device is None or (device := _with_index(device)).type == "meta":
        raise NotImplementedError(
            f"patch_model: {placed.name}.{name} is on the device meta and nothing brings its values: load the model with its weights"
        )
    return device


def _with_index(device: Any) -> torch.device:
    """A device as tensors on it name it: accelerate's may be a number, or lack one."""
    device = torch.device(device)
    return device if device.index is not None or device.type in ("cpu", "meta") else torch.empty(0, device=device).device


def _unprefixed(weights_map: Any) -> Any:
    """What a view of a part of some weights is a view of."""
    while hasattr(weights_map, "dataset") and hasattr(weights_map, "prefix"):
        weights_map = weights_map.dataset
    return weights_map


def _file_of(source: Any, name: str, entry: dict[str, Any]) -> str:
    return entry.get("safetensors_file") or os.path.join(source.save_folder, f"{name}.dat")


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
