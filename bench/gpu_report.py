"""What a GPU check writes down: rows as JSON lines while it runs, and in the end percentages, ratios, goals and a table.

Imports neither torch nor radixkv, so that a report can be put together where the run itself went wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
OURS = "radixkv"


class Report:
    """Takes the rows of one stage and writes each down at once, so that what is killed keeps what it had.

    Args:
        path: a file of JSON lines, appended to.
        stage: the stage's name, part of each row.
    """

    def __init__(self, path: Path, stage: str):
        self._path = path
        self._stage = stage

    def check(self, case: str, ok: bool, detail: str) -> bool:
        """A correctness check of ours; one that is not ok makes the run fail. Returns ok."""
        self._write({"kind": "check", "case": case, "ok": bool(ok), "detail": detail})
        return ok

    def time(self, case: str, what: str, timing: dict[str, Any], **figures: Any) -> None:
        """A time: the fields of a Timing, with num_bytes or num_flop and whatever else belongs to it."""
        self._write({"kind": "time", "case": case, "what": what, **timing, **figures})

    def rate(self, name: str, value: float) -> None:
        """A rate of the device, or another single figure."""
        self._write({"kind": "rate", "case": name, "value": value})

    def about(self, facts: Row) -> None:
        """Facts about the device."""
        self._write({"kind": "about", **facts})

    def missing(self, case: str, what: str, reason: str) -> None:
        """Something that was not measured, and why: not installed, not applicable, wrong, out of time."""
        self._write({"kind": "missing", "case": case, "what": what, "reason": reason})

    def broken(self, detail: str) -> None:
        """The stage ended by an error, which makes the run fail."""
        self._write({"kind": "broken", "case": "", "detail": detail})

    def _write(self, row: Row) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            # A line of its own even behind one that was cut off.
            file.write("\n" + json.dumps({"stage": self._stage, **row}) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Rows that were written to a file of JSON lines; none where there is no file. A line that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def complete(rows: Sequence[Row]) -> list[Row]:
    """Add to each time what its bytes and operations come to, and to each of ours the ratio to the best peer of its case."""
    rates = {row["case"]: row["value"] for row in rows if row["kind"] == "rate"}
    done = []
    for row in rows:
        row = dict(row)
        if row["kind"] == "time":
            if "num_bytes" in row:
                row["gbps"] = row["num_bytes"] / row["us"] / 1e3
                row["percent_of_copy"] = _percent(row["gbps"], rates.get("copy GB/s"))
            if "num_flop" in row:
                row["tflops"] = row["num_flop"] / row["us"] / 1e6
                row["percent_of_matrix"] = _percent(row["tflops"], rates.get("matrix TFLOP/s"))
            row["best_peer"], row["times_best_peer"] = _best_peer(row, rows)
        done.append(row)
    return done


def goals(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The goals, each with what was measured; `rows` as complete() returns them."""

    def ours(stage: str, case: str) -> Row | None:
        return _find(rows, stage, case, OURS)

    decode, prefill = ours("decode", "64 x 8k, block 64"), ours("prefill", "16k causal")
    tree, same_flat = ours("tree", "64 x (8k shared + 256)"), ours("tree", "64 x (8k + 256) private")
    extension, sglang = ours("extension", "20 on 8k"), _find(rows, "extension", "20 on 8k", "sglang triton")
    return [
        ("decode >= 90 % of copy rate at 64 x 8k", _figure(decode, "percent_of_copy", 90, "%")),
        ("tree decode >= 8 x flat at 64 x (8k + 256)", _ratio(same_flat, tree, 8)),
        ("prefill >= 60 % of matrix rate, causal 16k d128", _figure(prefill, "percent_of_matrix", 60, "%")),
        ("short extension >= 3 x SGLang's", _ratio(sglang, extension, 3)),
    ]


def table(rows: Sequence[Row]) -> str:
    """A text table of completed rows, the failed checks first, the goals last."""
    failed = [f"FAILED {row['stage']}: {row['case']}: {row['detail']}" for row in rows if row["kind"] == "check" and not row["ok"]]
    num_checks = sum(row["kind"] == "check" for row in rows)
    lines = [f"{num_checks - len(failed)} of {num_checks} checks passed", *failed]
    lines += [f"BROKEN {row['stage']}: {row['detail']}" for row in rows if row["kind"] == "broken"]
    lines += [f"{row['case']}: {row['value']:.1f}" for row in rows if row["kind"] == "rate"]
    header = ("stage", "case", "what", "us", "20 %", "80 %", "GB/s", "% copy", "TFLOP/s", "% matrix", "x best peer", "")
    cells = [header, *(_cells(row) for row in rows if row["kind"] == "time")]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        texts = (cell.ljust(width) if i < 3 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
        lines.append("  ".join(texts).rstrip())
    lines += _missing_lines(rows)
    lines += [f"goal: {goal}: {measured}" for goal, measured in goals(rows)]
    return "\n".join(lines)


def all_ok(rows: Sequence[Row]) -> bool:
    """Whether no correctness check failed, no stage broke, and there was a check at all."""
    outcomes = [row["kind"] == "check" and row["ok"] for row in rows if row["kind"] in ("check", "broken")]
    return bool(outcomes) and all(outcomes)


def _missing_lines(rows: Sequence[Row]) -> list[str]:
    """One line for each thing that was not measured and its reason, with the cases that it is missing from."""
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["kind"] == "missing":
            cases.setdefault((row["what"], row["reason"]), []).append(f"{row['stage']} {row['case']}")
    return [
        f"not measured: {what}: {reason}: {', '.join(names) if len(names) < 4 else f'{len(names)} cases'}"
        for (what, reason), names in cases.items()
    ]


def _best_peer(row: Row, rows: Sequence[Row]) -> tuple[str | None, float | None]:
    """The fastest that is not ours for the same case, and its time over ours."""
    same = [other for other in rows if other["kind"] == "time" and (other["stage"], other["case"]) == (row["stage"], row["case"])]
    peers = [other for other in same if not other["what"].startswith(OURS)]
    if not peers or not row["what"].startswith(OURS):
        return None, None
    best = min(peers, key=lambda other: other["us"])
    return best["what"], best["us"] / row["us"]


def _find(rows: Sequence[Row], stage: str, case: str, what: str) -> Row | None:
    found = [row for row in rows if row["kind"] == "time" and (row["stage"], row["case"], row["what"]) == (stage, case, what)]
    return found[0] if found else None


def _percent(value: float, whole: float | None) -> float | None:
    return None if not whole else 100 * value / whole


def _figure(row: Row | None, name: str, goal: float, unit: str) -> str:
    if row is None or row.get(name) is None:
        return "not measured"
    return f"{row[name]:.1f} {unit}, {'met' if row[name] >= goal else 'missed'}"


def _ratio(slow: Row | None, fast: Row | None, goal: float) -> str:
    if slow is None or fast is None:
        return "not measured"
    ratio = slow["us"] / fast["us"]
    return f"{ratio:.2f} x, {'met' if ratio >= goal else 'missed'}"


def _cells(row: Row) -> tuple[str, ...]:
    def number(name: str, digits: int = 1) -> str:
        return "" if row.get(name) is None else f"{row[name]:.{digits}f}"

    peer = "" if row.get("best_peer") is None else f"({row['best_peer']})"
    notes = " ".join(filter(None, [peer, "" if row.get("graph", True) else "no graph", row.get("note", "")]))
    return (
        row["stage"],
        row["case"],
        row["what"],
        number("us"),
        number("low_us"),
        number("high_us"),
        number("gbps", 0),
        number("percent_of_copy"),
        number("tflops"),
        number("percent_of_matrix"),
        number("times_best_peer", 2),
        notes,
    )
