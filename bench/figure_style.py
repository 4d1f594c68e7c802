"""How the figures look: colours for a light and a dark page, marks, text and files that are the same bytes each time."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from radixkv.bench.scenario_results import BATCH, COPIED, NO_CACHE, OURS, PLAIN

DOTS_PER_INCH = 200
# Laid out with the font that matplotlib brings, which is wider than any of these: shown in a page's own font, nothing collides.
FONTS = "-apple-system, 'Segoe UI', 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "radixkv",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "xtick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.pad": 3,
    "ytick.major.pad": 4,
}


@dataclass(frozen=True)
class Theme:
    """Colours of one kind of page.

    Attributes:
        name: "light" or "dark", as in the names of the files.
        background: Of the page and of the figure.
        ink: Of titles and labels.
        faint: Of what explains, and of axes.
        grid: Of the lines behind the data.
        methods: One colour for each method; the accent is radixkv's alone.
    """

    name: str
    background: str
    ink: str
    faint: str
    grid: str
    methods: Mapping[str, str]

    def tint(self, color: str, share: float) -> str:
        """So much of a colour, the rest background."""
        pairs = zip(channels(color), channels(self.background), strict=True)
        return "#" + "".join(f"{round(share * front + (1 - share) * back):02x}" for front, back in pairs)


THEMES = (
    Theme(
        *("light", "#ffffff", "#1f2328", "#59636e", "#e4e8ec"),
        methods={OURS: "#cf4a04", PLAIN: "#59636e", NO_CACHE: "#59636e", COPIED: "#0a58ca", BATCH: "#14808a"},
    ),
    Theme(
        *("dark", "#0d1117", "#f0f6fc", "#9198a1", "#262c36"),
        methods={OURS: "#ff8b4d", PLAIN: "#a9b1ba", NO_CACHE: "#a9b1ba", COPIED: "#6cb0ff", BATCH: "#41c4c9"},
    ),
)
MARKERS = {PLAIN: "s", COPIED: "^", BATCH: "D", OURS: "o"}
METHOD_NAMES = {
    PLAIN: "plain generate()",
    NO_CACHE: "no K/V cache",
    COPIED: "copied prefix",
    BATCH: "generate_batch()",
    OURS: "radixkv",
}
WIDTH, LEFT = 9.6, 0.012
GAP = "\u2003"  # an em wide, for SVG makes one of several plain spaces


def channels(color: str) -> tuple[int, int, int]:
    """Red, green and blue of "#rrggbb", from 0 to 255."""
    red, green, blue = bytes.fromhex(color[1:])
    return red, green, blue


def begin_figure(theme: Theme, height: float, title: str, subtitle: str, provenance: str) -> Figure:
    """A figure so many inches high with what it says on top and where it comes from at the bottom, in up to two lines each."""
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH, facecolor=theme.background)
    figure.text(LEFT, 1 - 0.35 / height, title, color=theme.ink, fontsize=13.5, fontweight="bold")
    figure.text(LEFT, 1 - 0.5 / height, subtitle, color=theme.faint, fontsize=9, linespacing=1.4, va="top")
    figure.text(LEFT, 0.1 / height, provenance, color=theme.faint, fontsize=7.5, linespacing=1.4)
    return figure


def style_axes(axes: Axes, theme: Theme, *, grid: str) -> None:
    """Colours, and grid lines across one axis, "x" or "y"."""
    axes.set_facecolor("none")
    axes.tick_params(colors=theme.faint, which="both", labelsize=8.5)
    for spine in axes.spines.values():
        spine.set_color(theme.faint)
    axes.grid(axis=grid, color=theme.grid, linewidth=0.8)


def head(axes: Axes, theme: Theme, left: float, finding: str, explanation: str) -> None:
    """What a panel says, and below it what is drawn, above the axes and from so far left in the figure (0 to 1)."""
    place, measure = (left, 1), ("figure fraction", "axes fraction")
    axes.annotate(finding, place, (0, 24), measure, "offset points", color=theme.ink, fontsize=10, fontweight="bold")
    axes.annotate(explanation, place, (0, 10), measure, "offset points", color=theme.faint, fontsize=8.5)


def name_bars(axes: Axes, theme: Theme, methods: Sequence[str]) -> None:
    """Names of methods in their colours beside horizontal bars, the first on top."""
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.set_yticks(range(len(methods)), [METHOD_NAMES[method] for method in methods])
    for label, method in zip(axes.get_yticklabels(), methods, strict=True):
        label.set(color=theme.methods[method], fontweight="bold" if method == OURS else "normal")


def write_beside(axes: Axes, place: tuple[float, float], text: str, color: str, side: str) -> None:
    """A number a little right of a place, with its "left" side towards it, or left of it with its "right" side."""
    shift = (5 if side == "left" else -5, 0)
    axes.annotate(text, place, shift, textcoords="offset points", ha=side, va="center", color=color, fontsize=8)


def percent(share: float) -> str:
    """A share from 0 to 1 in words."""
    return f"{share:.0%}".replace("%", " %")


def times(ratio: float) -> str:
    """A ratio in words."""
    return f"{ratio:.1f} ×" if ratio < 99.5 else f"{ratio:.0f} ×"


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to those wanted, at least gap apart and within low and high if they fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [0.0] * len(wanted)
    floor = low
    for i in order:
        places[i] = max(wanted[i], floor)
        floor = places[i] + gap
    ceiling = high
    for i in reversed(order):
        places[i] = min(places[i], ceiling)
        ceiling = places[i] - gap
    return places


def label_ends(axes: Axes, theme: Theme, ends: Mapping[str, tuple[float, str]]) -> None:
    """Names of methods beside the ends of their lines, right of the axes, never one upon the other.

    Args:
        axes: Its limits and scales must be final.
        theme: Of the page.
        ends: For each method the height of its end, in data, and the text.
    """
    to_points = 72 / DOTS_PER_INCH
    heights = {method: axes.transData.transform((0, y))[1] * to_points for method, (y, _) in ends.items()}
    bottom, top = (edge * to_points for edge in axes.get_window_extent().intervaly)
    for method, place in zip(ends, spread(list(heights.values()), 12.5, bottom + 4, top), strict=True):
        style = {"color": theme.methods[method], "fontweight": "bold" if method == OURS else "normal"}
        axes.annotate(ends[method][1], (1, 0), (8, place - bottom), "axes fraction", "offset points", va="center", **style)


def save(figure: Figure, stem: Path, title: str, description: str) -> list[Path]:
    """Write stem.svg and stem.png, the same bytes each time with one version of matplotlib; both carry title and description."""
    svg_path, png_path = stem.with_name(stem.name + ".svg"), stem.with_name(stem.name + ".png")
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", facecolor="auto", metadata={"Date": None, "Title": title, "Description": description})
    text = re.sub(r"[ \t]+$", "", drawn.getvalue().replace("'DejaVu Sans'", FONTS), flags=re.MULTILINE)
    svg_path.write_text(text, encoding="utf-8", newline="\n")
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=DOTS_PER_INCH, facecolor="auto")
    facts = PngInfo()
    facts.add_text("Title", title)
    facts.add_text("Description", description)
    # A hundred colours are all that there are, but for smooth edges; the file is a third as large.
    Image.open(pixels).convert("RGB").quantize(128).save(png_path, optimize=True, pnginfo=facts)
    return [svg_path, png_path]
