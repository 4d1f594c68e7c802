"""The processor that rows and lists name."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

from radixkv.bench.processor import processor_name


def test_the_name_is_what_linux_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "processor\t: 0\nmodel name\t: EPYC 9\n\nprocessor\t: 1\nmodel name\t: other\n")
    assert processor_name() == "EPYC 9"


@pytest.mark.parametrize("known", ["arm", ""])
def test_where_linux_tells_none_it_is_the_kind(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some virtual machines and ARM boards name no model, and other systems have no such file."""
    monkeypatch.setattr(platform, "processor", lambda: known)

    def missing(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    for read in (lambda *_, **__: "processor : 0\n", missing):
        monkeypatch.setattr(Path, "read_text", read)
        assert processor_name() == (known or platform.machine())
