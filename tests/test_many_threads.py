"""generate_many in several threads on one pool that is too small for all: it waits for room, and never for ever."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from tests.many import BLOCK, LENGTH, ROWS, answer_tokens, check_empty, expected_tokens, make_patched
from tests.models import prompt


@pytest.fixture(scope="module")
def expected():
    return expected_tokens()


@pytest.mark.parametrize("num_blocks", [6, 9, 20])
def test_calls_of_several_threads_wait_for_each_other(expected, num_blocks):
    """The pool holds one call's longest prompt, or a few rows; a call for which there is no room goes on when another one's rows leave."""
    model = make_patched(num_blocks)
    got: dict[int, list[Any]] = {}

    def ask(caller: int) -> None:
        got[caller] = model.radixkv.generate_many(ROWS, LENGTH, namespace=(caller,), progress=False)

    threads = [threading.Thread(target=ask, args=(caller,)) for caller in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answers in got.values():
        assert [answer.error for answer in answers] == [None] * len(ROWS)
        assert answer_tokens(answers) == expected
    assert len(got) == 3
    check_empty(model)


def test_beside_a_generate_that_holds_the_pool(expected):
    """It is waited for; what outgrows the pool when nobody else is there fails as ever."""
    model = make_patched(6)
    entered, leave = threading.Event(), threading.Event()

    class Stay(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            entered.set()
            leave.wait(60)
            return scores

    held = prompt(5 * BLOCK, seed=50)[None]
    arguments = {"max_new_tokens": 2, "do_sample": False, "logits_processor": LogitsProcessorList([Stay()])}
    other = threading.Thread(target=lambda: model.generate(held, **arguments))
    other.start()
    entered.wait(60)
    threading.Timer(0.5, leave.set).start()
    assert answer_tokens(model.radixkv.generate_many(ROWS, LENGTH)) == expected
    assert leave.is_set(), "there was room before"
    other.join()
    (answer,) = model.radixkv.generate_many([prompt(5 * BLOCK, seed=51)], 2 * BLOCK)
    assert answer.finish_reason == "error"
    check_empty(model)


def run_all(*targets: Any) -> None:
    """Each in a thread of its own; none may hang."""
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a call hangs"


def ends_early(model: Any, row: torch.Tensor) -> GenerationConfig:
    """With this the answer to a row ends with its first token, and other rows' go on."""
    token = model.radixkv.generate_many([row], 1)[0].tokens[0]
    model.radixkv.clear()
    return GenerationConfig(eos_token_id=token)


def test_calls_inside_of_calls_do_not_wait_for_each_other():
    """Two threads have rows, and in the middle of it each asks for room that there is not: neither waits for the other one to be done."""
    model = make_patched(12)
    rows = [prompt(20, seed=1), prompt(40, seed=2)]
    config, both = ends_early(model, rows[0]), threading.Barrier(2)
    inner: list[Any] = []

    def on_result(index: int, _answer: Any) -> None:
        if index == 0:
            both.wait(60)
            inner.extend(model.radixkv.generate_many([prompt(150, seed=3 + len(inner))], 2))

    run_all(*[lambda: model.radixkv.generate_many(rows, 10, generation_config=config, on_result=on_result)] * 2)
    assert [answer.finish_reason for answer in inner] == ["error"] * 2
    check_empty(model)


@pytest.mark.parametrize(("length", "max_new_tokens"), [(150, 2), (40, 100)], ids=["does not fit", "fits and cannot grow"])
def test_a_call_that_somebody_with_rows_waits_for_is_not_waiting_for_ever(monkeypatch, length, max_new_tokens):
    monkeypatch.setattr("radixkv.integration.engine.LONGEST_STANDSTILL", 1.0)
    model = make_patched(12)
    rows = [prompt(30, seed=1), prompt(90, seed=2)]
    config = ends_early(model, rows[0])
    inner: list[Any] = []

    def on_result(index: int, _answer: Any) -> None:
        if index == 0:
            run_all(lambda: inner.extend(model.radixkv.generate_many([prompt(length, seed=7)], max_new_tokens)))

    run_all(lambda: model.radixkv.generate_many(rows, 20, generation_config=config, on_result=on_result))
    assert [answer.finish_reason for answer in inner] == ["error"]
    check_empty(model)


def test_what_never_fits_is_said_at_once_however_busy_others_are():
    model = make_patched(12)
    done, answers = threading.Event(), []

    def busy() -> None:
        while not done.is_set():
            model.radixkv.generate_many([prompt(20, seed=1)], 8)

    def ask() -> None:
        answers.extend(model.radixkv.generate_many([prompt(12 * BLOCK - 2, seed=2)], 20))
        done.set()

    run_all(busy, busy, ask)
    assert answers[0].finish_reason == "error"
    check_empty(model)
