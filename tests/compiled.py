"""Scripts that compile kernels for a GPU that is not there, each run in a process without the interpreter, which cannot compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_script(script: str, *arguments: str) -> str:
    """Run a script of this repository with kernels that can be compiled, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{script} {' '.join(arguments)}: {done.stderr[-3000:]}"
    return done.stdout


def read_json(script: str, *arguments: str) -> Any:
    """Run a script and parse the JSON that it printed."""
    return json.loads(run_script(script, *arguments))
