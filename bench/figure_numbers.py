"""The numbers that the figures show of single requests; the ratios are those of the report, `scenario_results.summarise`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from radixkv.bench.scenario_results import OURS, Row, Summary


@dataclass(frozen=True)
class Tokens:
    """Tokens of several prompts together: in the prompts, computed (padding included), and reused."""

    prompt: int
    computed: int
    reused: int

    @property
    def share(self) -> float:
        """The share of the prompts that was reused, from 0 to 1."""
        return self.reused / self.prompt if self.prompt else 0.0


def rows_of(rows: Iterable[Row], scenario: str, method: str) -> list[Row]:
    """The rows of one method in one scenario, round after round in the order of arrival."""
    return sorted((row for row in rows if (row.scenario, row.method) == (scenario, method)), key=lambda row: (row.round, row.arrival))


def summary_of(summaries: Iterable[Summary], scenario: str, method: str) -> Summary | None:
    """The summary of one method in one scenario, or None if it or plain generate() was not measured there."""
    return next((summary for summary in summaries if (summary.scenario, summary.method) == (scenario, method)), None)


def warm_ratio(rows: Iterable[Row], summary: Summary) -> float | None:
    """The summary's ratio of warm requests to the first token, or None where radixkv did not have both cold and warm ones."""
    kinds = {row.is_warm for row in rows_of(rows, summary.scenario, OURS)}
    return summary.warm_prefill_ratio if len(kinds) == 2 else None


def median_wait(rows: Iterable[Row], *, warm: bool) -> float | None:
    """Median seconds to the first token of the warm rows, or of the cold ones; None without any."""
    seconds = [row.first_token_seconds for row in rows if row.is_warm is warm]
    return statistics.median(seconds) if seconds else None


def total_tokens(rows: Sequence[Row]) -> Tokens:
    """What was computed and reused of all prompts together."""
    return Tokens(
        sum(row.prompt_tokens for row in rows),
        sum(row.computed_tokens for row in rows),
        sum(row.reused_tokens for row in rows),
    )


def hit_rates(rows: Sequence[Row]) -> dict[int, float]:
    """The share of all prompt tokens so far that was reused, from 0 to 1, by arrival; all rounds count together.

    Args:
        rows: Of one method in one scenario.
    """
    rates: dict[int, float] = {}
    prompt = reused = 0
    for row in sorted(rows, key=lambda row: row.arrival):
        prompt += row.prompt_tokens
        reused += row.reused_tokens
        rates[row.arrival] = reused / prompt
    return rates
