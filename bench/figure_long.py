"""The figure of the long outputs: what one long answer costs without a K/V cache, with transformers' own, and with radixkv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from radixkv.bench.figure_numbers import summary_of
from radixkv.bench.figure_style import LEFT, Theme, begin_figure, head, name_bars, style_axes, write_beside
from radixkv.bench.scenario_results import LONG, LONG_METHODS, NO_CACHE, OURS, TITLES, Row, Summary, summarise

INCHES_PER_LINE, INCHES_OF_BARS = 1.75, 1.0
ABOVE, BELOW = 0.55, 0.5
MIDDLE = 0.55


def long_title(rows: Sequence[Row]) -> str:
    """What the long outputs show of radixkv, in one line."""
    summaries = summarise(rows)
    for scenario in reversed(LONG):
        without, ours = (summary_of(summaries, scenario, method) for method in (NO_CACHE, OURS))
        if without is not None and ours is not None:
            return f"Long output: {ours.computed_tokens:,} token computations in place of {without.computed_tokens:,} without a K/V cache"
    return "Long output"


def draw_long(rows: Sequence[Row], theme: Theme, provenance: str) -> Figure:
    """Tokens computed and seconds, one bar for each method, one line of panels for each of the long outputs.

    Args:
        rows: Of all methods and scenarios, among them plain generate() with a long output.
        theme: Of the page.
        provenance: Two lines on where the numbers come from.
    """
    summaries = summarise(rows)
    scenarios = [scenario for scenario in LONG if any(summary.scenario == scenario for summary in summaries)]
    height = ABOVE + INCHES_PER_LINE * len(scenarios) + BELOW
    figure = begin_figure(theme, height, long_title(rows), "", provenance)
    for line, scenario in enumerate(scenarios):
        chosen = {method: summary for method in LONG_METHODS if (summary := summary_of(summaries, scenario, method)) is not None}
        bottom = height - ABOVE - INCHES_PER_LINE * (line + 1) + 0.1
        places = [(left, bottom / height, 0.32, INCHES_OF_BARS / height) for left in (0.158, 0.66)]
        num_new = max(row.new_tokens for row in rows if row.scenario == scenario)
        draw_counts(figure.add_axes(places[0]), theme, chosen, f"{num_new:,} new tokens{TITLES[scenario].removeprefix('Long output')}")
        draw_seconds(figure.add_axes(places[1]), theme, chosen)
    return figure


def draw_counts(axes: Axes, theme: Theme, chosen: Mapping[str, Summary], explanation: str) -> None:
    """Tokens that entered the first layer."""
    draw_bars(axes, theme, {method: summary.computed_tokens for method, summary in chosen.items()}, "{:,.0f}")
    ours = chosen.get(OURS)
    head(axes, theme, LEFT, "Tokens computed" if ours is None else f"radixkv computes {ours.computed_tokens:,} tokens", explanation)


def draw_seconds(axes: Axes, theme: Theme, chosen: Mapping[str, Summary]) -> None:
    """Seconds until the last token; medians if there are several answers."""
    draw_bars(axes, theme, {method: summary.total.middle for method, summary in chosen.items()}, "{:.2f} s")
    ours = chosen.get(OURS)
    finding = "Time of the whole answer" if ours is None else f"{ours.whole_ratio:.2f} × as fast as plain generate()"
    head(axes, theme, MIDDLE, finding, "time from the call to the last token")


def draw_bars(axes: Axes, theme: Theme, values: Mapping[str, float], form: str) -> None:
    """One bar for each method, from zero, its value at its end."""
    style_axes(axes, theme, grid="x")
    axes.grid(visible=False)
    axes.spines["left"].set_visible(True)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    for place, (method, value) in enumerate(values.items()):
        axes.barh(place, value, height=0.66, color=theme.methods[method])
        write_beside(axes, (value, place), form.format(value), theme.ink, "left")
    axes.set_xlim(0, 1.25 * max(values.values()))
    name_bars(axes, theme, list(values))
