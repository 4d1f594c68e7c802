"""One figure for all scenarios: how many times as fast as plain generate() the first tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from radixkv.bench.figure_numbers import summary_of, warm_ratio
from radixkv.bench.figure_style import LEFT, MARKERS, METHOD_NAMES, Theme, begin_figure, style_axes, times
from radixkv.bench.scenario_results import BATCH, CLAIMS, COPIED, LONG, OURS, TITLES, Row, Summary, summarise

TICKS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100, 200)
INCHES_PER_ROW = 0.44
ABOVE, BELOW = 1.22, 0.98
CLAIM_SHARE = 0.2


def overview_title(rows: Sequence[Row]) -> str:
    """What the scenarios of shared prompts show of radixkv, in one line."""
    ratios = [summary.prefill_ratio for summary in summarise(rows) if summary.method == OURS and summary.scenario not in LONG]
    if not ratios:
        return "Time to first token beside plain generate()"
    low, high = times(min(ratios)), times(max(ratios))
    return f"First tokens come {low if low == high else f'{low} to {high}'} as fast with radixkv, cold requests included"


def draw_overview(rows: Sequence[Row], theme: Theme, provenance: str) -> Figure:
    """Ratios of all methods in all scenarios, the claimed ranges behind them.

    Args:
        rows: Of all methods and scenarios.
        theme: Of the page.
        provenance: Two lines on where the numbers come from.
    """
    summaries = summarise(rows)
    # What the long output counts on its small model is no speed.
    scenarios = [name for name in TITLES if name != LONG[1] and any(summary.scenario == name for summary in summaries)]
    inside = INCHES_PER_ROW * max(1, len(scenarios))
    height = ABOVE + inside + BELOW
    figure = begin_figure(theme, height, overview_title(rows), "", provenance)
    axes = figure.add_axes((0.115, BELOW / height, 0.86, inside / height))
    style_axes(axes, theme, grid="x")
    shown = [1.0]
    for place, scenario in enumerate(scenarios):
        shown += draw_claimed(axes, theme, scenario, place)
        for method in (BATCH, COPIED, OURS):
            summary = summary_of(summaries, scenario, method)
            if summary is not None:
                draw = draw_other if method != OURS else partial(draw_ours, warm=warm_ratio(rows, summary))
                shown += draw(axes, theme, summary, place)
    axes.set_xscale("log")
    axes.set_xlim(min(shown) / 1.2, max(shown) * 1.25)
    axes.axvline(1, color=theme.faint, linewidth=1.2, zorder=2)
    measure = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    axes.annotate(METHOD_NAMES["generate"], (1, 1), (0, 4), ha="center", color=theme.faint, fontsize=8.5, **measure)
    axes.set_ylim(max(1, len(scenarios)) - 0.5, -0.5)
    axes.set_yticks(range(len(scenarios)), [TITLES[name].partition(":")[0].partition(",")[0] for name in scenarios])
    axes.tick_params(axis="y", labelcolor=theme.ink, labelsize=9.5)
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g} ×"))
    axes.set_xlabel("speed, plain generate() = 1 (log scale); of the other methods to the first token", fontsize=8.5, color=theme.faint)
    draw_key(figure, theme, {row.method for row in rows})
    return figure


def draw_claimed(axes: Axes, theme: Theme, scenario: str, place: int) -> list[float]:
    """The claimed range of a scenario as a pale bar. All three return the ratios that they have shown."""
    if scenario not in CLAIMS:
        return []
    low, high = CLAIMS[scenario]
    axes.barh(place, high - low, left=low, height=0.7, color=theme.tint(theme.methods[OURS], CLAIM_SHARE), zorder=1)
    return [low, high]


def draw_other(axes: Axes, theme: Theme, summary: Summary, place: int) -> list[float]:
    """Another method's ratio as a mark, a little lower, so that ours does not hide it."""
    axes.plot(summary.prefill_ratio, place + 0.2, MARKERS[summary.method], color=theme.methods[summary.method], markersize=6, zorder=3)
    return [summary.prefill_ratio]


def draw_ours(axes: Axes, theme: Theme, summary: Summary, place: int, *, warm: float | None) -> list[float]:
    """radixkv's ratio of all requests as a point, of warm ones as the end of a line, both labelled; of whole answers as a ring."""
    ratio, color = summary.prefill_ratio, theme.methods[OURS]
    ring = {"markerfacecolor": theme.background, "markeredgewidth": 1.3}
    axes.plot(summary.whole_ratio, place, "o", color=color, markersize=5.5, zorder=4, **ring)
    axes.plot(ratio, place, "o", color=color, markersize=8.5, zorder=5)
    label = {"textcoords": "offset points", "color": color, "zorder": 6}
    axes.annotate(times(ratio), (ratio, place), (0, 7), ha="center", fontweight="bold", fontsize=9.5, **label)
    if warm is None:
        return [ratio, summary.whole_ratio]
    axes.plot([ratio, warm], [place, place], color=color, linewidth=1.3, zorder=4)
    axes.plot(warm, place, "|", color=color, markersize=10, markeredgewidth=1.8, zorder=4)
    side, shift = ("left", 6) if warm >= ratio else ("right", -6)
    axes.annotate(times(warm), (warm, place), (shift, 0), ha=side, va="center", fontsize=8.5, **label)
    return [ratio, warm, summary.whole_ratio]


def draw_key(figure: Figure, theme: Theme, methods: set[str]) -> None:
    """What the marks are, in one line below the title."""
    ours = theme.methods[OURS]
    point = {"linestyle": "none", "color": ours}
    handles: list[Line2D | Patch] = []
    if OURS in methods:
        ring = {"markerfacecolor": theme.background, "markeredgewidth": 1.3}
        handles += [
            Line2D([], [], marker="o", markersize=8, label="radixkv, to the first token", **point),
            Line2D([], [], marker="|", markersize=10, markeredgewidth=1.8, linewidth=1.3, color=ours, label="of warm requests"),
            Line2D([], [], marker="o", markersize=5.5, label="to the last token", **point, **ring),
        ]
    for method in (COPIED, BATCH):
        if method in methods:
            style = {**point, "color": theme.methods[method], "marker": MARKERS[method], "markersize": 6}
            handles.append(Line2D([], [], label=METHOD_NAMES[method], **style))
    handles.append(Patch(color=theme.tint(ours, CLAIM_SHARE), label="claimed range"))
    sizes = {"borderpad": 0, "borderaxespad": 0, "handletextpad": 0.6, "columnspacing": 1.5, "handlelength": 1.4}
    place = {"loc": "upper left", "bbox_to_anchor": (LEFT, 1 - 0.57 / figure.get_figheight()), "ncols": len(handles)}
    figure.legend(handles=handles, frameon=False, fontsize=8.5, labelcolor=theme.ink, **place, **sizes)
