"""A loose bound on CPU speed; `bench/question_speed.py` measures it closely, on the demo's model."""

from __future__ import annotations

import pytest
import torch

import radixkv
from radixkv.bench.question_speed import measure_cold, measure_warm
from radixkv.demo.documents import Prompt
from radixkv.demo.models import share_weights
from tests.models import prompt, tiny_qwen2

SHARED, OWN, PAIRS, NEW = 400, 20, 10, 8


@pytest.fixture
def one_thread():
    """Two threads wait for each other, which on a busy machine is all that one would measure."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_questions_are_answered_about_as_fast_as_by_the_baselines(one_thread):
    stock = tiny_qwen2(num_layers=6, heads=(9, 3, 64), intermediate_size=1536)
    patched = radixkv.patch_model(share_weights(stock), num_blocks=64)
    document = prompt(SHARED, seed=1).tolist()
    prompts = [Prompt(f"question {i}", (*document, *prompt(OWN, seed=2 + i).tolist()), SHARED) for i in range(PAIRS)]
    for speed in (measure_cold(stock, patched, prompts, NEW), measure_warm(stock, patched, prompts, NEW)):
        assert len(speed.ratios) == PAIRS - 1
        assert speed.median_ratio >= 0.8, str(speed)
    assert patched.radixkv.stats().hits >= PAIRS
