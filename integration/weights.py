"""Whether a model's weights are still those that its cached K/V were computed with; asked before every generate()."""

from __future__ import annotations

from copy import deepcopy
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

# What these packages define computes with its tensors alone. In anyone else's modules numbers may be weights too: the scale of an
# adapter, the name of the active one.
_TENSORS_ONLY = ("torch.", "transformers.", "radixkv.")
_BOOKKEEPING = frozenset(vars(nn.Module()))
_SETTING_TYPES = (bool, int, float, complex, str, bytes, torch.dtype, type(None))
_version_of = attrgetter("_version")


class WeightsWatch:
    """A model's weights at one moment, to be compared with what they are later by a few loops that run in C.

    It sees in-place writes to a parameter or buffer (an optimizer's step, `load_state_dict`, `copy_`), `parameter.data = other`, and
    parameters, buffers and modules that are replaced, added or removed; and in modules that neither torch nor transformers define
    (adapters), every change of an attribute that is a number, bool, string, or a list, tuple, set or dict of those. It cannot see in-place
    writes to `parameter.data`, nor those to tensors that were made in inference mode: neither leaves a trace.

    Args:
        model: what to watch; not changed. Its present tensors live as long as the watch.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        tables: list[dict[str, Any]] = [table for module in modules for table in (module._modules, module._parameters)]
        self._empty = [table for table in tables if not table]
        self._filled = [table for table in [*tables, *(module._buffers for module in modules)] if table]
        self._copies = [dict(table) for table in self._filled]
        entries = [(table, *entry) for table in self._filled for entry in table.items() if isinstance(entry[1], Tensor)]
        self._of_one_value = [(table, name, tensor) for table, name, tensor in entries if tensor.numel() <= 1]
        self._tensors = list({id(tensor): tensor for _, _, tensor in entries}.values())
        self._counting = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._settings = [(vars(module), len(vars(module)), _settings_of(module)) for module in modules if _may_have_settings(module)]
        self._num_writes, self._addresses = self._count_writes(), self._read_addresses()

    def changed(self) -> bool:
        """Whether anything that is watched is not as it was."""
        return (
            self._count_writes() != self._num_writes
            or self._read_addresses() != self._addresses
            or any(self._empty)
            or self._entries_changed()
            or any(len(now) != size or not before.items() <= now.items() for now, size, before in self._settings)
        )

    def _count_writes(self) -> int:
        # A tensor's version only grows, so the sum is as it was only if every one is.
        return sum(map(_version_of, self._counting))

    def _read_addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))

    def _entries_changed(self) -> bool:
        # Comparing two dicts looks at identity first. Another tensor in the place of one is then compared by value, which raises, but for
        # tensors of one value.
        try:
            if self._filled != self._copies:
                return True
        except (RuntimeError, TypeError):
            return True
        return any(table.get(name) is not tensor for table, name, tensor in self._of_one_value)


def _may_have_settings(module: nn.Module) -> bool:
    return not type(module).__module__.startswith(_TENSORS_ONLY)


def _settings_of(module: nn.Module) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in vars(module).items() if name not in _BOOKKEEPING and _is_setting(value)}


def _is_setting(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_setting(part) for entry in value.items() for part in entry)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_setting(part) for part in value)
    return isinstance(value, _SETTING_TYPES)
