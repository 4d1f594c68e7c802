"""What bench/scenarios.py has measured: rows of a CSV file, and the sums and ratios that its report and its figures show."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

PLAIN, COPIED, BATCH, OURS = "generate", "copied prefix", "generate_batch", "radixkv"
NO_CACHE = "generate without a cache"
METHODS = (PLAIN, COPIED, BATCH, OURS)
LONG_METHODS = (NO_CACHE, PLAIN, OURS)
LONG = ("long-output", "long-output-count")

TITLES = {
    "rag": "RAG: questions on a few documents",
    "chat": "Chat: several users by turns, one system prompt",
    "few-shot": "Few-shot: worked examples and a query",
    "code": "Code: a repository's files and an edit request",
    "best-of-n": "Best of n: several samples of one prompt",
    "long-output": "Long output, timed",
    "long-output-count": "Long output, counted on a small random model of two layers",
}
CLAIMS = {"rag": (5, 10), "chat": (3, 5), "few-shot": (4, 8), "code": (3, 6)}
"""Of each scenario how many times as fast the prefill is to be, all requests together."""

NOTES = {
    COPIED: "copied prefix: transformers' recipe, a cache filled with each shared beginning once and deep-copied for each prompt; in the "
    "chat that is the system prompt.",
    BATCH: "generate_batch: one manager for all requests, pages of 16 tokens, one request to a call; its times are those that it notes at "
    "its tokens, without the up to a second in which a call then stops the manager's thread.",
}
NOT_COMPARED = "generate_batch draws from random numbers of its own, so its samples are not compared."
LEFT_OUT = "not measured in this run: it was left out, or this release of transformers does not have it."


@dataclass(frozen=True)
class Row:
    """One request, answered one way.

    Attributes:
        scenario, method: names. round: repetition of the whole scenario. request: the same request has the same number whenever it arrives.
        arrival: its place in the round, from 0. prompt_tokens: of the prompt, times the samples where several are drawn.
        computed_tokens: prompt tokens that entered the model's first layer; in the long outputs all tokens that did.
        reused_tokens: prompt tokens that did not. first_token_seconds, total_seconds: from the call to its first and its last new token.
        new_tokens: of the answer, or of all samples. equal: whether the answer is plain generate()'s; None where that cannot be asked.
    """

    scenario: str
    method: str
    round: int
    request: int
    arrival: int
    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    first_token_seconds: float
    total_seconds: float
    new_tokens: int
    equal: bool | None

    @property
    def is_warm(self) -> bool:
        """Whether at least half of the prompt was reused."""
        return 2 * self.reused_tokens >= self.prompt_tokens


COLUMNS = tuple(field.name for field in fields(Row))
INTEGERS = ("round", "request", "arrival", "prompt_tokens", "computed_tokens", "reused_tokens", "new_tokens")
EQUAL = {"yes": True, "no": False, "": None}


def provenance_path(csv_path: Path) -> Path:
    """Where the facts about the runs that wrote a CSV file lie."""
    return csv_path.with_name(f"{csv_path.stem}.provenance.json")


def append_row(path: Path, row: Row) -> None:
    """Write one row at the end of a CSV file, which is made with its header if it is not there; what was written stays if we are killed."""
    before = path.read_bytes() if path.exists() else b""
    cells = {column: getattr(row, column) for column in COLUMNS}
    cells |= {"equal": next(text for text, value in EQUAL.items() if value is row.equal)}
    cells |= {column: f"{cells[column]:.6f}" for column in ("first_token_seconds", "total_seconds")}
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not before:
            writer.writeheader()
        elif not before.endswith(b"\n"):
            # A run that was killed left half a line, which reading passes over.
            file.write("\n")
        writer.writerow(cells)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file; of a request that was measured again, the last.

    Raises:
        ValueError: the file has other columns, or a row what no run writes; the message names the line.
    """
    rows: dict[tuple[str, str, int, int], Row] = {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"read_rows: {path} must have the columns {','.join(COLUMNS)}, got {','.join(reader.fieldnames or ())}")
        for cells in reader:
            # A run that was killed may have left half a line.
            if cells["equal"] not in EQUAL or None in cells:
                continue
            try:
                numbers = {column: int(cells[column]) for column in INTEGERS}
                first, total = float(cells["first_token_seconds"]), float(cells["total_seconds"])
            except ValueError as error:
                raise ValueError(f"read_rows: {path}, line {reader.line_num}: {error}") from error
            if not (0 < first < math.inf and 0 < total < math.inf and numbers["prompt_tokens"] > 0):
                raise ValueError(f"read_rows: {path}, line {reader.line_num}: tokens and seconds must be numbers above 0")
            names = {"scenario": cells["scenario"], "method": cells["method"], "equal": EQUAL[cells["equal"]]}
            row = Row(**names, **numbers, first_token_seconds=first, total_seconds=total)  # type: ignore[arg-type]
            rows[row.scenario, row.method, row.round, row.request] = row
    return list(rows.values())


@dataclass(frozen=True)
class Spread:
    """A median, and what a fifth of the values lies below and above."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
        return cls(low, statistics.median(ordered), high)

    def __str__(self) -> str:
        return f"{self.middle:.2f} [{self.low:.2f}–{self.high:.2f}]"


@dataclass(frozen=True)
class Summary:
    """What one way did with one scenario, beside plain generate().

    Attributes:
        prompt_tokens, computed_tokens, reused_tokens: sums over all requests. first_token, total: seconds.
        prefill_ratio, whole_ratio: the unpatched sum of seconds divided by this one's, over all requests, the cold ones included.
        warm_prefill_ratio, warm_whole_ratio: the median of the ratios of single requests, of those only of which radixkv found at least
            half of the prompt; None where there was no such request.
        prefill_share: how much of this way's whole time went by before the first token.
        num_equal, num_compared: answers.
    """

    scenario: str
    method: str
    num_requests: int
    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    first_token: Spread
    total: Spread
    prefill_ratio: float
    whole_ratio: float
    warm_prefill_ratio: float | None
    warm_whole_ratio: float | None
    prefill_share: float
    num_equal: int
    num_compared: int

    @property
    def hit_rate(self) -> float:
        """Reused prompt tokens per prompt token."""
        return self.reused_tokens / self.prompt_tokens


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """For each scenario and way, in the order of TITLES: what it did with the requests that plain generate() has answered too."""
    found = []
    for scenario in TITLES:
        by_method: dict[str, dict[tuple[int, int], Row]] = {}
        for row in rows:
            if row.scenario == scenario:
                by_method.setdefault(row.method, {})[row.round, row.request] = row
        plain, ours = by_method.get(PLAIN, {}), by_method.get(OURS, {})
        warm = {key for key, row in ours.items() if row.is_warm}
        for method in LONG_METHODS if scenario in LONG else METHODS:
            pairs = {key: (plain[key], row) for key, row in by_method.get(method, {}).items() if key in plain}
            if pairs:
                found.append(_summarise(list(pairs.values()), [pair for key, pair in pairs.items() if key in warm]))
    return found


def _summarise(pairs: Sequence[tuple[Row, Row]], warm: Sequence[tuple[Row, Row]]) -> Summary:
    rows = [row for _, row in pairs]
    first, total = sum(row.first_token_seconds for row in rows), sum(row.total_seconds for row in rows)
    compared = [row.equal for row in rows if row.equal is not None]
    return Summary(
        rows[0].scenario,
        rows[0].method,
        len(rows),
        sum(row.prompt_tokens for row in rows),
        sum(row.computed_tokens for row in rows),
        sum(row.reused_tokens for row in rows),
        Spread.of(row.first_token_seconds for row in rows),
        Spread.of(row.total_seconds for row in rows),
        sum(plain.first_token_seconds for plain, _ in pairs) / first,
        sum(plain.total_seconds for plain, _ in pairs) / total,
        statistics.median(plain.first_token_seconds / row.first_token_seconds for plain, row in warm) if warm else None,
        statistics.median(plain.total_seconds / row.total_seconds for plain, row in warm) if warm else None,
        first / total,
        sum(compared),
        len(compared),
    )
