"""The machine and its devices, and what `patch_model` would choose on each."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from radixkv.bench.processor import processor_name
from radixkv.commands.findings import Finding
from radixkv.commands.packages import can_import, project

# Imported by the functions that need it: it may be what is broken.
if TYPE_CHECKING:
    import torch


def look_at_python() -> Iterator[Finding]:
    """The interpreter, against the range that the metadata names."""
    wanted = project()[0]
    detail = f"{platform.python_version()}, {sys.executable} ({wanted})"
    if not can_import("packaging"):
        yield Finding("machine", "python", "note", detail)
        return
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(wanted).contains(platform.python_version(), prereleases=True):
        yield Finding("machine", "python", "ok", detail)
    else:
        yield Finding("machine", "python", "failed", f"{detail}: not supported", f"make a virtual environment with Python {wanted}")


def look_at_system() -> Iterator[Finding]:
    """Operating system, processor and memory."""
    yield Finding("machine", "system", "ok", platform.platform())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("machine", "cpu", "ok", f"{processor_name()}, {cores} of {os.cpu_count()} cores for this process")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("machine", "memory", "ok", f"{total / 2**30:.1f} GiB")


def look_at_devices() -> Iterator[Finding]:
    """Every GPU that torch sees, or why it sees none."""
    import torch

    from radixkv.commands.packages import torch_build

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        detail = (
            f"{about.name}, capability {about.major}.{about.minor}, {about.multi_processor_count} multiprocessors, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
        yield Finding("devices", f"cuda:{index}", "ok", detail)
    if not torch.cuda.is_available():
        build = torch_build(torch)
        reason = f"torch is {build}" if "CPU" in build else f"torch is {build}, but finds no such device or no driver for it"
        yield Finding("devices", "gpu", "note", f"none: {reason}")


def look_at_choices() -> Iterator[Finding]:
    """The backend, the pool and the captured steps of a model on the best device here, by the code that chooses them."""
    from radixkv.attention import choose_backend
    from radixkv.integration.graphs import why_not_captured
    from radixkv.pool import describe_default

    device = best_device()
    choice = choose_backend("auto", device)
    yield Finding("devices", "backend", "ok", f"{choice.name} ({choice.reason})")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        detail = "set: Triton's kernels run in its interpreter, thousands of times slower than compiled"
        yield Finding("devices", "TRITON_INTERPRET", "note", detail, "unset TRITON_INTERPRET")
    yield Finding("devices", "pool", "ok", f"where num_blocks is not given: {describe_default(device)}")
    reason = why_not_captured(choice.name, device)
    if reason is None:
        yield Finding("devices", "cuda graphs", "ok", "decode steps are captured")
    else:
        yield Finding("devices", "cuda graphs", "note", f"decode steps are not captured: {reason}")


def best_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
