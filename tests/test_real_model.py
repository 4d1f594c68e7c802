"""The demo's real model in the main modes: the unpatched model's answers, from what was computed before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radixkv
from radixkv.demo.models import share_weights
from tests.mode_checks import assert_same_and_reused
from tests.mode_parts import Inputs
from tests.models import left_pad
from tests.modes import MODES, ask

QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of France, and what is that of Italy?",
    "Say: one two three one two three.",
]


@pytest.fixture(scope="module")
def pair(smollm2: tuple[Any, Any]) -> tuple[Any, Any]:
    stock = smollm2[0]
    return stock, radixkv.patch_model(share_weights(stock), num_blocks=32, block_size=16)


@pytest.fixture(scope="module")
def rows(smollm2: tuple[Any, Any]) -> list[torch.Tensor]:
    """The questions as the model's chat template has them."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [smollm2[1].apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [torch.tensor(smollm2[1](text)["input_ids"]) for text in texts]


def inputs_of(rows: list[torch.Tensor]) -> Inputs:
    ids, mask = left_pad(rows)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("greedy, ragged", [0, 1, 2]),
        ("sampling", [0]),
        ("beams", [0]),
        ("prompt lookup", [2]),
        ("a loop of one's own", [1]),
        ("generate_many", [0, 1]),
        ("greedy, scores and logits", [2, 0]),
    ],
)
def test_a_mode_on_the_real_model(pair: tuple[Any, Any], rows: list[torch.Tensor], name: str, chosen: list[int]) -> None:
    patched = pair[1]
    patched.radixkv.clear()
    patched.radixkv.reset_stats()
    inputs = inputs_of([rows[i] for i in chosen])
    if name == "a loop of one's own":
        del inputs["attention_mask"]
    assert_same_and_reused(*pair, MODES[name], inputs)


def test_a_pipeline_of_the_real_model(pair: tuple[Any, Any], smollm2: tuple[Any, Any]) -> None:
    """Two turns of a conversation, the second of which finds the first."""
    stock, patched = pair
    mode = MODES["a pipeline with a chat template"]
    expected = ask(stock, mode, tokenizer=smollm2[1])
    patched.radixkv.clear()
    patched.radixkv.reset_stats()
    assert ask(patched, mode, tokenizer=smollm2[1]) == expected
    stats = patched.radixkv.stats()
    assert (stats.requests, stats.hits, stats.stock_calls) == (2, 1, 0)


def test_it_knows_what_it_is_asked(pair: tuple[Any, Any], rows: list[torch.Tensor], smollm2: tuple[Any, Any]) -> None:
    answer = ask(pair[1], MODES["greedy"], inputs_of(rows[:1]))
    assert "Paris" in smollm2[1].decode(answer[0])
