"""Progress bars: what shows one, when, where, and that nothing needs tqdm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from radixkv import progress
from radixkv.progress import progress_bar
from tests.small_cache import keep, small_cache

ROOT = Path(__file__).resolve().parent.parent


class Bar:
    """In tqdm's place: what it was made with, and how far it came."""

    def __init__(self, **options: Any) -> None:
        self.options, self.num_done = options, 0

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, num_more: int) -> None:
        self.num_done += num_more


@pytest.fixture
def bars(monkeypatch) -> list[Bar]:
    made: list[Bar] = []

    def make(**options: Any) -> Bar:
        made.append(Bar(**options))
        return made[-1]

    module = ModuleType("tqdm.auto")
    module.__dict__["tqdm"] = make
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    return made


@pytest.mark.parametrize(("asked", "disable"), [(True, False), (None, None)])
def test_a_bar_waits_two_seconds(asked, disable, bars):
    with progress_bar("work", 10, asked, unit="prompt") as advance:
        advance(3)
    (bar,) = bars
    assert bar.options == {"total": 10, "desc": "work", "unit": "prompt", "delay": 2.0, "disable": disable} and bar.num_done == 3


def test_false_shows_nothing(bars):
    with progress_bar("work", 10, False) as advance:
        advance(3)
    assert not bars


@pytest.mark.parametrize("how", ["sys.stderr = None", "sys.stderr.close()"])
def test_nothing_needs_stderr(how):
    """A service without a terminal could not save: tqdm wrote to a stderr that was not there."""
    code = (
        "import sys\n"
        "from radixkv import progress\n"
        "progress.DELAY_SECONDS = 0\n"
        f"{how}\n"
        "with progress.progress_bar('work', 10, True) as advance:\n"
        "    advance(3)\n"
        "print('done')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "done\n")


def test_nothing_needs_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with progress_bar("work", 10, True) as advance:
        advance(3)


def test_short_work_shows_nothing_and_long_work_a_bar_on_stderr(capsys, monkeypatch):
    with progress_bar("short", 10, True) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0)
    with progress_bar("long", 10, True) as advance:
        advance(10)
    output = capsys.readouterr()
    assert not output.out and "long: 100%" in output.err


def test_save_and_load_tell_of_every_byte(tmp_path, bars):
    cache = small_cache()
    keep(cache, range(100))
    cache.save(tmp_path / "file")
    small_cache().load(tmp_path / "file")
    assert [bar.options["desc"] for bar in bars] == ["save", "verify", "load"]
    assert all(bar.num_done == bar.options["total"] > 0 for bar in bars)


def test_save_and_load_without_progress(tmp_path, bars):
    cache = small_cache()
    keep(cache, range(100))
    cache.save(tmp_path / "file", progress=False)
    small_cache().load(tmp_path / "file", progress=False)
    assert not bars


def test_a_patched_model_tells_of_its_weights_too(patched, tmp_path, bars):
    patched.generate(torch.arange(20)[None] + 3, max_new_tokens=1)
    patched.radixkv.save(tmp_path / "file", progress=False)
    patched.radixkv.invalidate()
    patched.radixkv.generate_many([[3, 4, 5], [3, 4, 6]], 2, progress=False)
    assert not bars
    patched.radixkv.save(tmp_path / "file")
    patched.radixkv.generate_many([[3, 4, 5], [3, 4, 6]], 2)
    assert [bar.options["desc"] for bar in bars] == ["digest of the weights", "save", "generate_many"]
    assert all(bar.num_done == bar.options["total"] for bar in bars)


def test_progress_is_true_false_or_none(patched, tmp_path):
    for call, argument in (("save", tmp_path / "file"), ("load", tmp_path / "file"), ("generate_many", [[3, 4]])):
        with pytest.raises(ValueError, match=f"{call}: progress must be True, False or None, got 'yes'"):
            getattr(patched.radixkv, call)(argument, progress="yes")
    with pytest.raises(ValueError, match="save: progress"):
        small_cache().save(tmp_path / "file", progress="yes")  # type: ignore[arg-type]
