"""bench/scenarios.py: a dry run of every scenario and way on small random models, its requests, its file of rows, and its report."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path
from typing import Any

import pytest

from radixkv.bench import scenarios
from radixkv.bench.generate_methods import has_generate_batch
from radixkv.bench.models import random_qwen2
from radixkv.bench.scenario_cases import BUILDERS, FULL, QUICK, Scenario, Sizes, Tokens, build_scenario
from radixkv.bench.scenario_report import render
from radixkv.bench.scenario_results import (
    BATCH,
    COPIED,
    LONG_METHODS,
    METHODS,
    NO_CACHE,
    OURS,
    PLAIN,
    Row,
    append_row,
    read_rows,
    summarise,
)
from radixkv.demo.measure import generate

TINY = Sizes(*(2, 150, 4, 3), *(2, 2, 3), *(2, 2), *(160, 2, 2), *(1, 3, 2), *(6, 4))


class LetterTokenizer:
    """One token for each letter of Latin-1; what is between messages are tokens of their own."""

    vocab_size = 400
    bounds = {"system": 300, "user": 301, "assistant": 302}

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": list(text.encode("latin-1", errors="replace"))}

    def decode(self, tokens: Any, *, skip_special_tokens: bool = False) -> str:
        return bytes(token for token in tokens if token < 256).decode("latin-1")

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> dict[str, list[int]]:
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        tokens = []
        for message in messages:
            tokens += [self.bounds[message["role"]], *self(message["content"], add_special_tokens=False)["input_ids"], 303]
        return {"input_ids": [*tokens, self.bounds["assistant"]]}


def small_model() -> Any:
    return random_qwen2(LetterTokenizer.vocab_size, hidden=64, num_layers=1)


def scenario_of(name: str, seed: int = 0, sizes: Sizes = TINY) -> Scenario:
    return build_scenario(name, LetterTokenizer(), sizes, seed)


def plain_answer(model: Any, prompt: Tokens, num_new: int) -> Tokens:
    return tuple(generate(model, [prompt], num_new).answers[0])


def found_by_hand(prompt: Tokens, stored: list[Tokens], page_size: int = 1) -> int:
    """The longest beginning of the prompt, short of its last token and in whole pages, with which anything stored begins."""
    longest = max((len(commonprefix([prompt, one])) for one in stored), default=0)
    return min(longest, len(prompt) - 1) // page_size * page_size


@pytest.mark.parametrize("name", ["rag", "chat", "few-shot", "code"])
def test_a_dry_run_counts_what_each_way_computes(name: str) -> None:
    model = small_model()
    # Each call of generate_batch() takes a second whatever it does.
    has_batch = has_generate_batch() and name in ("rag", "chat")
    rows = list(scenarios.measure(model, LetterTokenizer(), TINY, [name], batch=has_batch))
    scenario = scenario_of(name)
    methods = [method for method in METHODS if method != BATCH or has_batch]
    assert [(row.arrival, row.method) for row in rows] == [(i, method) for i in range(scenario.num_requests) for method in methods]
    stored: list[Tokens] = []
    answers: list[Tokens] = []
    owners: set[str] = set()
    for arrival in range(scenario.num_requests):
        request = scenario.request(arrival, answers)
        mine = {row.method: row for row in rows if row.arrival == arrival}
        num_prompt = len(request.prompt)
        expected = {PLAIN: 0, COPIED: request.prefix_len if request.owner in owners else 0, OURS: found_by_hand(request.prompt, stored)}
        if BATCH in mine:
            expected[BATCH] = found_by_hand(request.prompt, stored, page_size=16)
        assert {method: row.reused_tokens for method, row in mine.items()} == expected
        for row in mine.values():
            assert (row.request, row.prompt_tokens, row.computed_tokens) == (request.number, num_prompt, num_prompt - row.reused_tokens)
            assert row.equal is True
            assert row.new_tokens == scenario.num_new
            assert 0 < row.first_token_seconds < row.total_seconds
        answers.append(plain_answer(model, request.prompt, scenario.num_new))
        # The last token of an answer was never computed.
        stored.append(request.prompt + answers[-1][:-1])
        owners.add(request.owner)
    assert sum(row.reused_tokens for row in rows if row.method == OURS) > 0


def test_samples_of_one_prompt_compute_it_once() -> None:
    rows = list(scenarios.measure(small_model(), LetterTokenizer(), TINY, ["best-of-n"]))
    scenario = scenario_of("best-of-n")
    for arrival in range(scenario.num_requests):
        length = len(scenario.request(arrival, []).prompt)
        mine = {row.method: row for row in rows if row.arrival == arrival}
        assert all(row.prompt_tokens == 3 * length and row.new_tokens == 3 * scenario.num_new for row in mine.values())
        assert mine[PLAIN].computed_tokens == 3 * length
        # The last token every sample computes for itself.
        assert mine[COPIED].computed_tokens == length - 1 + 3
        shared = len(commonprefix([scenario.request(0, []).prompt, scenario.request(1, []).prompt])) if arrival else 0
        assert mine[OURS].computed_tokens == length - shared - 1 + 3
        assert mine[COPIED].equal and mine[OURS].equal
        if has_generate_batch():
            assert mine[BATCH].equal is None
            assert length - shared <= mine[BATCH].computed_tokens <= length + 3


def test_a_long_answer_without_a_cache_computes_every_prefix() -> None:
    rows = list(scenarios.measure(small_model(), LetterTokenizer(), TINY, ["long-output"]))
    length = len(scenario_of("long-output").request(0, []).prompt)
    for name, num_new in (("long-output-count", 6), ("long-output", 4)):
        mine = {row.method: row for row in rows if row.scenario == name}
        assert set(mine) == set(LONG_METHODS)
        assert mine[NO_CACHE].computed_tokens == sum(range(length, length + num_new))
        assert mine[PLAIN].computed_tokens == mine[OURS].computed_tokens == length + num_new - 1
        assert all(row.equal and row.new_tokens == num_new for row in mine.values())


def test_an_answer_ends_at_its_end_token() -> None:
    model = small_model()
    prompt = scenario_of("few-shot").request(0, []).prompt
    model.generation_config.eos_token_id = plain_answer(model, prompt, 1)[0]
    rows = [row for row in scenarios.measure(model, LetterTokenizer(), TINY, ["few-shot"]) if row.request == 0]
    assert len(rows) == 3 + has_generate_batch()
    for row in rows:
        assert (row.new_tokens, row.equal, row.computed_tokens) == (1, True, len(prompt)), row.method


def test_a_way_that_answers_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    build = scenarios.build_methods

    def build_one_that_errs(*args: Any, **kwargs: Any) -> Any:
        methods = build(*args, **kwargs)
        answer = methods[-1].answer

        def err(*args: Any) -> Any:
            answered = answer(*args)
            return replace(answered, answers=[[*answered.answers[0][:-1], 0]])

        monkeypatch.setattr(methods[-1], "answer", err)
        return methods

    monkeypatch.setattr(scenarios, "build_methods", build_one_that_errs)
    rows = list(scenarios.measure(small_model(), LetterTokenizer(), TINY, ["few-shot"], batch=False))
    assert {row.method: row.equal for row in rows} == {PLAIN: True, COPIED: True, OURS: False}
    assert "| radixkv |" in render(rows) and "| 0 of 2 |" in render(rows)


@pytest.mark.parametrize("name", BUILDERS)
def test_requests_are_the_same_every_time(name: str) -> None:
    one, other = scenario_of(name), scenario_of(name)
    answers: list[Tokens] = []
    for arrival in range(one.num_requests):
        assert one.request(arrival, answers) == other.request(arrival, answers)
        answers.append(tuple(b"Yes."))
    numbers = [one.request(arrival, answers).number for arrival in range(one.num_requests)]
    assert sorted(numbers) == list(range(one.num_requests))


def test_another_seed_asks_in_another_order() -> None:
    sizes = replace(TINY, rag_questions=40, rag_documents=5)
    one, other = (scenario_of("rag", seed, sizes) for seed in (0, 1))
    first, second = ([scenario.request(i, []) for i in range(40)] for scenario in (one, other))
    assert [request.prompt for request in first] != [request.prompt for request in second]
    # Zipf: the first document is asked about most; no question comes twice.
    counts = [sum(request.owner == f"document {rank}" for request in first) for rank in range(5)]
    assert counts[0] == max(counts) and sum(counts) == 40 and min(counts) > 0
    assert len({request.prompt for request in first}) == 40
    for request in first:
        assert request.prompt[: request.prefix_len] == next(one.prompt for one in first if one.owner == request.owner)[: request.prefix_len]


def test_a_chat_goes_on_from_the_answers() -> None:
    scenario = scenario_of("chat")
    answers = [tuple(f"answer {i}".encode()) for i in range(4)]
    requests = sorted((scenario.request(i, answers[:i]) for i in range(4)), key=lambda request: request.number)
    for first, second in (requests[:2], requests[2:]):
        assert second.prompt[: len(first.prompt)] == first.prompt
        assert b"answer" in bytes(token for token in second.prompt[len(first.prompt) :] if token < 256)


def test_sizes_are_those_that_the_claims_are_about() -> None:
    assert (FULL.rag_documents, FULL.rag_document_tokens, FULL.rag_questions) == (5, 2000, 100)
    assert (FULL.chat_turns, FULL.few_shot_queries, FULL.best_of_samples, FULL.long_counted, FULL.long_timed) == (8, 16, 8, 1000, 256)
    assert QUICK.rag_questions < FULL.rag_questions


def row(scenario: str, method: str, request: int, computed: int, first: float, total: float, *, equal: bool | None = True) -> Row:
    return Row(scenario, method, 0, request, request, 1000, computed, 1000 - computed, first, total, 16, equal)


def made_up_rows() -> list[Row]:
    rows = []
    for i in range(4):
        rows.append(row("rag", PLAIN, i, 1000, 4.0, 5.0))
        rows.append(row("rag", OURS, i, 50 if i else 1000, 0.2 if i else 4.0, 1.2 if i else 5.0))
        rows.append(row("code", PLAIN, i, 1000, 4.0, 5.0))
        rows.append(row("code", OURS, i, 500, 2.0, 3.0, equal=i != 2))
        rows.append(row("few-shot", PLAIN, i, 1000, 4.0, 5.0))
        rows.append(row("few-shot", OURS, i, 100, 0.8, 1.8))
        rows.append(row("best-of-n", PLAIN, i, 1000, 4.0, 5.0))
        rows.append(row("best-of-n", BATCH, i, 300, 1.0, 2.0, equal=None))
    return rows


def test_the_report_says_what_is_reached_and_why_not() -> None:
    report = render(made_up_rows())
    # Cold requests count in the first ratio, 16 / 4.6, and not in the one in brackets, 4 / 0.2; the claim is about the first.
    assert "| radixkv | 1,150 | 71% | 0.20 [0.20–0.20] | 1.20 [1.20–1.20] | 3.48 (20.00) | 2.33 (4.17) | 4 of 4 |" in report
    for claim, ratio, share in (("5–10", 3.5, 71), ("3–6", 2.0, 50)):
        reason = f"because only {share}% of the prompt tokens were shared, which allows {ratio} x at most."
        assert f"Claim: prefill {claim} x as fast. Falls short: {ratio} x, {reason}" in report
    assert "3 of 4" in report
    assert "Claim: prefill 4–8 x as fast. Reached: 5.0 x." in report
    assert "Prefill is 80% of the unpatched whole time; 90% of 4,000 prompt tokens were reused, which allows 10.0 x" in report
    assert "| few-shot | 4 | 4,000 | 90% | 5.0 | 5.0 | 2.8 | 4–8: reached | 4 of 4 |" in report
    assert "| generate_batch | 1,200 | 70% | 1.00 [1.00–1.00] | 2.00 [2.00–2.00] | 4.00 | 2.50 | – |" in report
    assert "its samples are not compared" in report
    assert "| copied prefix | – |" in report and "copied prefix: not measured" in report


def test_a_scenario_that_shares_enough_and_is_slow_is_told_so() -> None:
    rows = [one for one in made_up_rows() if one.scenario == "few-shot"]
    rows = [replace(one, first_token_seconds=2.0) if one.method == OURS else one for one in rows]
    reason = "a token costs more in a short prefill: 10% of the prompt tokens were computed, in 50% of the time."
    assert f"Falls short: 2.0 x, because {reason}" in render(rows)


def test_a_report_of_nothing_says_so() -> None:
    assert render([]).startswith("Nothing was measured")
    assert not summarise([one for one in made_up_rows() if one.method == OURS])


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = made_up_rows()
    for one in rows:
        append_row(path, one)
    assert read_rows(path) == rows
    header = "scenario,method,round,request,arrival,prompt_tokens,computed_tokens,reused_tokens,first_token_seconds,total_seconds"
    assert path.read_text().startswith(f"{header},new_tokens,equal\nrag,generate,0,0,0,1000,1000,0,4.000000,5.000000,16,yes\n")
    # A run that was killed in the middle of a row harms only that one; what is measured again takes the place of what was before.
    with path.open("a") as file:
        file.write("rag,radixkv,0,1,1,10")
    again = replace(rows[0], first_token_seconds=3.0)
    append_row(path, again)
    assert read_rows(path) == [again, *rows[1:]]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="must have the columns scenario,method"):
        read_rows(path)


def test_a_run_writes_rows_and_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(scenarios, "load_embedded", lambda dtype, device: (small_model(), LetterTokenizer()))
    monkeypatch.setattr(scenarios, "QUICK", TINY)
    path = tmp_path / "new" / "rows.csv"
    for name in ("few-shot", "code"):
        assert scenarios.main(["--only", name, "--csv", str(path), "--no-generate-batch", "--no-progress", "--seed", "3"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("The claims are about the sizes of --full") == 2
    # The second report holds the first run's rows too.
    assert printed.out.count("## Few-shot") == 2 and printed.out.count("## Code") == 1
    assert {one.scenario for one in read_rows(path)} == {"few-shot", "code"}
    facts = json.loads((tmp_path / "new" / "rows.provenance.json").read_text())
    assert (facts["seed"], facts["size"], facts["scenarios"], facts["sizes"]["rag_questions"]) == (3, "quick", ["code"], 4)
    assert [run["scenarios"] for run in facts["earlier_runs"]] == [["few-shot"]]
    where = {"machine", "cores", "threads", "system", "commit", "started", "finished", "load_start", "load_end"}
    assert where | {"python", "torch", "transformers", "radixkv"} <= set(facts)
    assert scenarios.main(["--only", "code", "--csv", str(path), "--seed", "4"]) == 2
    assert "holds rows of quick size, seed 3, and these would be of quick size, seed 4" in capsys.readouterr().err
    (tmp_path / "new" / "rows.provenance.json").write_text(json.dumps(facts)[:100])
    assert scenarios.main(["--only", "code", "--csv", str(path)]) == 2
    assert "rows.provenance.json: Unterminated string" in capsys.readouterr().err  # was a traceback
    (tmp_path / "new" / "rows.provenance.json").write_text('{"size": "quick"}')
    assert scenarios.main(["--only", "code", "--csv", str(path)]) == 2
    assert "does not say what the rows beside it are of" in capsys.readouterr().err
    path.write_text("a,b\n")
    assert scenarios.main(["--only", "code", "--csv", str(path)]) == 2
    assert "--csv: cannot write" in capsys.readouterr().err


def test_options() -> None:
    parser = argparse.ArgumentParser()
    scenarios.add_options(parser)
    options = parser.parse_args([])
    assert not options.full and options.only == list(BUILDERS) and options.threads is None and options.progress
    assert parser.parse_args(["--full", "--only", "rag", "chat", "--no-progress"]).only == ["rag", "chat"]
    for wrong in (["--threads", "0"], ["--only", "nothing"], ["--full", "--quick"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
