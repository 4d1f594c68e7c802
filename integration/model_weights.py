"""A model's weights, in parts that change independently: each adapter of peft, and all the rest; asked before every generate()."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple

from torch import nn

from radixkv.integration.adapters import Selection, divide
from radixkv.integration.placement import OffloadWatch, is_dispatched
from radixkv.integration.weights import Tables, WeightsWatch, join


class Change(NamedTuple):
    """What happened to a model's weights.

    Attributes:
        everything: whether all that was computed before is stale. adapters: if not, the adapters whose K/V are, by name and number.
        reason: the first difference that was seen, in words.
    """

    everything: bool
    adapters: frozenset[tuple[str, int]]
    reason: str


class ModelWeights:
    """A model's weights as they were at the last look.

    Args:
        model: what to watch; not changed. Its present tensors live until `take_in` is told that they were replaced.

    Attributes:
        numbers: of each adapter one that it keeps until it changes, and that none has ever again.
        selection: which of them are switched on.
    """

    def __init__(self, model: nn.Module) -> None:
        self.numbers: dict[str, int] = {}
        self._unused = count(1)
        self._look_at(model, {})

    def look(self, model: nn.Module) -> Change | None:
        """What has changed since the last `take_in`; None for nothing. Which adapters are switched on is no change.

        What is not one adapter's own, or not seen by the second look, changes everything.
        """
        changed = [name for name, watch in self._adapters.items() if watch.changed()] if self._adapters else []
        moved = self._offloaded is not None and self._offloaded.changed()
        base_changed, tables_changed = moved or self._base.changed(), self._by_adapter.changed()
        if not (changed or base_changed or tables_changed):
            return None
        reasons = [self._offloaded.difference()] if moved and self._offloaded is not None else []
        reasons += [self._base.difference()] if base_changed else [self._adapters[name].difference() for name in changed]
        if tables_changed:
            entries = list(self._by_adapter.differences())
            changed += [name for _, name in entries]
            reasons += [f"{join(where, name)} was added, changed or removed" for where, name in entries[:1]]
        stale = frozenset((name, self.numbers[name]) for name in changed if name in self.numbers)
        return Change(base_changed or not changed, stale, next(filter(None, reasons), "something was changed and changed back"))

    def take_in(self, model: nn.Module, change: Change) -> None:
        """The weights are from now on what they are, and those of a change that `look` returned were others."""
        self._look_at(model, dict(change.adapters))

    def settings(self) -> list[tuple[str, Any]]:
        """What the modules of others compute with beside tensors, with names; which adapters are switched on is no part of it."""
        parts: list[WeightsWatch | Tables] = [self._base, self._by_adapter, *self._adapters.values()]
        return [setting for part in parts for setting in part.settings()]

    def _look_at(self, model: nn.Module, stale: Mapping[str, int]) -> None:
        division = divide(model)
        offloaded = OffloadWatch(model) if is_dispatched(model) else None
        tables, passing = (offloaded.tables, offloaded.passing) if offloaded is not None else ([], set())
        base = WeightsWatch(division.base, read_settings=division.shared_settings, tables=tables, passing=passing)
        by_adapter = Tables(division.tables)
        adapters = {name: WeightsWatch(part.modules, part.tensors, passing=passing) for name, part in division.adapters.items()}
        kept = {name: number for name, number in self.numbers.items() if stale.get(name) != number}
        numbers = {name: kept.get(name) or next(self._unused) for name in division.adapters}
        selection = Selection(division, numbers)
        # All at once: half of a look would know of a change and not of what it is to be told by.
        self._offloaded, self._base, self._by_adapter, self._adapters = offloaded, base, by_adapter, adapters
        self.numbers, self.selection = numbers, selection
