"""Figures: what is drawn, and that no text lies on another one or outside the page."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from attnlab.config.build import CONF
from attnlab.report import bench, compression, decoders, figure, needle
from attnlab.report.figure import POINTS, Panel, Plot, scatter, together
from attnlab.run.store import SavedRecord

EXPERIMENTS = CONF.parent / "experiments"
TITLE = "a title of the length that such a title has, with the model"
QUICK = "t6/figure_context_points"
DRAW: dict[str, Callable[..., Figure]] = {  # committed numbers
    "irratt/sample/ranks_irratt": partial(compression.ranks_plot, title=TITLE),
    "irratt/low_ranks/top1": compression.sweep_plot,
    "mtla/bench/training": bench.plot,
    "tensorllm/sample/accuracy": decoders.accuracy_plot,
    "convert/sample/perplexity": decoders.perplexity_plot,
    "convert/needle/needle_gain": partial(needle.draw, label=needle.WHAT["gain"][1]),
    "comparison/wikitext2_points": partial(figure.scatter, plot=Plot("", "", "bytes", "perplexity"), title=TITLE),
    "recall/table_points": partial(figure.scatter, plot=Plot("", "", "bytes", "share"), title=TITLE),
    "recall/table_curves": partial(figure.draw_together, title=TITLE),
    "irratt/low_ranks/fusion_cp_slimatt_start_global_fusion_free": partial(compression.fusion_plot, title=TITLE),
    QUICK: partial(bench.context_plot, title=TITLE),
}
CASES = [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DRAW]


def shown(page: Figure) -> Iterator[Text]:
    """Every text that can be seen."""
    yield from page.texts  # the title of the page is among them
    for legend in (*page.legends, *(axes.get_legend() for axes in page.axes)):
        yield from (legend.get_texts() if legend else [])
    for axes in page.axes:
        yield from (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
        for axis in (axes.xaxis, axes.yaxis):
            yield from ticks(axis)


def ticks(axis: Axis) -> list[Text]:
    """The labels of ticks between the ends of an axis."""
    least, most = sorted(axis.get_view_interval())
    slack = 1e-9 * (most - least)
    marks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [
        mark.label1 for mark in marks if least - slack <= mark.get_loc() <= most + slack and mark.label1.get_visible()
    ]


@pytest.mark.parametrize("name", CASES)
def test_no_text_lies_on_another_or_outside(name: str) -> None:
    page = DRAW[name](pd.read_csv(EXPERIMENTS / f"{name}.csv", keep_default_na=False))
    page.draw_without_rendering()
    boxes = {
        (text.get_text(), id(text)): Text.get_window_extent(text).padded(-1)  # without the line to its point
        for text in shown(page)
        if text.get_text()
    }
    assert len(boxes) > 6
    placed = list(boxes.items())
    over = [(a[0], b[0]) for i, (a, box) in enumerate(placed) for b, other in placed[:i] if box.overlaps(other)]
    assert not over
    outside = [a[0] for a, box in placed if box.x0 < 0 or box.y0 < 0 or box.x1 > page.bbox.x1 or box.y1 > page.bbox.y1]
    assert not outside


def test_every_seed_is_drawn_and_the_label_stands_at_the_mean() -> None:
    rows = [["a", "1", "2.0", "10.0"], ["a", "2", "4.0", "20.0"], ["b", "1", "3.0", "5.0"]]
    (axes,) = scatter(pd.DataFrame(rows, columns=POINTS), Plot("", "", "x", "y")).axes
    drawn = [np.asarray(line.get_xydata()).tolist() for line in axes.lines]
    assert drawn == [[[2.0, 10.0], [4.0, 20.0]], [[3.0, 15.0]], [[3.0, 5.0]]]
    assert [text.xy for text in axes.texts if isinstance(text, Annotation)] == [(3.0, 5.0), (3.0, 15.0)]


def test_a_panel_takes_some_rows_and_exp_of_its_metric() -> None:
    curves = {"loss": [[10, 3.0], [20, 2.5]], "val_loss": [[20, 1.0]]}
    records: list[dict[str, Any]] = [{"seed": 1, "curves": curves}, {"seed": 2, "curves": curves}, {"seed": 3}]
    saved = [SavedRecord(Path("none", "record.json"), record) for record in records]
    data = together(list(zip("ABB", saved, strict=True)), [Panel("val_loss", "perplexity, B", exp=True, rows="B")])
    assert data.to_numpy().tolist() == [["perplexity, B", "B", 2, 20, 2.718281828459045]]


@pytest.mark.parametrize("label", ["$\\frac$", "$$", "$\\input$"])
def test_names_are_no_formulas(label: str, tmp_path: Path) -> None:
    data = pd.DataFrame([(label, 1, 1.0, 2.0), (label, 2, 2.0, 3.0), ("m", 1, 2.0, 3.0)], columns=figure.POINTS)
    draw = partial(figure.scatter, plot=figure.Plot("", "", "x", "y"))
    table, picture = figure.write(tmp_path / "points", data, draw)
    assert label in table.read_text() and picture.stat().st_size > 0
