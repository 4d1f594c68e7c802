"""A program that runs where some packages cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def run_without(names: Sequence[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, in the root of the repository, in which these packages are not there."""
    program = _BLOCK.format(names=tuple(names)) + code
    return subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
