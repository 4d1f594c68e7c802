"""What the tests of generate_many share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import radixkv
from radixkv.integration.answers import Answer
from tests.models import new_tokens, prompt, tiny_qwen2

LENGTH = 12  # new tokens of an answer
BLOCK = 16


def make_patched(num_blocks: int, **options: Any) -> Any:
    return radixkv.patch_model(tiny_qwen2(), num_blocks=num_blocks, block_size=BLOCK, **options)


def questions(document: int, document_len: int, count: int) -> list[torch.Tensor]:
    """Prompts of one document and questions of 4, 5, 6, ... tokens, the first of which differs in each."""
    shared = prompt(document_len, seed=1000 + document)
    return [torch.cat([shared, torch.tensor([100 + i]), prompt(3 + i, seed=2000 + 50 * document + i)]) for i in range(count)]


ROWS = [*questions(5, 40, 5), *(prompt(length, seed=length) for length in (31, 7, 58)), *questions(6, 20, 3)]


def expected_tokens() -> list[list[int]]:
    """What the unpatched model answers to ROWS, one by one."""
    stock = tiny_qwen2()
    return [new_tokens(stock.generate(row[None], max_new_tokens=LENGTH, do_sample=False), row[None])[0].tolist() for row in ROWS]


def check_empty(model: Any) -> None:
    """Nothing is held, and every block is where it belongs."""
    model.radixkv.check()
    assert model.radixkv.stats().blocks_leased == 0


def answer_tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [list(answer.tokens) for answer in answers]
