"""generate_many where room is short, where it is interrupted, and what a step of it costs."""

from __future__ import annotations

import random
import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from radixkv.schedule import Waiting
from tests.many import BLOCK, LENGTH, ROWS, answer_tokens, check_empty, expected_tokens, make_patched
from tests.models import VOCAB_SIZE, counted_tokens, new_tokens, prompt, tiny_qwen2


@pytest.fixture(scope="module")
def expected():
    return expected_tokens()


@pytest.mark.parametrize("order", ["cache", "given"])
@pytest.mark.parametrize("num_blocks", [5, 6, 8, 13])
def test_a_pool_far_too_small_gives_the_same_tokens(expected, num_blocks, order):
    """5 blocks hold the longest prompt with its answer and nothing else; none of these pools holds two documents' rows."""
    model = make_patched(num_blocks)
    assert answer_tokens(model.radixkv.generate_many(ROWS, LENGTH, order=order)) == expected
    check_empty(model)


def test_rows_are_preempted_and_go_on_where_they_were(expected, monkeypatch):
    """Short prompts with long answers: all fit at first, then only some do. What a preempted row computed is mostly found again."""
    model, stock = make_patched(9), tiny_qwen2()
    rows = [prompt(10, seed=i) for i in range(4)]
    alone = [new_tokens(stock.generate(row[None], max_new_tokens=50, do_sample=False), row[None])[0].tolist() for row in rows]
    put_back: list[int] = []
    original = Waiting.put_back

    def note(waiting: Waiting, place: int, key: bytes) -> None:
        put_back.append(place)
        original(waiting, place, key)

    monkeypatch.setattr(Waiting, "put_back", note)
    with counted_tokens(model) as computed:
        got = model.radixkv.generate_many(rows, 50)
    assert answer_tokens(got) == alone
    assert put_back, "nothing was preempted"
    assert sum(computed) < 2 * sum(10 + 49 for _ in rows)
    check_empty(model)


def test_an_answer_that_outgrows_the_pool_fails_alone(expected):
    """It keeps the tokens it had; the others are answered."""
    model = make_patched(4)
    rows = [prompt(8, seed=1), prompt(12, seed=2)]
    stock = tiny_qwen2()
    alone = [new_tokens(stock.generate(row[None], max_new_tokens=100, do_sample=False), row[None])[0].tolist() for row in rows]
    eos = next(token for token in alone[0][3:] if token not in alone[0][:3] and token not in alone[1])
    model.generation_config.eos_token_id = eos
    got = model.radixkv.generate_many(rows, 100)
    assert got[0].finish_reason == "eos" and list(got[0].tokens) == alone[0][: alone[0].index(eos) + 1]
    assert got[1].finish_reason == "error" and "need 1 blocks" in (got[1].error or "")
    assert len(got[1].tokens) == 4 * BLOCK - 12 + 1 and list(got[1].tokens) == alone[1][: len(got[1].tokens)]
    check_empty(model)


def test_blocks_that_others_hold_are_done_without(expected):
    """A lease and a pin take most of the pool."""
    model = make_patched(20)
    handle = model.radixkv
    held = prompt(100, seed=77)
    handle.generate_many([held], 1)
    with handle.match_prefix(held), handle.pin(held):
        assert answer_tokens(handle.generate_many(ROWS, LENGTH)) == expected
        handle.check()
    check_empty(model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("mine")])
@pytest.mark.parametrize("num_done", [1, 4])
def test_an_exception_in_on_result(expected, error, num_done):
    """Ctrl-C returns what is done; any other exception is the caller's. Nothing is held, and what was computed is kept."""
    model = make_patched(200)
    told: list[int] = []

    def on_result(index: int, _answer: Any) -> None:
        told.append(index)
        if len(told) == num_done:
            raise error

    if error is KeyboardInterrupt:
        got = model.radixkv.generate_many(ROWS, LENGTH, on_result=on_result, max_batch_tokens=3)
        done = [index for index, answer in enumerate(got) if answer.finish_reason == "length"]
        assert set(told) <= set(done) and len(done) < len(ROWS)
        assert all(answer.finish_reason in ("length", "interrupted") for answer in got)
        assert all(list(answer.tokens) == tokens[: len(answer.tokens)] for answer, tokens in zip(got, expected, strict=True))
        assert all(list(got[index].tokens) == expected[index] for index in done)
    else:
        with pytest.raises(RuntimeError, match="mine"):
            model.radixkv.generate_many(ROWS, LENGTH, on_result=on_result, max_batch_tokens=3)
    check_empty(model)
    assert answer_tokens(model.radixkv.generate_many(ROWS, LENGTH)) == expected


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """As in a shell; what runs in the background may have been told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("forward", [0, 3, 9])
def test_ctrl_c_in_a_forward_is_raised_when_the_step_is_done(expected, forward):
    model = make_patched(200)
    calls: list[int] = []

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == forward + 1:
            signal.raise_signal(signal.SIGINT)

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    got = model.radixkv.generate_many(ROWS, LENGTH, max_batch_tokens=60)
    hook.remove()
    assert len(calls) == forward + 1
    assert any(answer.finish_reason == "interrupted" for answer in got)
    assert all(list(answer.tokens) == tokens[: len(answer.tokens)] for answer, tokens in zip(got, expected, strict=True))
    check_empty(model)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_twice_does_not_wait_for_the_step(expected):
    model = make_patched(200)

    def interrupt(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    got = model.radixkv.generate_many(ROWS, LENGTH)
    hook.remove()
    assert {answer.finish_reason for answer in got} == {"interrupted"}
    check_empty(model)


def test_a_forward_that_fails(expected):
    model = make_patched(200)
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("layer failed")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="layer failed"):
        model.radixkv.generate_many(ROWS, LENGTH)
    hook.remove()
    check_empty(model)
    assert answer_tokens(model.radixkv.generate_many(ROWS, LENGTH)) == expected


def test_in_another_thread_the_signal_handler_is_left_alone(expected):
    model = make_patched(200)
    handlers: list[Any] = []
    thread = threading.Thread(
        target=lambda: model.radixkv.generate_many(ROWS[:2], 2, on_result=lambda *_: handlers.append(signal.getsignal(signal.SIGINT)))
    )
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler] * 2
    check_empty(model)


def zipf_questions(num_questions: int, num_documents: int, document_len: int) -> list[torch.Tensor]:
    """Questions of 20 tokens on documents of which number k is asked about in proportion to 1 / k, in random order."""
    numbers = random.Random(0)
    documents = [prompt(document_len, seed=3000 + i) for i in range(num_documents)]
    chosen = numbers.choices(documents, [1 / (rank + 1) for rank in range(num_documents)], k=num_questions)
    return [torch.cat([document, prompt(20, seed=4000 + i)]) for i, document in enumerate(chosen)]


def test_hit_rate_in_cache_order():
    """100 questions on 5 documents in a pool that holds a third of them: at least 96 % of what computing each document once would spare."""
    rows = zipf_questions(100, 5, 150)
    best = 100 * 150 - 5 * 150
    shares = {}
    for order in ("cache", "given"):
        model = make_patched(5 * 150 // 3 // BLOCK)
        got = model.radixkv.generate_many(rows, 2, order=order)  # type: ignore[arg-type]
        assert all(answer.finish_reason == "length" for answer in got)
        shares[order] = sum(answer.cached_tokens for answer in got) / best
        check_empty(model)
    print(f"of the best hit rate: cache order {shares['cache']:.1%}, given order {shares['given']:.1%}")
    assert shares["cache"] >= 0.96 > shares["given"]


def test_a_decode_step_makes_no_more_calls_in_a_long_context(monkeypatch):
    """Python calls, and calls of C functions from Python, of 32 rows' steps with a model that computes nothing, 100 tokens or 1,600.

    How many rows are attended to in one call depends on their lengths, from all together to each alone; so that is fixed here.
    """
    monkeypatch.setattr("radixkv.kernels.torch_items.GATHER_BYTES", 1)
    assert count_calls(100) == count_calls(1600)


def test_calls_of_a_decode_step_are_few():
    """32 rows of different lengths, attended to together behind a mask. Cold code and objects make a call more than a microsecond."""
    assert max(count_calls(100)) <= 350


def count_calls(length: int) -> list[int]:
    """Calls in each of four decode steps of 32 rows of about `length` tokens, none of which begins a block."""
    model = make_patched(32 * (length // BLOCK + 2))
    first = length // BLOCK * BLOCK + 2
    rows = [torch.randint(3, VOCAB_SIZE, (first + i % 5,), generator=torch.Generator().manual_seed(i)) for i in range(32)]
    calls, counts = [0], []

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        calls[0] += event in ("call", "c_call")

    def forward(**inputs: Any) -> CausalLMOutputWithPast:
        sys.setprofile(None)
        step, kept = inputs["radixkv_step"], inputs["logits_to_keep"]
        num_tokens, is_decode = inputs["input_ids"].shape[1], isinstance(kept, int)
        for layer in range(step.pool.num_layers):
            key = torch.zeros(1, 2, num_tokens, 32)
            step.store(layer, key, key)
            if is_decode:
                step.attend(layer, torch.zeros(1, 4, num_tokens, 32), scale=1.0, sliding_window=None, softcap=None)
        if is_decode:
            counts.append(calls[0])
        else:
            step.num_attended_layers = step.pool.num_layers
        calls[0] = 0
        sys.setprofile(count)
        return CausalLMOutputWithPast(logits=torch.zeros(1, num_tokens if isinstance(kept, int) else len(kept), VOCAB_SIZE))

    model.forward = forward
    try:
        model.radixkv.generate_many(rows, 8)
    finally:
        sys.setprofile(None)
    assert len(counts) == 7
    # The first steps build what the later ones move on.
    return counts[3:]
