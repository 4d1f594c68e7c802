"""The processor that something was measured on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """As Linux tells it; elsewhere, or where Linux tells none, the kind of processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
