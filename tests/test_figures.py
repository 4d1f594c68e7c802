"""bench/figures.py: from made-up rows; and that the committed figures show the committed rows."""

from __future__ import annotations

import hashlib
import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from radixkv.bench.figure_numbers import hit_rates, median_wait, rows_of, summary_of, total_tokens, warm_ratio
from radixkv.bench.figure_style import DOTS_PER_INCH, METHOD_NAMES, SETTINGS, THEMES, WIDTH, Theme
from radixkv.bench.figures import describe_inputs, draw_all, draw_figures, main, provenance_lines
from radixkv.bench.scenario_results import (
    BATCH,
    CLAIMS,
    LONG,
    LONG_METHODS,
    METHODS,
    NO_CACHE,
    OURS,
    PLAIN,
    TITLES,
    Row,
    append_row,
    summarise,
)

ROOT = Path(__file__).resolve().parent.parent
SHARED = tuple(name for name in TITLES if name not in LONG)
FIGURES = ("overview", *SHARED, LONG[0])
FIGURES_OF_RUN = ("overview", "rag", "best-of-n", LONG[0])
FACTS = {
    "processor": "A processor with a rather long name, 96 cores",
    "cores": 2,
    "threads": 1,
    "model": "SmolLM2-135M-Instruct",
    "dtype": "float32",
    "size": "full",
    "torch": "2.13.0+cpu",
    "transformers": "5.24.0",
    "radixkv": "0.1.0",
    "commit": "0123456789abcdef-dirty",
    "started": "2026-11-30T01:02:03+00:00",
    "earlier_runs": [{}, {}],
}


def made_up_rows(num_requests: int = 9) -> list[Row]:
    """Two documents, asked about by turns; a computed token takes a millisecond, another method's a little more."""
    rows = []
    for index, scenario in enumerate(SHARED):
        for arrival in range(num_requests):
            prompt = 1000 + 100 * index + 7 * arrival
            for method, cost in zip(METHODS, (1.0, 1.1, 1.3, 1.05), strict=True):
                reused = 0 if method == PLAIN or arrival < 2 else prompt - 90 - 10 * arrival
                first = 0.02 + 0.001 * cost * (prompt - reused)
                equal = None if method == BATCH else (arrival, method) != (3, OURS)
                rows.append(Row(scenario, method, 0, arrival, arrival, prompt, prompt - reused, reused, first, first + 0.5, 16, equal))
    for scenario, num_new in zip(LONG, (256, 1000), strict=True):
        for method, computed, seconds in zip(LONG_METHODS, (500 * num_new, num_new + 9, num_new + 9), (90.0, 9.0, 9.3), strict=True):
            rows.append(Row(scenario, method, 0, 0, 0, 10, computed, 0, 0.1, seconds, num_new, True))
    return rows


def write_run(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "scenarios.csv"
    for row in rows:
        append_row(path, row)
    (folder / "scenarios.provenance.json").write_text(json.dumps(FACTS))
    return path


def drawn(rows: Sequence[Row], theme: Theme = THEMES[0]) -> dict[str, tuple[str, Figure]]:
    with matplotlib.rc_context():
        matplotlib.rcParams.update(SETTINGS)
        return draw_figures(rows, theme, provenance_lines(FACTS))


def texts_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV with its figures beside it."""
    path = write_run(tmp_path_factory.mktemp("run"), [row for row in made_up_rows() if row.scenario in ("rag", "best-of-n", *LONG)])
    main([str(path)])
    return path


def test_every_figure_is_written_in_both_formats_for_both_pages(run: Path) -> None:
    expected = {f"{name}-{theme.name}.{kind}" for name in FIGURES_OF_RUN for theme in THEMES for kind in ("svg", "png")}
    assert {path.name for path in run.parent.iterdir()} == expected | {run.name, "scenarios.provenance.json"}
    for name in expected:
        path = run.with_name(name)
        assert path.stat().st_size < 300_000, name
        if path.suffix == ".svg":
            root = ElementTree.parse(path).getroot()
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert "sans-serif" in path.read_text(encoding="utf-8")
            size = [float(root.attrib[side].removesuffix("pt")) / 72 for side in ("width", "height")]
        else:
            with Image.open(path) as image:
                image.load()
                assert image.text["Description"] == describe_inputs(run)  # type: ignore[attr-defined]
                size = [pixels / DOTS_PER_INCH for pixels in image.size]
        assert size[0] == pytest.approx(WIDTH, abs=0.01) and 3 < size[1] < 7, name


def test_drawing_again_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    for name in (run.name, "scenarios.provenance.json"):
        shutil.copy(run.with_name(name), tmp_path)
    # What the user has set up for figures of their own is no matter.
    with matplotlib.rc_context({"axes.titlesize": 30, "lines.linewidth": 9, "svg.hashsalt": "other"}):
        paths = draw_all(tmp_path / run.name)
    assert len(paths) == 4 * len(FIGURES_OF_RUN)
    for path in paths:
        assert path.read_bytes() == run.with_name(path.name).read_bytes(), path.name


def test_titles_and_labels_are_the_numbers_of_the_report() -> None:
    rows = made_up_rows()
    figures, summaries = drawn(rows), summarise(rows)
    ratios = []
    for scenario in SHARED:
        summary = summary_of(summaries, scenario, OURS)
        assert summary is not None and summary.warm_prefill_ratio is not None
        ratios.append(summary.prefill_ratio)
        title, figure = figures[scenario]
        texts = texts_of(figure)
        assert f"come {summary.prefill_ratio:.1f} × as fast" in title and f"{summary.warm_prefill_ratio:.1f} × when warm" in title
        assert title in texts
        assert f"radixkv computes {summary.computed_tokens:,} of {summary.prompt_tokens:,} prompt tokens" in texts
        assert f"{summary.hit_rate:.0%}".replace("%", " %") + " of all prompt tokens are reused" in texts
        subtitle = next(text for text in texts if "Whole answers" in text)
        assert f"come {summary.whole_ratio:.1f} × as fast, and 8 of 9 are equal" in subtitle
        # Each label of the overview names this scenario's own numbers.
        for number in (summary.prefill_ratio, summary.warm_prefill_ratio):
            assert f"{number:.1f} ×" in texts_of(figures["overview"][1])
    assert f"come {min(ratios):.1f} × to {max(ratios):.1f} × as fast" in figures["overview"][0]
    assert "1,009 token computations in place of 500,000" in figures[LONG[0]][0]
    assert {"128,000", "265", "500,000", "1,009", "90.00 s", "9.00 s", "9.30 s", "0.97 × as fast as plain generate()"} <= set(
        texts_of(figures[LONG[0]][1])
    )


def test_points_bars_and_lines_are_the_rows() -> None:
    rows = made_up_rows()
    figures = drawn(rows)
    waits, bars, rates = figures["rag"][1].axes
    for index, method in enumerate(METHODS):
        chosen = rows_of(rows, "rag", method)
        lines = [line for line in waits.lines if line.get_color() == THEMES[0].methods[method]]
        joined, cold, warm = (list(line.get_ydata()) for line in lines)
        seconds = [row.first_token_seconds for row in chosen]
        assert joined == seconds
        assert (cold, warm) == ((seconds, []) if method == PLAIN else (seconds[:2], seconds[2:]))
        tokens = total_tokens(chosen)
        computed, reused = bars.patches[2 * index : 2 * index + 2]
        assert (computed.get_width(), reused.get_x(), reused.get_width()) == (tokens.computed, tokens.computed, tokens.reused)
        (rate,) = (line for line in rates.lines if line.get_color() == THEMES[0].methods[method])
        assert list(rate.get_ydata()) == list(hit_rates(chosen).values())
    overview = figures["overview"][1].axes[0]
    claimed = {(patch.get_x(), patch.get_x() + patch.get_width()) for patch in overview.patches}
    assert claimed == set(CLAIMS.values())
    low, high = waits.get_ylim()
    assert low < min(waits.get_yticks()) < min(row.first_token_seconds for row in rows if row.scenario == "rag")
    assert max(row.first_token_seconds for row in rows if row.scenario == "rag") < max(waits.get_yticks()) < high
    assert overview.get_xscale() == waits.get_yscale() == "log"


def test_numbers() -> None:
    rows = [
        Row("rag", OURS, 0, 1, 1, 100, 10, 90, 0.1, 1.0, 8, True),
        Row("rag", OURS, 0, 0, 0, 100, 100, 0, 1.0, 2.0, 8, True),
        Row("rag", OURS, 0, 2, 2, 200, 101, 99, 0.5, 2.0, 8, True),
        Row("rag", OURS, 0, 3, 3, 200, 100, 100, 0.3, 2.0, 8, True),
    ]
    assert [row.arrival for row in rows_of(rows, "rag", OURS)] == [0, 1, 2, 3]
    assert hit_rates(rows) == {0: 0.0, 1: 90 / 200, 2: 189 / 400, 3: 289 / 600}
    assert median_wait(rows, warm=True) == pytest.approx(0.2) and median_wait(rows, warm=False) == 0.75
    assert median_wait([], warm=True) is None
    tokens = total_tokens(rows)
    assert (tokens.prompt, tokens.computed, tokens.reused, tokens.share) == (600, 311, 289, 289 / 600)
    plain = [replace(row, method=PLAIN, computed_tokens=row.prompt_tokens, reused_tokens=0, first_token_seconds=1.0) for row in rows]
    (summary,) = [summary for summary in summarise([*rows, *plain]) if summary.method == OURS]
    assert warm_ratio(rows, summary) == pytest.approx((10 + 1 / 0.3) / 2)
    assert warm_ratio([row for row in rows if row.arrival in (1, 3)], summary) is None, "all were warm: that is no kind of its own"


@pytest.mark.parametrize("missing", [*METHODS, NO_CACHE])
def test_a_method_that_was_not_measured_is_left_out(missing: str) -> None:
    figures = drawn([row for row in made_up_rows() if row.method != missing])
    assert list(figures) == [name for name in FIGURES if (name, missing) != (LONG[0], PLAIN)]
    name = LONG[0] if missing == NO_CACHE else "rag"
    texts = texts_of(figures[name][1])
    assert METHOD_NAMES[missing] not in texts
    if missing in (PLAIN, OURS):
        assert figures["rag"][0] == "RAG" and not any("as fast" in text for text in texts)


@pytest.mark.parametrize("missing", [*SHARED, LONG[1]])
def test_a_scenario_that_was_not_measured_is_left_out(missing: str) -> None:
    rows = [row for row in made_up_rows() if row.scenario != missing]
    figures = drawn(rows)
    assert list(figures) == [name for name in FIGURES if name != missing]
    names = [label.get_text() for label in figures["overview"][1].axes[0].get_yticklabels()]
    assert len(names) == len(FIGURES) - 1 - (missing in SHARED)


def test_one_row_alone_and_unknown_answers_can_be_drawn() -> None:
    (row,) = [row for row in made_up_rows(1) if (row.scenario, row.method) == ("chat", OURS)]
    assert list(drawn([row])) == ["overview", "chat"]
    unknown = [replace(row, equal=None) for row in made_up_rows()]
    assert not any("equal" in text for text in texts_of(drawn(unknown)["chat"][1]))


@pytest.mark.parametrize("num_requests", [1, 16, 100])
def test_nothing_is_cut_off_and_no_name_lies_upon_another(num_requests: int) -> None:
    for name, (_, figure) in drawn(made_up_rows(num_requests)).items():
        figure.draw_without_rendering()
        inside = figure.get_tightbbox()
        assert min(inside.min) >= 0 and inside.x1 <= figure.get_figwidth() and inside.y1 <= figure.get_figheight(), name
        for axes in figure.axes if name in SHARED else ():
            boxes = [text.get_window_extent() for text in axes.texts if text.get_text().startswith(tuple(METHOD_NAMES.values()))]
            assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i]), name


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path, made_up_rows(1)[:1])
    (tmp_path / "scenarios.provenance.json").write_text(json.dumps({name: FACTS[name] for name in FACTS if name != "commit"}))
    with pytest.raises(ValueError, match="lacks commit"):
        draw_all(path)
    path.write_text(path.read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="has no rows"):
        draw_all(path)
    assert sorted(each.suffix for each in tmp_path.iterdir()) == [".csv", ".json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace(text.splitlines()[1].split(",")[5], "many", 1), "line 2: invalid literal"),
        (lambda text: text.replace(text.splitlines()[1].split(",")[8], "nan"), "line 2: tokens and seconds must be numbers above 0"),
        (lambda text: text.replace(text.splitlines()[1].split(",")[9], "0.000000"), "line 2: tokens and seconds must be numbers above 0"),
        (lambda text: "\ufeff" + text, "must have the columns"),
    ],
    ids=["a word", "no number", "no time", "a mark of a spreadsheet"],
)
def test_a_damaged_file_is_one_sentence(change: Callable[[str], str], said: str, tmp_path: Path, capsys: Any) -> None:
    """It ended in a traceback from inside of the drawing."""
    path = write_run(tmp_path, made_up_rows(1))
    path.write_text(change(path.read_text()))
    assert main([str(path)]) == 2
    assert said in capsys.readouterr().err
    assert main([str(tmp_path / "none.csv")]) == 2 and "none.csv" in capsys.readouterr().err


def test_provenance() -> None:
    first, second = provenance_lines(FACTS).split("\n")
    assert all(part in first for part in (FACTS["processor"], "2 cores, 1 thread", "SmolLM2-135M-Instruct, float32, full size"))  # type: ignore[operator]
    assert all(part in second for part in ("torch 2.13.0+cpu", "commit 01234567 with changes", "2026-11-30, and 2 earlier runs"))
    assert "unknown" in provenance_lines({**FACTS, "commit": None})


def find_stale(folder: Path) -> list[str]:
    """Names of figures in a folder that were not drawn from the CSV beside them as it is now, or that are missing or left over.

    Pictures of other things may lie there too; ours are those for a light or a dark page.
    """
    endings = tuple(f"-{theme.name}{kind}" for theme in THEMES for kind in (".svg", ".png"))
    present = {path.name: path for path in sorted(folder.glob("*")) if path.name.endswith(endings)}
    csv_path = folder / "scenarios.csv"
    if not csv_path.exists():
        return list(present)
    with csv_path.open() as file:
        measured = {line.partition(",")[0] for line in file} & set(TITLES)
    names = {"overview", *(LONG[0] if scenario in LONG else scenario for scenario in measured)}
    expected = {f"{name}-{theme.name}.{kind}" for name in names for theme in THEMES for kind in ("svg", "png")}
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (csv_path, folder / "scenarios.provenance.json")]
    stale = [name for name, path in present.items() if not all(each.encode() in path.read_bytes() for each in hashes)]
    return sorted({*stale, *(expected ^ present.keys())})


def test_stale_figures_are_found(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    shutil.copytree(run.parent, folder)
    assert find_stale(folder) == []
    (folder / "of_something_else.svg").write_text("<svg/>")
    assert find_stale(folder) == []
    (folder / "rag-dark.png").rename(folder / "rug-dark.png")
    assert find_stale(folder) == ["rag-dark.png", "rug-dark.png"]
    (folder / "rug-dark.png").rename(folder / "rag-dark.png")
    text = (folder / "scenarios.csv").read_text()
    (folder / "scenarios.csv").write_text(text.replace(",yes", ",no", 1))
    assert len(find_stale(folder)) == 4 * len(FIGURES_OF_RUN), "the rows are others than those drawn"
    (folder / "scenarios.csv").write_text(text)
    assert find_stale(folder) == []
    (folder / "scenarios.provenance.json").write_text(json.dumps({**FACTS, "cores": 3}))
    assert len(find_stale(folder)) == 4 * len(FIGURES_OF_RUN)


def test_the_committed_figures_show_the_committed_rows() -> None:
    """If this fails, draw them again: make figures."""
    assert find_stale(ROOT / "docs" / "figures") == []
