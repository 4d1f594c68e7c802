"""The command line: what `--help` teaches, how errors end, and the microbenchmarks that it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import radixkv
from radixkv.__main__ import main
from radixkv.commands import bench, doctor, packages
from radixkv.commands.help import COMMANDS
from radixkv.errors import CommandError

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "radixkv", *arguments]
    return subprocess.run(command, env=environment, text=True, check=False, **{"capture_output": True, **options})


def fails_with(error: BaseException):
    def run(options) -> int:
        raise error

    return run


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 0
    output = capsys.readouterr().out
    assert "radixkv.patch_model(model)" in output
    for name, command in COMMANDS.items():
        assert command.purpose in output and f"python -m radixkv {name}" in output


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_examples_and_exit_statuses(name, capsys):
    with pytest.raises(SystemExit) as raised:
        main([name, "--help"])
    assert raised.value.code == 0
    output = capsys.readouterr().out
    assert f"examples:\n  python -m radixkv {name}" in output
    _, statuses = output.split("exit status:\n")
    assert [line.split()[0] for line in statuses.splitlines()] == ["0", "1", "2", "130"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_are_lines_that_the_command_takes(name, monkeypatch):
    """An example with an option that is gone would teach what does not work."""
    from importlib import import_module
    from shlex import split

    monkeypatch.setattr(import_module(COMMANDS[name].module), "run", lambda options: 0)
    for example in COMMANDS[name].examples:
        words = split(example.partition(">")[0])
        assert words[0] == name and main(words) == 0


def test_the_version(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0 and capsys.readouterr().out == f"radixkv {radixkv.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["doktor"], "there is no command 'doktor' (did you mean doctor?)"),
        (["--fast", "doctor"], "--fast"),
        (["doctor", "--fast"], "--fast"),
        (["doctor", "now"], "now"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CommandError("no such file"), "radixkv doctor: no such file"),
        (RuntimeError("first line\nsecond line"), "radixkv doctor: RuntimeError: first line (--debug shows where; "),
        (RuntimeError(), "radixkv doctor: RuntimeError (--debug shows where; "),
        (ModuleNotFoundError("no", name="gguf.reader"), "radixkv doctor: the package gguf is not installed: "),
    ],
    ids=["to be mended", "unexpected", "silent", "missing"],
)
def test_an_error_is_one_line_and_its_traceback_for_those_who_ask(error, said, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "run", fails_with(error))
    assert main(["doctor"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(said) and output.err.count("\n") == 1 and not output.out
    for words in (["--debug", "doctor"], ["doctor", "--debug"]):
        assert main(words) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith("Traceback") and lines[-1].startswith(said)


def test_a_missing_package_is_named_with_the_command_that_installs_it(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "run", fails_with(ModuleNotFoundError("no", name="gguf.reader")))
    main(["doctor"])
    assert "-m pip install 'gguf' (`python -m radixkv doctor` says what else is missing)" in capsys.readouterr().err


def test_debug_behind_two_hyphens_is_for_pytest(capsys, monkeypatch):
    monkeypatch.setattr(bench, "run", fails_with(RuntimeError("broken")))
    assert main(["bench", "--", "--debug"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupted_command_is_status_130(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "run", fails_with(KeyboardInterrupt()))
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_has_enough_is_no_error():
    """`python -m radixkv ... | head` ended in a traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    result = run(capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_closed_stdout_is_no_error(monkeypatch):
    """`python -m radixkv ... >&-` failed after everything was done."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main([]) == 0


def test_the_help_needs_no_torch():
    """A broken torch is what people call the doctor for."""
    code = "import sys; sys.modules['torch'] = None; from radixkv.__main__ import main; sys.exit(main([]))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "commands:" in result.stdout


@pytest.mark.parametrize(
    ("status", "expected", "said"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (2, 2, "could not collect"),
        (3, 2, "pytest broke"),
        (4, 2, "does not know these arguments"),
        (5, 2, "no microbenchmark is chosen"),
    ],
)
def test_bench_hands_arguments_on_and_translates_the_status(status, expected, said, capsys, monkeypatch):
    calls = []

    def record(arguments, plugins) -> int:
        calls.append(arguments)
        return status

    monkeypatch.setattr(pytest, "main", record)
    assert main(["bench", "--", "-k", "match", "--benchmark-disable"]) == expected
    (arguments,) = calls
    assert arguments[-3:] == ["-k", "match", "--benchmark-disable"]
    files = {Path(argument).name for argument in arguments if argument.endswith(".py")}
    assert files == {"tree.py", *(path.name for path in (ROOT / "bench").glob("test_bench_*.py"))}
    assert said in capsys.readouterr().err


def test_an_interrupted_bench_is_status_130(monkeypatch):
    """pytest's own status for it is 2, as for a file that cannot be collected."""

    def interrupt(arguments, plugins) -> int:
        plugins[0].pytest_keyboard_interrupt()
        return 2

    monkeypatch.setattr(pytest, "main", interrupt)
    assert main(["bench"]) == 130


def test_bench_says_what_is_missing_before_anything_runs(capsys, monkeypatch):
    missing = {"pytest_benchmark", "peft"}
    monkeypatch.setattr(packages, "can_import", lambda module: module not in missing)
    monkeypatch.setattr(pytest, "main", fails_with(AssertionError("it ran")))
    assert main(["bench"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("radixkv bench: bench needs pytest-benchmark, peft: ")
    assert said.endswith("-m pip install 'pytest-benchmark' 'peft' (the extra test of radixkv)\n")


def test_bench_runs_in_any_folder_and_takes_the_settings_of_no_other_project(tmp_path):
    """The tree's microbenchmarks were left out by pytest 9, which takes a file inside a folder named before it for a part of that."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('not asked for')\n")
    others = [f"--ignore={bench.bench_folder() / f'test_bench_{name}.py'}" for name in ("kernels", "weights")]
    result = run("bench", "--", "--collect-only", "-q", "-k", "nobody_listening or test_key_of_a_list", *others, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert {line.split("[")[0] for line in result.stdout.splitlines() if "::" in line} == {
        "test_bench_events.py::test_lock_with_nobody_listening",
        "test_bench_events.py::test_insertion_with_nobody_listening",
        "tree.py::test_key_of_a_list",
    }
    assert {path.name for path in tmp_path.iterdir()} == {"pytest.ini", "conftest.py"}


def test_the_console_script_is_main():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"radixkv": "radixkv.__main__:main"}


def test_readme_names_every_command():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"python -m radixkv {name}" in readme for name in COMMANDS)
