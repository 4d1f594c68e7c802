"""The report of bench/scenarios.py, as Markdown, drawn from its rows alone."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.bench.scenario_results import (
    BATCH,
    CLAIMS,
    COPIED,
    LEFT_OUT,
    LONG,
    LONG_METHODS,
    METHODS,
    NO_CACHE,
    NOT_COMPARED,
    NOTES,
    OURS,
    PLAIN,
    TITLES,
    Row,
    Summary,
    summarise,
)

OVERVIEW = ("scenario", "requests", "prompt tokens", "hit rate", "prefill, x", "warm median", "whole, x", "claim, prefill", "answers equal")
HEADER = ("method", "{computed}", "hit rate by tokens", "first token, s", "whole time, s", "prefill, x", "whole, x", "answers equal")


def render(rows: Sequence[Row]) -> str:
    """A table for each scenario and one of all.

    Ratios are the unpatched model's seconds divided by a method's, summed over all requests, those included that nothing was cached for;
    behind them, in brackets, the median over the warm ones.
    """
    summaries = summarise(rows)
    if not summaries:
        return "Nothing was measured: no request was answered by plain generate() and another way."
    parts = [_overview(summaries), _legend(summaries)]
    for scenario in TITLES:
        chosen = [summary for summary in summaries if summary.scenario == scenario]
        if chosen:
            parts.append(f"## {TITLES[scenario]}\n\n{_scenario(scenario, chosen)}")
    return "\n\n".join(parts)


def verdict(summary: Summary) -> str:
    """Whether radixkv reaches what is claimed of a scenario, and, where it does not, why.

    Args:
        summary: of radixkv, of a scenario with a claim, and of at least the requests that plain generate() has answered.
    """
    low, high = CLAIMS[summary.scenario]
    ratio = summary.prefill_ratio
    if ratio >= low:
        return f"Claim: prefill {low}–{high} x as fast. {'Passed' if ratio > high else 'Reached'}: {ratio:.1f} x."
    text = f"Claim: prefill {low}–{high} x as fast. Falls short: {ratio:.1f} x, because "
    bound = summary.prompt_tokens / summary.computed_tokens
    if bound < low:
        return text + f"only {summary.hit_rate:.0%} of the prompt tokens were shared, which allows {bound:.1f} x at most."
    share = summary.computed_tokens / summary.prompt_tokens
    return text + f"a token costs more in a short prefill: {share:.0%} of the prompt tokens were computed, in {1 / ratio:.0%} of the time."


def _overview(summaries: Sequence[Summary]) -> str:
    lines = []
    for summary in summaries:
        if summary.method != OURS or summary.scenario in LONG:
            continue
        low, high = CLAIMS.get(summary.scenario, (0, 0))
        met = "reached" if summary.prefill_ratio >= low else "falls short"
        claim = f"{low}–{high}: {'passed' if summary.prefill_ratio > high else met}" if high else "none"
        lines.append(
            (
                *(summary.scenario, f"{summary.num_requests}", f"{summary.prompt_tokens:,}", f"{summary.hit_rate:.0%}"),
                *(f"{summary.prefill_ratio:.1f}", _number(summary.warm_prefill_ratio), f"{summary.whole_ratio:.1f}"),
                *(claim, _equal(summary)),
            )
        )
    table = f"{_table(OVERVIEW, lines)}\n\n" if lines else ""
    return f"# Scenarios\n\nradixkv beside plain `generate()`:\n\n{table}{_long(summaries)}".rstrip()


def _legend(summaries: Sequence[Summary]) -> str:
    notes = [NOTES[method] for method in (COPIED, BATCH) if any(summary.method == method for summary in summaries)]
    return "\n\n".join(
        [
            "Ratios are the unpatched seconds divided by a method's. The first is of the sums over all requests, the cold ones included; "
            "the one in brackets is the median over the warm requests, those of which radixkv found at least half of the prompt. Times are "
            "medians [20–80 %]. Tokens are those that entered the first layer, counted by a hook.",
            *notes,
        ]
    )


def _scenario(scenario: str, summaries: Sequence[Summary]) -> str:
    is_long = scenario in LONG
    by_method = {summary.method: summary for summary in summaries}
    header = tuple(cell.format(computed="tokens computed" if is_long else "prompt tokens computed") for cell in HEADER)
    lines, notes = [], []
    for method in LONG_METHODS if is_long else METHODS:
        summary = by_method.get(method)
        if summary is None:
            lines.append((method, *["–"] * (len(header) - 1)))
            notes.append(f"{method}: {LEFT_OUT}")
            continue
        if method == BATCH and not summary.num_compared:
            notes.append(NOT_COMPARED)
        lines.append(
            (
                *(method, f"{summary.computed_tokens:,}", f"{summary.hit_rate:.0%}", str(summary.first_token), str(summary.total)),
                _ratio(summary.prefill_ratio, summary.warm_prefill_ratio),
                *(_ratio(summary.whole_ratio, summary.warm_whole_ratio), _equal(summary)),
            )
        )
    plain, ours = by_method.get(PLAIN), by_method.get(OURS)
    if plain and ours and not is_long:
        bound = ours.prompt_tokens / ours.computed_tokens
        notes.append(
            f"Prefill is {plain.prefill_share:.0%} of the unpatched whole time; {ours.hit_rate:.0%} of {ours.prompt_tokens:,} prompt "
            f"tokens were reused, which allows {bound:.1f} x at most if every token costs the same."
        )
        if scenario in CLAIMS:
            notes.append(verdict(ours))
    return "\n\n".join([_table(header, lines), *notes])


def _long(summaries: Sequence[Summary]) -> str:
    sentences = []
    for scenario in LONG:
        by_method = {summary.method: summary for summary in summaries if summary.scenario == scenario}
        if NO_CACHE in by_method and OURS in by_method:
            without, ours = by_method[NO_CACHE], by_method[OURS]
            sentences.append(
                f"{TITLES[scenario]}: {without.computed_tokens:,} token computations without a K/V cache, {ours.computed_tokens:,} with "
                f"radixkv; {without.total.middle:.2f} s and {ours.total.middle:.2f} s."
            )
    return "\n\n".join(sentences)


def _equal(summary: Summary) -> str:
    return f"{summary.num_equal} of {summary.num_compared}" if summary.num_compared else "–"


def _ratio(ratio: float, warm: float | None) -> str:
    return f"{ratio:.2f}" if warm is None else f"{ratio:.2f} ({warm:.2f})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|---|" + "---:|" * (len(header) - 1)
    return "\n".join(["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)])
