"""`python -m radixkv bench`: the microbenchmarks that are part of the package, run by pytest in this interpreter."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from radixkv.commands.packages import require_modules
from radixkv.errors import CommandError

# What the benchmarks import beside radixkv and what that needs.
PACKAGES = ("pytest", "pytest-benchmark", "peft", "transformers")
SAVING = ("--benchmark-autosave", "--benchmark-compare", "--benchmark-save", "--benchmark-storage")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of the microbenchmarks."""
    parser.add_argument("pytest_arguments", nargs="*", metavar="ARGUMENT", help="behind `--`: handed on to pytest")


def run(options: argparse.Namespace) -> int:
    """Run the microbenchmarks.

    Args:
        options: as `add_options` defines them.

    Returns:
        The exit status: 0 when each gave the right result within its limit, else 1.

    Raises:
        CommandError: packages are missing, or pytest could not run what was asked for.
        KeyboardInterrupt: it was interrupted.
    """
    require_modules("bench", *PACKAGES)
    import pytest

    interruption = _Interruption()
    with TemporaryDirectory() as folder:
        # Where pytest-benchmark would save results, if it is asked to: without being asked it makes that folder in the current one.
        storage = [] if any(word.startswith(SAVING) for word in options.pytest_arguments) else [f"--benchmark-storage={folder}"]
        status = int(pytest.main([*pytest_arguments(), *storage, *options.pytest_arguments], plugins=[interruption]))
    if interruption.happened:
        raise KeyboardInterrupt
    reasons = {
        pytest.ExitCode.INTERRUPTED: "pytest could not collect the microbenchmarks",
        pytest.ExitCode.INTERNAL_ERROR: "pytest broke",
        pytest.ExitCode.USAGE_ERROR: "pytest does not know these arguments",
        pytest.ExitCode.NO_TESTS_COLLECTED: "no microbenchmark is chosen by these arguments",
    }
    if status in reasons:
        raise CommandError(f"{reasons[pytest.ExitCode(status)]}; it says why above")
    return status


def pytest_arguments() -> list[str]:
    """What pytest is given in any case: the files, wherever they lie, and no settings but its own, of whatever project that may be in."""
    folder = bench_folder()
    own = ["-c", os.devnull, f"--rootdir={folder}", "--noconftest", "--import-mode=importlib", "-p", "no:cacheprovider"]
    return [*own, *map(str, [*sorted(folder.glob("test_bench_*.py")), folder / "tree.py"])]


def bench_folder() -> Path:
    """Where radixkv.bench lies: in a checkout or in an installation."""
    spec = find_spec("radixkv.bench")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        raise CommandError("this installation has no radixkv.bench: install radixkv anew")
    return Path(folders[0])


class _Interruption:
    """A plugin of pytest, whose exit status for Ctrl-C is that of several other things."""

    happened = False

    def pytest_keyboard_interrupt(self) -> None:
        self.happened = True
