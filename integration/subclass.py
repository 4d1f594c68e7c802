"""Subclasses that a living instance takes by assignment to `__class__`, under its own class's name."""

from __future__ import annotations

from typing import Any

BASE_CLASS = "_radixkv_base"  # on such a subclass: the class it came from


def make_subclass(base: type, members: dict[str, Any]) -> type:
    """A subclass of `base` that looks like it.

    An instance that takes it keeps its state, its hooks and its name. A pickle names classes, so what is pickled is an instance of
    `base`; attributes named `radixkv` are left out.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != "radixkv"}
        return _blank, (base,), state

    common = {
        BASE_CLASS: base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
    }
    return type(base.__name__, (base,), {**common, **members})


def _blank(base: type) -> Any:
    """An instance whose state a pickle is about to fill."""
    return object.__new__(base)
