"""`python -m radixkv demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from radixkv.demo import cli
from radixkv.demo.errors import DemoError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the package.

    Args:
        arguments: The words behind `python -m radixkv`; None takes them from the command line.

    Returns:
        The exit status: 0, or 1 when the demo found a difference, or 2 when it could not run.
    """
    parser = argparse.ArgumentParser(prog="python -m radixkv", description="RadixAttention for Hugging Face models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    what = "run a real model unpatched and patched, side by side, and compare every answer"
    cli.add_options(commands.add_parser("demo", help=what, description=what))
    try:
        return cli.run(parser.parse_args(arguments))
    except DemoError as error:
        print(f"radixkv demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
