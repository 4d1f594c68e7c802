"""`python -m radixkv`: which command is meant, its options, and how it ends."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

import radixkv
from radixkv.commands.findings import one_line
from radixkv.commands.help import COMMANDS, DESCRIPTION, describe_command, describe_commands
from radixkv.commands.packages import pip_install
from radixkv.errors import CommandError

DEBUG_HELP = "show the traceback of an error"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the package.

    Args:
        arguments: the words behind `python -m radixkv`; None takes them from the command line.

    Returns:
        The exit status: the command's own 0 or 1, 2 when it could not run, 130 when it was interrupted. Wrong usage raises SystemExit(2).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    before = words[: words.index("--")] if "--" in words else words
    name = next((word for word in before if not word.startswith("-")), None)
    program = "radixkv" if name is None else f"radixkv {name}"
    try:
        status = _run(words, name)
        if sys.stdout is not None:  # closed by whoever called this
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has enough. What is still to be flushed at the end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if "--debug" in before:
            traceback.print_exc()
        print(f"{program}: {_explain(error)}", file=sys.stderr)
        return 2


def _run(words: list[str], name: str | None) -> int:
    begin = len(words) if name is None else words.index(name)
    options = _top_parser().parse_args(words[:begin])
    if name is None:
        _top_parser().print_help()
        return 0
    command = COMMANDS.get(name)
    if command is None:
        close = get_close_matches(name, COMMANDS, 1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        _top_parser().error(f"there is no command {name!r}{meant}; commands: {', '.join(COMMANDS)}")
    module = import_module(command.module)
    parser = argparse.ArgumentParser(
        prog=f"{_program()} {name}",
        description=command.purpose.capitalize() + ".",
        epilog=describe_command(command, _program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_options(parser)
    parser.add_argument("--debug", action="store_true", default=options.debug, help=DEBUG_HELP)
    return module.run(parser.parse_args(words[begin + 1 :]))


def _top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_program(),
        usage=f"{_program()} [-h] [--version] [--debug] COMMAND [OPTION ...]",
        description=DESCRIPTION,
        epilog=describe_commands(_program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"radixkv {radixkv.__version__}")
    parser.add_argument("--debug", action="store_true", help=f"{DEBUG_HELP}; also behind the command")
    return parser


def _program() -> str:
    """How this was called."""
    return "radixkv" if Path(sys.argv[0]).stem == "radixkv" else "python -m radixkv"


def _explain(error: Exception) -> str:
    """An error in one line, with what to do about it."""
    if isinstance(error, CommandError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name is not None and not error.name.startswith("radixkv"):
        package = error.name.partition(".")[0]
        return f"the package {package} is not installed: {pip_install(package)} (`{_program()} doctor` says what else is missing)"
    return f"{one_line(error)} (--debug shows where; `{_program()} doctor` checks the installation)"


if __name__ == "__main__":
    sys.exit(main())
