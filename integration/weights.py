"""Whether some modules' weights are still what they were; for a whole model see model_weights.py."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.integration.write_counts import WriteCounts

# What these packages define computes with its tensors alone. In anyone else's modules numbers may be weights too: the scale of an
# adapter, the name of the active one.
_TENSORS_ONLY = ("torch.", "transformers.", "radixkv.")
_BOOKKEEPING = frozenset(vars(nn.Module()))
_SETTING_TYPES = (bool, int, float, complex, str, bytes, torch.dtype, type(None))

# Beside `data_ptr` it takes nine tenths of the time, and copies no memory that is shared until somebody writes to it.
_address_of = getattr(Tensor, "const_data_ptr", Tensor.data_ptr)

Named = tuple[str, nn.Module]
Table = dict[str, Any]


def settings_of(module: nn.Module) -> Table | None:
    """A copy of those of a module's attributes that may be weights too; None for one of torch or transformers, which has none."""
    if type(module).__module__.startswith(_TENSORS_ONLY):
        return None
    return {name: deepcopy(value) for name, value in vars(module).items() if name not in _BOOKKEEPING and _is_setting(value)}


class WeightsWatch:
    """Some modules' weights at one moment, to be compared with what they are later by a few loops that run in C.

    It sees in-place writes to a parameter or buffer (an optimizer's step, `load_state_dict`, `copy_`), `parameter.data = other`, and
    parameters, buffers and modules that are replaced, added (but for the first buffer of a module) or removed; and in modules that neither
    torch nor transformers define (adapters), every change of an attribute that is a number, bool, string, or a list, tuple, set or dict of
    those. It cannot see in-place writes to `parameter.data`, nor those to tensors that were made in inference mode: neither leaves a trace.

    Args:
        modules: what to watch, with names; not changed. Their present tensors live as long as the watch.
        tensors, tables: more of it, with names. read_settings: what `settings_of` is, or less.
        passing: ids of tables of the modules that are not to be watched.
    """

    def __init__(
        self,
        modules: Iterable[Named],
        tensors: Iterable[tuple[str, Tensor]] = (),
        read_settings: Callable[[nn.Module], Table | None] = settings_of,
        tables: Iterable[tuple[str, Table]] = (),
        passing: Container[int] = (),
    ) -> None:
        modules = list(modules)
        own: list[tuple[str, Any]] = [(name, table) for name, module in modules for table in (module._modules, module._parameters)]
        own += [(name, module._buffers) for name, module in modules if module._buffers]
        self._tables = Tables([*((name, table) for name, table in own if id(table) not in passing), *tables])
        named = {id(tensor): (name, tensor) for name, tensor in [*self._tables.tensors(), *tensors]}
        self._names, self._tensors = [name for name, _ in named.values()], [tensor for _, tensor in named.values()]
        self._addresses, self._counts = self._read_addresses(), list(map(_num_writes, self._tensors))
        self._writes = WriteCounts(tensor for tensor in self._tensors if not tensor.is_inference())
        read = [(name, module, settings) for name, module in modules if (settings := read_settings(module)) is not None]
        self._owners = [f"{name} (a {type(module).__name__})" for name, module, _ in read]
        self._settings = [(vars(module), len(vars(module)), settings) for _, module, settings in read]

    def changed(self) -> bool:
        """Whether anything that is watched is not as it was."""
        return (
            self._writes.changed()
            or self._read_addresses() != self._addresses
            or self._tables.changed()
            or bool(self._settings)
            and self._settings_changed()
        )

    def difference(self) -> str:
        """The first thing that is not as it was, in words; "" if there is none."""
        for where, name in self._tables.differences():
            return f"{join(where, name)} was added, replaced or removed"
        for name, tensor, num_writes, address in zip(self._names, self._tensors, self._counts, self._addresses, strict=True):
            if num_writes != _num_writes(tensor) or address != _address_of(tensor):
                return f"{name} was written to"
        for owner, (now, size, before) in zip(self._owners, self._settings, strict=True):
            for name, value in before.items():
                if name not in now or _differ(now[name], value):
                    return f"attribute {name} of {owner} was changed"
            if len(now) != size:
                return f"{owner} got or lost an attribute"
        return ""

    def settings(self) -> Iterator[tuple[str, Any]]:
        """The attributes that are compared, with names."""
        for owner, (_, _, before) in zip(self._owners, self._settings, strict=True):
            yield from ((join(owner, name), value) for name, value in before.items())

    def _settings_changed(self) -> bool:
        try:
            return any(len(now) != size or not before.items() <= now.items() for now, size, before in self._settings)
        except (RuntimeError, TypeError, ValueError):  # an array in the place of a number, which has no truth
            return True

    def _read_addresses(self) -> list[int]:
        return list(map(_address_of, self._tensors))


class Tables:
    """Dictionaries of modules, at one moment; they are compared in C with what they are later.

    Tensors and modules in them are the same only if they are the same object, anything else if it is equal.

    Args:
        tables: with names; not changed.
    """

    def __init__(self, tables: Iterable[tuple[str, Table]]) -> None:
        tables = list(tables)
        self._empty = [table for _, table in tables if not table]
        self._filled = [table for _, table in tables if table]
        self._names = [name for name, table in tables if table]
        self._copies = [{name: deepcopy(value) if _is_setting(value) else value for name, value in table.items()} for table in self._filled]
        self._of_one_value = [
            (table, name, value)
            for table in self._filled
            for name, value in table.items()
            if isinstance(value, Tensor) and value.numel() <= 1
        ]

    def changed(self) -> bool:
        """Whether anything in them is not as it was."""
        # Comparing two dicts looks at identity first. Another tensor in the place of one is then compared by value, which raises, but for
        # tensors of one value.
        try:
            if any(self._empty) or self._filled != self._copies:
                return True
        except (RuntimeError, TypeError):
            return True
        return bool(self._of_one_value) and any(table.get(name) is not tensor for table, name, tensor in self._of_one_value)

    def differences(self) -> Iterator[tuple[str, str]]:
        """The table and the name of each entry that is not as it was; of a table that was empty only the name."""
        yield from (("", name) for table in self._empty for name in table)
        for where, now, before in zip(self._names, self._filled, self._copies, strict=True):
            for name in {**before, **now}:
                if name not in now or name not in before or _differ(now[name], before[name]):
                    yield where, name

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors in them, with names."""
        for where, table in zip(self._names, self._copies, strict=True):
            yield from ((join(where, name), value) for name, value in table.items() if isinstance(value, Tensor))

    def settings(self) -> Iterator[tuple[str, Any]]:
        """What in them is a number, a string or the like, with names."""
        for where, table in zip(self._names, self._copies, strict=True):
            yield from ((join(where, name), value) for name, value in table.items() if _is_setting(value))


def join(where: str, name: str) -> str:
    """The name of a part of what is at `where`, which is "" for the model itself."""
    return f"{where}.{name}" if where else name


def _num_writes(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, (Tensor, nn.Module)) or isinstance(other, (Tensor, nn.Module)):
        return one is not other
    try:
        return bool(one != other)
    except (RuntimeError, TypeError, ValueError):
        return True


def _is_setting(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_setting(part) for entry in value.items() for part in entry)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_setting(part) for part in value)
    return isinstance(value, _SETTING_TYPES)
