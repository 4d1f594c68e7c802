"""Draw every figure of a scenario run beside its CSV, for light and for dark pages.

    python bench/figures.py docs/figures/scenarios.csv

Beside scenarios.csv must lie scenarios.provenance.json. One figure for each scenario and one overview are written, each as SVG and as PNG
and in two variants, `rag-light.svg`, `rag-dark.svg` and so on. Each file carries the SHA-256 of both inputs in its description.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script, from anywhere and without an installation.
    sys.path.insert(0, str(ROOT))

from radixkv.bench.figure_long import draw_long, long_title  # noqa: E402
from radixkv.bench.figure_overview import draw_overview, overview_title  # noqa: E402
from radixkv.bench.figure_panels import draw_scenario, scenario_title  # noqa: E402
from radixkv.bench.figure_style import GAP, SETTINGS, THEMES, Theme, save  # noqa: E402
from radixkv.bench.scenario_results import LONG, METHODS, TITLES, Row, provenance_path, read_rows, summarise  # noqa: E402

FACTS = ("processor", "cores", "threads", "model", "dtype", "size", "torch", "transformers", "radixkv", "commit", "started")


def draw_all(csv_path: Path) -> list[Path]:
    """Draw all figures of one CSV beside it.

    Args:
        csv_path: What bench/scenarios.py wrote; its provenance lies beside it.

    Returns:
        The files written, two formats of two variants of each figure.

    Raises:
        ValueError: The CSV has no rows, or its provenance lacks a fact.
        FileNotFoundError: One of the two files is not there.
    """
    rows = read_rows(csv_path)
    if not rows:
        raise ValueError(f"draw_all: {csv_path} has no rows: write some with bench/scenarios.py --csv")
    provenance, description = provenance_lines(read_facts(csv_path)), describe_inputs(csv_path)
    written = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        for theme in THEMES:
            for name, (title, figure) in draw_figures(rows, theme, provenance).items():
                written += save(figure, csv_path.with_name(f"{name}-{theme.name}"), title, description)
    return written


def draw_figures(rows: Sequence[Row], theme: Theme, provenance: str) -> dict[str, tuple[str, Figure]]:
    """Title and figure of the overview and of each scenario that was measured, by name.

    Args:
        rows: Of all methods and scenarios.
        theme: Of the page.
        provenance: Two lines on where the numbers come from.
    """
    measured = {row.scenario for row in rows if row.method in METHODS and row.scenario not in LONG}
    figures = {"overview": (overview_title(rows), draw_overview(rows, theme, provenance))}
    for scenario in TITLES:
        if scenario in measured:
            figures[scenario] = (scenario_title(rows, scenario), draw_scenario(rows, scenario, theme, provenance))
    if any(summary.scenario in LONG for summary in summarise(rows)):
        figures[LONG[0]] = (long_title(rows), draw_long(rows, theme, provenance))
    return figures


def read_facts(csv_path: Path) -> dict[str, Any]:
    """The provenance of a CSV.

    Raises:
        ValueError: It is damaged, or lacks a fact that the figures name.
    """
    place = provenance_path(csv_path)
    try:
        facts = json.loads(place.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"read_facts: {place} is damaged: {error}") from error
    missing = [name for name in FACTS if name not in facts]
    if missing:
        raise ValueError(f"read_facts: {place} lacks {', '.join(missing)}: measure again with bench/scenarios.py --csv")
    return facts


def describe_inputs(csv_path: Path) -> str:
    """The SHA-256 of a CSV and of its provenance, as every figure drawn from them carries it."""
    paths = (csv_path, provenance_path(csv_path))
    return "; ".join(f"{path.name} sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths)


def provenance_lines(facts: Mapping[str, Any]) -> str:
    """Hardware and model in one line, versions, commit and date in another."""
    counts = [f"{facts[name]} {name if facts[name] != 1 else name[:-1]}" for name in ("cores", "threads")]
    commit, _, changed = (facts["commit"] or "unknown").partition("-")
    num_earlier = len(facts.get("earlier_runs", ()))
    first = (", ".join([facts["processor"], *counts]), f"{facts['model']}, {facts['dtype']}, {facts['size']} size")
    second = (
        ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers", "radixkv")),
        f"commit {commit[:8]}{' with changes' if changed else ''}",
        str(facts["started"])[:10] + (f", and {num_earlier} earlier {'run' if num_earlier == 1 else 'runs'}" if num_earlier else ""),
    )
    return "\n".join(f"{GAP}·{GAP}".join(parts) for parts in (first, second))


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, and print the names of the files; returns the exit status, 2 if the files cannot be read or drawn."""
    parser = argparse.ArgumentParser(description="Draw every figure of a scenario run beside its CSV.")
    parser.add_argument("csv", type=Path, help="what bench/scenarios.py wrote, e.g. docs/figures/scenarios.csv")
    try:
        for path in draw_all(parser.parse_args(arguments).csv):
            print(path)
    except (OSError, ValueError) as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
