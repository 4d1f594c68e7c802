"""TRAPS.md names tests that exist, and every fault has a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = [
    tuple(cell.strip() for cell in line.strip().strip("|").rsplit("|", 1))
    for line in (TESTS / "TRAPS.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| fault"))
]


def test_every_known_fault_is_listed():
    assert len(ROWS) == 15 + 12 + 5
    assert len({fault for fault, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("fault", "cover"), ROWS, ids=[fault[:40] for fault, _ in ROWS])
def test_a_fault_is_covered(fault, cover):
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cover)
    assert cover.count("`") == 2 * len(named), "every name in backquotes is file::function"
    assert named
    for file, function in named:
        source = (TESTS / file).read_text(encoding="utf-8")
        functions = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
        assert function in functions, f"{file} has no {function}"
