"""generate_many: the tokens that generate() gives for each prompt alone, each shared prefix computed once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import radixkv
from radixkv.integration.graphs import DecodeGraphs
from tests.many import LENGTH, answer_tokens, make_patched, questions
from tests.models import VOCAB_SIZE, assert_varied, counted_tokens, new_tokens, prompt, tiny_qwen2
from tests.test_graphs import Recorded


def alone(model: Any, row: torch.Tensor, **options: Any) -> list[int]:
    """What generate() of a model gives for one prompt."""
    return new_tokens(model.generate(row[None], **{"max_new_tokens": LENGTH, "do_sample": False, **options}), row[None])[0].tolist()


RAGGED = [*(prompt(length, seed=length) for length in (70, 33, 5, 48, 1, 16, 17)), *questions(0, 50, 3), prompt(33, seed=33)]


@pytest.mark.parametrize("order", ["cache", "given"])
@pytest.mark.parametrize("max_batch_tokens", [None, 64, 7])
def test_ragged_prompts(reference, patched, order, max_batch_tokens):
    expected = [alone(reference, row) for row in RAGGED]
    assert_varied(torch.tensor(expected))
    for _ in range(2):
        with counted_tokens(patched) as rows:
            got = patched.radixkv.generate_many(RAGGED, LENGTH, order=order, max_batch_tokens=max_batch_tokens)
        assert answer_tokens(got) == expected
        assert all(answer.finish_reason == "length" and answer.error is None and answer.text is None for answer in got)
        assert [answer.prompt_tokens for answer in got] == [len(row) for row in RAGGED]
        assert max_batch_tokens is None or max(rows) <= max_batch_tokens
    assert [answer.cached_tokens for answer in got] == [len(row) - 1 for row in RAGGED]


def test_prompts_of_every_kind(reference, patched):
    row = prompt(20, seed=1)
    kinds = [row, row[None], row.numpy(), row.tolist(), tuple(row.tolist())]
    assert answer_tokens(patched.radixkv.generate_many(kinds, LENGTH)) == [alone(reference, row)] * 5
    assert patched.radixkv.generate_many([], LENGTH) == []
    assert answer_tokens(patched.radixkv.generate_many(row[None], LENGTH)) == [alone(reference, row)]


def test_one_prompt_of_one_token_and_one_new_token(reference, patched):
    (answer,) = patched.radixkv.generate_many([[5]], 1)
    assert list(answer.tokens) == alone(reference, torch.tensor([5]), max_new_tokens=1)


@pytest.mark.parametrize("max_batch_tokens", [None, 90])
def test_every_shared_prefix_is_computed_once(patched, max_batch_tokens):
    """With little room in a step, questions find a document in rows that are still running, its last block, which is not full, too."""
    rows = [*questions(1, 70, 6), *questions(2, 55, 6)]
    with counted_tokens(patched) as computed:
        got = patched.radixkv.generate_many(rows, LENGTH, max_batch_tokens=max_batch_tokens)
    own = sum(len(row) for row in rows) - 5 * (70 + 55)
    assert sum(computed) == own + len(rows) * (LENGTH - 1)
    assert sum(answer.cached_tokens for answer in got) == 5 * (70 + 55)


def test_a_prompt_that_begins_like_a_running_one_with_its_answer(reference, patched):
    """The answer itself is reused, as far as it is computed, by a prompt that waits until then."""
    first = prompt(40, seed=3)
    follow_up = torch.cat([first, torch.tensor(alone(reference, first)), prompt(5, seed=4)])
    got = patched.radixkv.generate_many([first, follow_up], LENGTH, order="given", max_batch_tokens=1)
    assert answer_tokens(got) == [alone(reference, first), alone(reference, follow_up)]
    assert got[1].cached_tokens >= 40


def test_end_of_sequence(reference, patched):
    rows = RAGGED[:6]
    free = [alone(reference, row) for row in rows]
    eos = [free[0][3], free[2][0], free[3][7]]
    config = GenerationConfig(eos_token_id=eos, pad_token_id=0, max_new_tokens=LENGTH)
    expected = [alone(reference, row, eos_token_id=eos, pad_token_id=0) for row in rows]
    got = patched.radixkv.generate_many(rows, generation_config=config)
    assert answer_tokens(got) == expected
    assert {len(tokens) for tokens in expected} > {1, LENGTH}
    assert [answer.finish_reason for answer in got] == ["eos" if tokens[-1] in eos else "length" for tokens in expected]


def test_results_are_told_as_they_come(patched):
    rows, told = RAGGED, []
    got = patched.radixkv.generate_many(rows, LENGTH, on_result=lambda index, answer: told.append((index, answer)), max_batch_tokens=3)
    assert sorted(index for index, _ in told) == list(range(len(rows)))
    assert all(answer is got[index] for index, answer in told)


def test_failing_prompts_are_reported_in_their_own_answers(reference):
    model = make_patched(12)
    good = [prompt(40, seed=5), prompt(9, seed=6)]
    limit = model.config.max_position_embeddings
    bad = [[], [5, VOCAB_SIZE], [-1], [0.5], ["a"], prompt(12 * 16 + 1, seed=7), [3] * limit, None, {"input_ids": [1]}, [[1, 2], [3, 4]]]
    told: list[int] = []
    got = model.radixkv.generate_many([good[0], *bad, good[1]], LENGTH, on_result=lambda index, _: told.append(index))
    assert sorted(told) == list(range(len(bad) + 2))
    assert answer_tokens([got[0], got[-1]]) == [alone(reference, row) for row in good]
    for answer in got[1:-1]:
        assert (answer.finish_reason, answer.tokens) == ("error", ()) and answer.error
    assert "empty" in got[1].error and f"{VOCAB_SIZE} is not below" in got[2].error
    assert "pool" in got[6].error and "the model's limit" in got[7].error
    model.radixkv.check()


def test_weights_that_change_meanwhile(reference, patched):
    """Another thread's call may find that the weights changed; whatever was running is computed anew."""
    rows = RAGGED[:4]
    config = GenerationConfig(eos_token_id=alone(reference, rows[0])[2], pad_token_id=0, max_new_tokens=LENGTH)
    expected = [alone(reference, row, eos_token_id=config.eos_token_id, pad_token_id=0) for row in rows]
    got = patched.radixkv.generate_many(rows, generation_config=config, on_result=lambda *_: patched.radixkv.invalidate())
    assert answer_tokens(got) == expected


def test_namespaces_are_kept_apart(patched):
    rows = questions(4, 50, 2)
    patched.radixkv.generate_many(rows, 2, namespace=("a",))
    assert [answer.cached_tokens for answer in patched.radixkv.generate_many(rows[:1], 2)] == [0]
    assert [answer.cached_tokens for answer in patched.radixkv.generate_many(rows[:1], 2, namespace=("a",))] == [len(rows[0]) - 1]


def test_beside_generate_in_other_threads(reference, patched):
    rows = RAGGED
    expected = [alone(reference, row) for row in rows]
    wrong: list[int] = []

    def ask() -> None:
        for _ in range(2):
            wrong.extend(i for i, row in enumerate(rows) if alone(patched, row) != expected[i])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    got = [patched.radixkv.generate_many(rows, LENGTH, max_batch_tokens=100) for _ in range(2)]
    for thread in threads:
        thread.join()
    assert not wrong and [answer_tokens(answers) for answers in got] == [expected] * 2


def test_hooks_on_the_model_run_and_see_packed_tokens(patched):
    shapes = []
    handle = patched.register_forward_pre_hook(lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    patched.radixkv.generate_many([[5, 6, 7], [8, 9]], 3)
    handle.remove()
    assert shapes == [(1, 5), (1, 2), (1, 2)]


def test_triton_with_captured_steps():
    model, stock = tiny_qwen2(seed=3, num_layers=2), tiny_qwen2(seed=3, num_layers=2)
    radixkv.patch_model(model, num_blocks=64, block_size=16, backend="triton")
    model.radixkv.graphs = DecodeGraphs(Recorded())
    rows = [prompt(n, seed=n) for n in (12, 25, 33, 7)]
    eos = alone(stock, rows[1])[1]
    config = GenerationConfig(eos_token_id=eos, pad_token_id=0, max_new_tokens=6)
    got = model.radixkv.generate_many(rows, generation_config=config, max_batch_tokens=40)
    assert answer_tokens(got) == [alone(stock, row, eos_token_id=eos, pad_token_id=0, max_new_tokens=6) for row in rows]
    assert model.radixkv.graphs.num_replays > 0
    model.radixkv.check()
