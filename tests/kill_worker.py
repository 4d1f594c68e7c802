"""Saves that are killed: at every kind of moment, and at many bytes. test_persist_damage.py runs this in a process that may fork."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from radixkv import kv_file
from tests.persisted import contents, make_cache, store

BEFORE, AFTER = [7] * 40, [9] * 70


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_killed(save: Callable[[], object], arrange: Callable[[], None]) -> bool:
    """Fork, arrange to die and save in the child; whether it was killed."""
    child = os.fork()
    if not child:
        arrange()
        save()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert status == 0, f"a save that was not killed ended with {status}"
    return False


def die_at_byte(limit: int) -> Callable[[], None]:
    """Write so many bytes of the file, and no more."""

    def arrange() -> None:
        real_write, left = os.write, limit

        def write(descriptor: int, data: memoryview) -> int:
            nonlocal left
            written = real_write(descriptor, data[:left])
            left -= written
            if not left:
                die()
            return written

        setattr(kv_file.os, "write", write)  # noqa: B010 - a function of a module has no type that fits

    return arrange


def die_around(name: str, call: int, *, before: bool) -> Callable[[], None]:
    """Die before or after a call of a function of `os`."""

    def arrange() -> None:
        real, calls = getattr(os, name), 0

        def function(*args):
            nonlocal calls
            calls += 1
            if calls == call and before:
                die()
            result = real(*args)
            if calls == call:
                die()
            return result

        setattr(os, name, function)

    return arrange


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    path = folder / "prefixes"
    old, new = make_cache(), make_cache()
    store(old, BEFORE)
    store(new, AFTER)
    size = new.save(path).num_bytes
    bytes_to_die_at = sorted({1, 7, 8, 9, size - 1, size, *range(10, size, max(1, size // 40))})
    moments = [("fsync", 1), ("replace", 1), ("fsync", 2)]
    ways = [(f"byte {byte}", die_at_byte(byte), False) for byte in bytes_to_die_at]
    for name, call in moments:
        for before in (True, False):
            # Once the name is the new file's, the new file is what a load finds.
            is_new = (name, call) == ("fsync", 2) or (name == "replace" and not before)
            ways.append((f"{'before' if before else 'after'} {name} {call}", die_around(name, call, before=before), is_new))
    for what, arrange, is_new in ways:
        old.save(path)
        assert [entry.name for entry in folder.iterdir()] == ["prefixes"], f"before {what}: a save left something behind"
        assert run_killed(lambda: new.save(path), arrange), f"{what}: the save ran to its end"
        fresh = make_cache()
        fresh.load(path)
        expected = AFTER if is_new else BEFORE
        assert contents(fresh) == {((), tuple(expected))}, f"killed at {what}: the file holds something else"
    print(len(ways), "kills")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
