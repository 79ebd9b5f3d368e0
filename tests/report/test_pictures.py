"""Every kind of picture: no text lies on another one or outside the page, and the same numbers give the same bytes."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pandas as pd
import pytest
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text

from attnlab.config.build import CONF
from attnlab.report import bench, compression, decoders, figure
from attnlab.report.spec import Plot

EXPERIMENTS = CONF.parent / "experiments"
TITLE = "a title of the length that such a title has, with the model"
DRAW: dict[str, Callable[..., Figure]] = {  # committed numbers
    "irratt/sample/ranks_irratt": partial(compression.ranks_plot, title=TITLE),
    "irratt/fruits360/top1": compression.sweep_plot,
    "mtla/bench/training": bench.plot,
    "tensorllm/sample/accuracy": decoders.accuracy_plot,
    "convert/sample/perplexity": decoders.perplexity_plot,
    "t6/wikitext2_points": partial(figure.scatter, plot=Plot("", "", "bytes", "perplexity", log_x=True), title=TITLE),
}


def committed(name: str) -> pd.DataFrame:
    return pd.read_csv(EXPERIMENTS / f"{name}.csv", keep_default_na=False)


def made(kind: str) -> Figure:
    names = [f"mechanism {i} of a long name" for i in range(12)]
    if kind == "context":
        rows = [
            (name, n, *(str(n * (i + 1)) for _ in range(3)), "", str(i + n), "not run")
            for i, name in enumerate(names)
            for n in (256, 1024, 4096, 16384, 32768)
        ]
        return bench.context_plot(pd.DataFrame(rows, columns=bench.CONTEXT), "title")
    if kind == "curves":
        logged = [
            (panel, name, seed, step, i + seed / step)
            for panel in ("training loss", "validation loss")
            for i, name in enumerate(names)
            for seed in (1, 2)
            for step in (100, 200, 300)
        ]
        return figure.draw_together(pd.DataFrame(logged, columns=figure.CURVES), "title")
    if kind == "lines":
        points = [(name, s, x, x * s + i) for i, name in enumerate(names) for s in (1, 2) for x in (4, 8, 16)]
        return figure.seeds(pd.DataFrame(points, columns=figure.POINTS), Plot("", "", "rank", "top-1, %"), "title")
    random = np.random.default_rng(1)
    weights = [(i, h, t, random.normal()) for i in range(3) for h in range(12) for t in range(48)]
    data = pd.DataFrame(weights, columns=["layer", "head", "term", "weight"])
    return compression.fusion_plot(data, "cp_slimatt, 48 columns a layer")


CASES = [pytest.param(kind, marks=pytest.mark.slow) for kind in (*DRAW, "curves", "lines", "fusion")] + ["context"]


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


@pytest.mark.parametrize("kind", CASES)
def test_no_text_lies_on_another_or_outside(kind: str) -> None:
    page = DRAW[kind](committed(kind)) if kind in DRAW else made(kind)
    page.draw_without_rendering()
    boxes = {
        (text.get_text(), id(text)): text.get_window_extent().padded(-1) for text in shown(page) if text.get_text()
    }
    assert len(boxes) > 6
    placed = list(boxes.items())
    over = [(a[0], b[0]) for i, (a, box) in enumerate(placed) for b, other in placed[:i] if box.overlaps(other)]
    assert not over
    outside = [a[0] for a, box in placed if box.x0 < 0 or box.y0 < 0 or box.x1 > page.bbox.x1 or box.y1 > page.bbox.y1]
    assert not outside


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*DRAW, "curves", "lines", "fusion", "context"])
def test_the_same_numbers_give_the_same_bytes(kind: str) -> None:
    first, second = (
        figure.png(DRAW[kind](committed(kind)) if kind in DRAW else made(kind), "digest") for _ in range(2)
    )
    assert first == second
