"""One figure for each scenario: time to first token, tokens computed against reused, hit rate over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from radixkv.bench.figure_numbers import hit_rates, median_wait, rows_of, summary_of, total_tokens, warm_ratio
from radixkv.bench.figure_style import (
    GAP,
    LEFT,
    MARKERS,
    METHOD_NAMES,
    Theme,
    begin_figure,
    head,
    label_ends,
    name_bars,
    percent,
    style_axes,
    times,
    write_beside,
)
from radixkv.bench.scenario_results import METHODS, OURS, TITLES, Row, summarise

HEIGHT = 6.8
MIDDLE = 0.55

ByMethod = Mapping[str, Sequence[Row]]


def draw_scenario(rows: Sequence[Row], scenario: str, theme: Theme, provenance: str) -> Figure:
    """The figure of one scenario.

    Args:
        rows: Of all methods and scenarios.
        scenario: Which one; none of the long outputs.
        theme: Of the page.
        provenance: Two lines on where the numbers come from.
    """
    by_method = {method: rows_of(rows, scenario, method) for method in METHODS}
    by_method = {method: chosen for method, chosen in by_method.items() if chosen}
    figure = begin_figure(theme, HEIGHT, scenario_title(rows, scenario), scenario_subtitle(rows, scenario), provenance)
    draw_waits(figure.add_axes((0.062, 0.527, 0.768, 0.245)), theme, by_method)
    draw_tokens(figure.add_axes((0.148, 0.137, 0.345, 0.215)), theme, by_method)
    draw_rates(figure.add_axes((0.60, 0.137, 0.23, 0.215)), theme, by_method)
    return figure


def scenario_title(rows: Sequence[Row], scenario: str) -> str:
    """What the scenario shows of radixkv, in one line."""
    name, summary = TITLES[scenario].partition(":")[0], summary_of(summarise(rows), scenario, OURS)
    if summary is None:
        return name
    title, warm = f"{name}: first tokens come {times(summary.prefill_ratio)} as fast as with plain generate()", warm_ratio(rows, summary)
    return title if warm is None else f"{title}, {times(warm)} when warm"


def scenario_subtitle(rows: Sequence[Row], scenario: str) -> str:
    """What is asked, and what is gained by the last token; two lines."""
    chosen = max((rows_of(rows, scenario, method) for method in METHODS), key=len)
    prompts, answers = ([getattr(row, name) for row in chosen] for name in ("prompt_tokens", "new_tokens"))
    asked = TITLES[scenario].partition(": ")[2].capitalize()
    lines = [f"{asked}; {len(chosen)} requests, prompts of {_range(prompts)} tokens, answers of {_range(answers)}"]
    if scenario == "best-of-n":
        lines[0] += ", all samples of a request together"
    summary = summary_of(summarise(rows), scenario, OURS)
    if summary is not None:
        lines.append(f"Whole answers come {times(summary.whole_ratio)} as fast")
        if summary.num_compared:
            lines[-1] += f", and {summary.num_equal:,} of {summary.num_compared:,} are equal to those of plain generate()"
    return "\n".join(lines)


def draw_waits(axes: Axes, theme: Theme, by_method: ByMethod) -> None:
    """Time to first token of each request in the order of arrival."""
    style_axes(axes, theme, grid="y")
    ends: dict[str, tuple[float, str]] = {}
    for index, (method, rows) in enumerate(by_method.items()):
        # Side by side, so that equal times hide nothing.
        draw_points(axes, theme, method, rows, 0.13 * (index - (len(by_method) - 1) / 2))
        ends[method] = (rows[-1].first_token_seconds, METHOD_NAMES[method])
    axes.set_yscale("log")
    # From one line of the grid to another, so that there are always two.
    seconds = [row.first_token_seconds for rows in by_method.values() for row in rows]
    lines = [step * 10.0**power for power in range(-6, 6) for step in (1, 2, 5)]
    low, high = max(line for line in lines if line < min(seconds)), min(line for line in lines if line > max(seconds))
    axes.set_ylim(low / 1.04, high * 1.04)
    axes.yaxis.set_major_locator(FixedLocator([line for line in lines if low <= line <= high]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g} s"))
    axes.yaxis.set_minor_locator(NullLocator())
    count_requests(axes, theme, by_method, 20, "request, in the order of arrival")
    medians = [(name, median_wait(by_method.get(OURS, ()), warm=warm)) for name, warm in (("cold", False), ("warm", True))]
    told = [f"{seconds:.2g} s {name}" for name, seconds in medians if seconds is not None]
    finding = "Time to first token" + (f" with radixkv: {', '.join(told)}" if told else "")
    marks = ("○ cold", "● warm: at least half of the prompt reused", "(log scale; the times named are medians)")
    head(axes, theme, LEFT, finding, GAP.join(marks))
    label_ends(axes, theme, ends)


def draw_points(axes: Axes, theme: Theme, method: str, rows: Sequence[Row], shift: float) -> None:
    """The times of one method, a line through those of each round, all moved a little aside."""
    color, is_ours = theme.methods[method], method == OURS
    front = 10 if is_ours else 0
    for _, group in groupby(rows, key=lambda row: row.round):
        round_rows = list(group)
        places, seconds = [row.arrival + shift for row in round_rows], [row.first_token_seconds for row in round_rows]
        axes.plot(places, seconds, color=color, linewidth=1.6 if is_ours else 1.0, alpha=0.9 if is_ours else 0.5, zorder=front + 2)
    size = (5.5 if is_ours else 4.5) if len(rows) <= 40 else 3.2
    for warm in (False, True):
        chosen = [row for row in rows if row.is_warm is warm]
        axes.plot(
            [row.arrival + shift for row in chosen],
            [row.first_token_seconds for row in chosen],
            MARKERS[method],
            color=color,
            markerfacecolor=color if warm else theme.background,
            markeredgewidth=1.1,
            markersize=size,
            zorder=front + 3,
        )


def draw_tokens(axes: Axes, theme: Theme, by_method: ByMethod) -> None:
    """Prompt tokens computed against reused, all requests together, one bar for each method."""
    style_axes(axes, theme, grid="x")
    totals = {method: total_tokens(rows) for method, rows in by_method.items()}
    longest = max(tokens.computed + tokens.reused for tokens in totals.values())
    for place, (method, tokens) in enumerate(totals.items()):
        color = theme.methods[method]
        axes.barh(place, tokens.computed, height=0.66, color=color)
        axes.barh(place, tokens.reused, left=tokens.computed, height=0.66, color=theme.tint(color, 0.28))
        # A number stands in its part of the bar; a small part has it at its end, if there is room.
        if tokens.computed > 0.16 * longest:
            write_beside(axes, (0, place), f"{tokens.computed:,}", theme.background, "left")
        elif tokens.reused > 0.6 * longest:
            write_beside(axes, (tokens.computed, place), f"{tokens.computed:,}", theme.ink, "left")
        if tokens.reused > 0.36 * longest:
            write_beside(axes, (tokens.computed + tokens.reused, place), f"{tokens.reused:,} reused", theme.ink, "right")
    axes.set_xlim(0, longest)
    name_bars(axes, theme, list(totals))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    ours = totals.get(OURS)
    finding = "Prompt tokens" if ours is None else f"radixkv computes {ours.computed:,} of {ours.prompt:,} prompt tokens"
    head(axes, theme, LEFT, finding, "all requests; full colour: computed, pale: reused")


def draw_rates(axes: Axes, theme: Theme, by_method: ByMethod) -> None:
    """The share of all prompt tokens so far that was reused."""
    style_axes(axes, theme, grid="y")
    ends: dict[str, tuple[float, str]] = {}
    for method, rows in by_method.items():
        rates = hit_rates(rows)
        last = rates[max(rates)]
        # Whole below dashed, so that equal lines show each other.
        style = (2.4, 2, "-") if method == OURS else (1.4, 3, (0, (2.5, 2.5)))
        line = dict(zip(("linewidth", "zorder", "linestyle"), style, strict=True))
        axes.plot(list(rates), list(rates.values()), color=theme.methods[method], clip_on=False, **line)
        ends[method] = (last, f"{METHOD_NAMES[method]} {percent(last)}")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: percent(share)))
    count_requests(axes, theme, by_method, 8, "requests so far")
    ours = by_method.get(OURS)
    finding = f"{percent(total_tokens(ours).share)} of all prompt tokens are reused" if ours else "Hit rate"
    head(axes, theme, MIDDLE, finding, "hit rate: reused of all prompt tokens so far")
    label_ends(axes, theme, ends)


def count_requests(axes: Axes, theme: Theme, by_method: ByMethod, num_ticks: int, label: str) -> None:
    """The axis along which requests arrive, counted from 1."""
    last = max(row.arrival for rows in by_method.values() for row in rows)
    axes.set_xlim(-0.5, last + 0.5)
    # Ticks stand where people count, at 1 and at round numbers.
    step = next(step for step in (1, 5, 10, 20, 50, 100, 200, 500, 1000, last + 1) if last / step <= num_ticks)
    axes.set_xticks([place for place in range(last + 1) if place == 0 or (place + 1) % step == 0])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place + 1:.0f}"))
    axes.set_xlabel(label, color=theme.faint, fontsize=8.5)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
