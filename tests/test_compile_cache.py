"""Kernels compile where the home folder cannot be written, and in several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import logging

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixkv.kernels import advance
from radixkv.kernels.compile_cache import use_writable_cache

logging.basicConfig()
use_writable_cache()
types = {"positions_ptr": "*i64", "seq_lens_ptr": "*i32", "slots_ptr": "*i64", "block_table_ptr": "*i32", "num_rows": "i32",
         "stride_table_row": "i32", "BLOCK_SIZE": "constexpr", "TILE": "constexpr"}
source = ASTSource(advance._advance_kernel, types, {(6,): 16, (7,): 128})
print("cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm)
print(triton.knobs.cache.dir)
"""


def start(**environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**kept, "PYTHONPATH": paths, **environment}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.split(), err


@pytest.mark.parametrize("name", ["HOME", "TRITON_CACHE_DIR"])
def test_a_folder_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("a file where a folder should be")  # refuses the superuser too, whom permissions do not stop
    (compiled, folder), err = finish(start(**{name: str(occupied / "home")}))
    assert compiled == "True" and "radixkv-triton-" in folder and not os.path.exists(folder)
    assert f"{occupied}/home" in err and "cannot be written" in err


def test_a_folder_that_can_be_written_is_used(tmp_path: Path) -> None:
    (compiled, folder), err = finish(start(HOME=str(tmp_path)))
    assert compiled == "True" and folder.startswith(str(tmp_path)) and "cannot be written" not in err


def test_processes_that_compile_at_once(tmp_path: Path) -> None:
    running = [start(TRITON_CACHE_DIR=str(tmp_path / "shared")) for _ in range(3)]
    assert [finish(process)[0] for process in running] == [["True", str(tmp_path / "shared")]] * 3
