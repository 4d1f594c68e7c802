"""Whether a command that a document shows could be typed: its target, module, file, options and extras exist. Nothing is run but --help."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from packaging.requirements import InvalidRequirement, Requirement

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
SEPARATORS = ("&&", "||", ";", "|", "&")
# What only moves about, and fails by itself where it is wrong.
UNCHECKED = ("cd", "git")
PIP_OPTIONS = ("-c", "--constraint", "-e", "--editable", "-r", "--requirement", "--no-deps", "-U", "--upgrade", "-q", "--quiet")


def check_shell(text: str) -> None:
    """Check each command of some lines of shell.

    Raises:
        AssertionError: one of them could not be typed here, or nothing here knows how to tell.
    """
    for line in text.replace("\\\n", " ").splitlines():
        for words in _commands(line):
            _check_command(words)


def is_command(text: str) -> bool:
    """Whether a piece of code is a command that `check_shell` knows."""
    return bool(re.match(r"(\S*/)?(make|python3?|pytest|pip) \S", text))


def _commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in SEPARATORS:
            # Settings of the environment before a command are no part of it.
            if words or not re.match(r"[A-Z_]+=", word):
                words.append(word)
        elif words:
            # Where its output goes is no part of it either.
            yield words[: next((i for i, word in enumerate(words) if re.fullmatch(r"\d?>+|<", word)), len(words))]
            words = []


def _check_command(words: list[str]) -> None:
    name, *rest = words
    program = name.rpartition("/")[2]
    if program in UNCHECKED:
        return
    if program == "make":
        # Named here, so that make need not look for one.
        result = subprocess.run(["make", "--dry-run", "PYTHON=python", *rest], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"`{' '.join(words)}`: {result.stderr.strip()}"
    elif program == "pytest" or rest[:2] == ["-m", "pytest"]:
        _check_pytest(rest if program == "pytest" else rest[2:])
    elif program == "pip" or rest[:2] == ["-m", "pip"]:
        _check_pip(rest if program == "pip" else rest[2:])
    elif program in ("python", "python3") and rest:
        _check_script(rest)
    else:
        raise AssertionError(f"`{' '.join(words)}`: no test knows how to check {name}")


def _check_pytest(words: list[str]) -> None:
    for word in words:
        if "/" in word:
            require_path(word)


def _check_pip(words: list[str]) -> None:
    assert words[:1] == ["install"], f"pip {' '.join(words)}: only pip install is checked"
    for option, word in zip(words, words[1:], strict=False):
        if word.startswith("-"):
            assert word in PIP_OPTIONS, f"pip install {word}: no test knows this option"
        elif option in ("-c", "--constraint", "-r", "--requirement"):
            assert (ROOT / word).is_file(), f"pip install {option} {word}: there is no such file"
        else:
            try:
                requirement = Requirement(re.sub(r"^\.(?=\[|$)", "radixkv", word))
            except InvalidRequirement as error:
                raise AssertionError(f"pip install {word}: {error}") from None
            unknown = requirement.extras - EXTRAS.keys() if requirement.name == "radixkv" else set()
            assert not unknown, f"pip install {word}: there is no extra {', '.join(sorted(unknown))}"


def _check_script(words: list[str]) -> None:
    """`python FILE ...` or `python -m MODULE ...`: it takes the options, and --help behind the words before them."""
    is_module = words[0] == "-m"
    target, *arguments = words[1:] if is_module else words
    options = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    leading = arguments[: next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))]
    text = _help(is_module, target, tuple(leading))
    for option in options:
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text), f"{target} has no option {option}"


@functools.cache
def _help(is_module: bool, target: str, leading: tuple[str, ...]) -> str:
    if not is_module:
        require_path(target)
        assert "argparse" in (ROOT / target).read_text(encoding="utf-8"), f"{target} has no --help"
    printed, status = io.StringIO(), None
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [target, *leading, "--help"]))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        try:
            if is_module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / target), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        except ImportError as error:
            raise AssertionError(f"python -m {target}: {error}") from None
    assert status == 0, f"{' '.join((target, *leading))} --help ended with {status}: {printed.getvalue()[-300:]}"
    return printed.getvalue()


def require_path(name: str) -> None:
    """Check that a file of the repository exists, `FILE`, or in it a test, `FILE::NAME`."""
    path, _, member = name.partition("::")
    assert (ROOT / path).exists(), f"there is no {path}"
    if member:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(def|class) {re.escape(member.rpartition('::')[2])}\b", text, re.MULTILINE), f"{path} has no {member}"
