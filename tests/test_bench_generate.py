"""bench/generate.py: a dry run, and that its cases are what they say."""

from __future__ import annotations

import pytest

from radixkv.bench.generate import main
from radixkv.bench.generate_cases import RandomDocuments, build_cases


def test_a_dry_run_measures_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick"])
    printed = capsys.readouterr().out
    for way in ("generate(), one by one", "one padded batch", "copied prefix cache", "radixkv: generate(), one by one", "generate_many()"):
        assert way in printed
    lines = [line for line in printed.splitlines() if line.startswith(("| a:", "| b:", "| c:", "| d:"))]
    assert len(lines) == 26
    assert all(line.split("|")[-2].strip() in ("2 of 2", "4 of 4", "6 of 6") for line in lines)
    assert "% in cache order" in printed and "bookkeeping of a decode step of 32 rows of 64 tokens" in printed


def test_cases() -> None:
    source = RandomDocuments(1000, document_len=30, question_len=5)
    cases = build_cases(source, 1, num_questions=3, num_zipf=20)
    assert [len(case.prompts) for case in cases] == [3, 3, 6, 6, 20]
    assert [case.one_call for case in cases] == [False, True, False, True, True]
    for case in cases:
        assert len(set(case.prompts)) == len(case.prompts)
        for prompt, owner in zip(case.prompts, case.owners, strict=True):
            assert prompt[:30] == case.documents[owner]
    assert cases[-1].num_shared == 30 * (20 - len(set(cases[-1].owners)))
    assert not set(build_cases(source, 2, num_questions=3, num_zipf=20)[-1].documents) & set(cases[-1].documents)


def test_some_cases_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--cases", "d"])
    cases = {line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and ": " in line}
    assert cases == {"| d"}
