"""Each example runs on the demo's real model and prints what it says it does."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_docs import PAGES

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
REUSED = re.compile(r"([\d,]+) of ([\d,]+) (?:prompt )?tokens reused, ")


@pytest.fixture
def run(smollm2_folder, capsys):
    """Call an example's main() with those words; what it printed."""

    def run(name: str, *words: str) -> str:
        runpy.run_path(str(EXAMPLES[name]), run_name="example")["main"](["--model", str(smollm2_folder), *words])
        return capsys.readouterr().out

    return run


def reused(printed: str) -> list[tuple[int, int]]:
    """Of each line that tells of it, how many tokens of how many were reused."""
    return [(int(part.replace(",", "")), int(whole.replace(",", ""))) for part, whole in REUSED.findall(printed)]


def test_a_retrieved_document_is_computed_once(run):
    printed = run("rag", "--questions", "4", "--max-new-tokens", "6")
    *each, total = reused(printed)
    assert len(each) == 4
    assert all(part < 30 for part, _ in each[:2]), "each document comes for the first time"
    assert all(part > 0.9 * whole for part, whole in each[2:])
    assert total == (sum(part for part, _ in each), sum(whole for _, whole in each))
    assert printed.count("[The lighthouse lens of Augustin Fresnel]") == printed.count("[The Aral Sea and its water]") == 2
    assert "2 of 4 prompts hit" in printed


def test_each_turn_of_a_chat_reuses_the_turns_before(run):
    printed = run("chat", "--max-new-tokens", "8", "--say", "Name a river.", "Name another one.", "Thank you!")
    (first, first_len), *others = reused(printed)
    assert first == 0 and len(others) == 2
    # The answer is reused with the question, but for its last token, which was drawn and never computed.
    assert others[0][0] >= first_len + 6
    assert others[1][0] >= others[0][1] + 6
    assert printed.count("user: ") == printed.count("assistant: ") == 3


def test_the_best_of_several_answers_is_the_likeliest(run):
    printed = run("best_of_n", "--n", "3", "--max-new-tokens", "8")
    drawn = [(float(score), text) for score, text in re.findall(r"^ *(-\d+\.\d\d)  (.*)$", printed, re.MULTILINE)]
    assert len(drawn) == 3
    (best,) = re.findall(r"^best: (.*)$", printed, re.MULTILINE)
    assert (max(score for score, _ in drawn), best) in drawn
    ((part, whole),) = reused(printed)
    assert part == 2 * (whole // 3 - 1), "the prompt is computed once, and its last token, whose logits are wanted, three times"


def test_a_saved_document_is_loaded_by_the_next_run(run, tmp_path):
    words = ("save_and_load", "--file", str(tmp_path / "prefixes.safetensors"), "--max-new-tokens", "6")
    first, second = run(*words), run(*words)
    assert "saved " in first and "loaded " not in first
    assert "loaded " in second and "saved " not in second
    ((before, _),), ((part, whole),) = reused(first), reused(second)
    assert before == 0 and part > 0.9 * whole


def test_a_loop_of_ones_own_forks_and_stores(run):
    printed = run("own_loop", "--max-new-tokens", "6")
    ways = re.findall(r"^\.\.\.(.*)$", printed, re.MULTILINE)
    assert len(set(ways)) == 2
    # All that was stored: the prompt and what followed it, but for the last token.
    assert reused(printed) == [(16, 17)]


def test_a_few_shot_evaluation_as_a_user_runs_it(smollm2_folder, tmp_path):
    """As a program of its own. (The model that it takes by itself is this one: `load_model()` has made the folder.)"""
    command = [sys.executable, str(EXAMPLES["few_shot_eval"]), "--model", str(smollm2_folder), "--queries", "6"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("France: Paris (right)\n")
    (num_right,) = re.findall(r"^(\d) of 6 right; ", result.stdout, re.MULTILINE)
    assert int(num_right) == result.stdout.count("(right)") >= 4
    ((part, whole),) = reused(result.stdout)
    assert part > 0.8 * whole * 5 / 6


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_named_in_the_documents(name):
    assert len(EXAMPLES[name].read_text(encoding="utf-8").splitlines()) < 60
    assert any(f"examples/{name}.py" in page.read_text(encoding="utf-8") for page in PAGES)


def test_every_example_is_tested():
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'run("{name}"' in text or f'("{name}"' in text or f'EXAMPLES["{name}"]' in text for name in EXAMPLES)
    assert len(EXAMPLES) == 6
