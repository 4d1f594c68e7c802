"""What a saved file says of where it came from, as JSON: a fingerprint that must fit, and namespaces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_SHOWN = 60


def normalize(facts: Mapping[str, object]) -> dict[str, object]:
    """The fingerprint as it comes back from a file.

    Raises:
        ValueError: a field holds something that JSON has no form for.
    """
    for name, value in facts.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"fingerprint: field {name!r} must hold only what JSON can: {error}") from None
    return json.loads(json.dumps(dict(facts)))


def require_same(path: Path, saved: Mapping[str, object], present: Mapping[str, object]) -> None:
    """Raise ValueError naming every field in which a file differs from the cache that it is loaded into.

    A field that is None in `present` is not compared.
    """
    unasked = {name for name, value in present.items() if value is None}
    before, now = (dict(_flatten({name: value for name, value in facts.items() if name not in unasked})) for facts in (saved, present))
    different = [
        f"{name} is {_show(before, name)} in the file and {_show(now, name)} here"
        for name in sorted(before.keys() | now.keys())
        if name not in before or name not in now or before[name] != now[name]
    ]
    if different:
        raise ValueError(f"load: {path} was saved by another model or for another use; nothing was loaded: {'; '.join(different)}")


def _flatten(facts: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            # As text, so that 1, 1.0 and true are three.
            yield prefix + name, json.dumps(value)


def _show(values: Mapping[str, str], name: str) -> str:
    text = values.get(name, "missing")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def encode_namespace(namespace: tuple) -> list[Any]:
    """A namespace as JSON, with the type of every element.

    Raises:
        ValueError: an element is not a str, int, float, bool, bytes, None or a tuple of those.
    """
    return [_encode(namespace, part) for part in namespace]


def _encode(namespace: tuple, part: object) -> list[Any]:
    kind = type(part)
    if kind is tuple:
        return ["tuple", encode_namespace(part)]  # type: ignore[arg-type]
    if kind is float:
        return ["float", part.hex()]  # type: ignore[attr-defined]
    if kind is bytes:
        return ["bytes", part.hex()]  # type: ignore[attr-defined]
    if part is None or kind in (str, int, bool):
        return [kind.__name__, part]
    raise ValueError(
        f"namespace {namespace!r} cannot be saved: its elements must be str, int, float, bool, bytes, None or tuples of those, "
        f"got {kind.__name__}"
    )


def decode_namespace(parts: list[Any]) -> tuple:
    """The namespace that `encode_namespace` encoded; ValueError or TypeError for anything else."""
    return tuple(_decode(kind, value) for kind, value in parts)


def _decode(kind: str, value: Any) -> object:
    if kind == "tuple":
        return decode_namespace(value)
    if kind == "float":
        return float.fromhex(value)
    if kind == "bytes":
        return bytes.fromhex(value)
    if kind != type(value).__name__ or kind not in ("str", "int", "bool", "NoneType"):
        raise ValueError(f"a namespace has an element of kind {kind!r}")
    return value
