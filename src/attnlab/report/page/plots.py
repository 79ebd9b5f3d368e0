"""The plots of the page, as Bokeh's JSON.

Each has the data of every run; a filter named "shown" says which are drawn, and the page's script sets it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.core.types import ID
from bokeh.embed import json_item
from bokeh.models import CDSView, ColumnDataSource, HoverTool, IndexFilter, NumeralTickFormatter
from bokeh.palettes import Category10, Dark2
from bokeh.plotting import figure

from attnlab.callbacks.summary import label
from attnlab.report import sweep
from attnlab.report.page.gather import LOSSES, Shown

HEIGHT = 320  # pixels
GRAY = "#808690"  # of texts and lines: legible on white and on black
PALETTE = (*Category10[10], *Dark2[8])
TOOLS = "box_zoom,wheel_zoom,reset,save"
LOSS_TITLES = dict(zip(LOSSES, ("training loss", "validation loss"), strict=True))
ABOUT = [("run", "@run"), ("task", "@task, @corpus"), ("in", "@name")]
NEAR = (*sweep.SIZES, sweep.SPEED)  # what is shown beside the mouse; the table has all


def colours(runs: Sequence[Shown]) -> dict[str, str]:
    """A colour for each mechanism, the clearest for those that the plots show first; above eighteen they repeat."""
    cache = [run for run in runs if run.quality is not None and sweep.SIZES[1] in run.numbers]
    scored = [run for run in runs if run.quality is not None]
    names = dict.fromkeys(name for some in (cache, scored, runs) for name in sorted({run.mechanism for run in some}))
    names.pop("", None)  # of a broken record
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}


def points(runs: Sequence[Shown], first: str, target: str) -> dict[str, Any]:
    """The quality of the runs over one of their other numbers; which one, the page's script sets.

    Args:
        first: the number at the beginning, which some run has.
        target: the element that the plot stands in.
    """
    columns: dict[str, Any] = _about(runs)
    columns["score"] = ["" if run.quality is None else f"{run.quality:g} {label(run.metric)}" for run in runs]
    columns |= {f"{name} as text": [sweep.cell(run.numbers.get(name), name) for run in runs] for name in NEAR}
    columns["quality"] = np.array([np.nan if run.quality is None else run.quality for run in runs])
    for name in sweep.NUMBERS:
        columns[name] = np.array([run.numbers.get(name, np.nan) for run in runs])
    plot = _figure()
    plot.scatter(
        first,
        "quality",
        source=ColumnDataSource(columns),
        view=_view(len(runs)),
        name="marks",
        size=11,
        color="colour",
        alpha=0.8,
        line_color="white",
    )
    measured = [(name, f"@{{{name} as text}}") for name in NEAR]
    plot.add_tools(HoverTool(tooltips=[*ABOUT, ("quality", "@score"), *measured]))
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]a")
    return _item(plot, target)


def curves(runs: Sequence[Shown], loss: str, target: str) -> dict[str, Any]:
    """A line for each run that logged a loss; a dot where it logged one once.

    Args:
        target: the element that the plot stands in.
    """
    numbers = [i for i, run in enumerate(runs) if run.curves.get(loss)]
    columns: dict[str, Any] = {key: [values[i] for i in numbers] for key, values in _about(runs).items()}
    lines = [np.array(runs[i].curves[loss], dtype=np.float32) for i in numbers]
    columns |= {"xs": [line[:, 0] for line in lines], "ys": [line[:, 1] for line in lines]}
    alone = [line[0] if len(line) == 1 else (np.nan, np.nan) for line in lines]
    columns |= {"x": [float(x) for x, _ in alone], "y": [float(y) for _, y in alone]}
    plot, view = _figure(), _view(len(numbers))
    source = ColumnDataSource(columns)
    plot.multi_line("xs", "ys", source=source, view=view, name="marks", color="colour", line_width=2, alpha=0.85)
    if any(len(line) == 1 for line in lines):
        plot.scatter("x", "y", source=source, view=view, name="dots", color="colour", size=6, alpha=0.85)
    measured = [("update", "$snap_x{0,0}"), (LOSS_TITLES[loss], "$snap_y{0.[0000]}")]
    plot.add_tools(HoverTool(tooltips=[*ABOUT, *measured], line_policy="nearest"))
    plot.xaxis.axis_label, plot.yaxis.axis_label = "update", LOSS_TITLES[loss]
    return _item(plot, target)


def _about(runs: Sequence[Shown]) -> dict[str, list[Any]]:
    colour = colours(runs)
    return {
        "number": list(range(len(runs))),
        "run": [run.title for run in runs],
        "task": [str(run.record.get("task", "")) for run in runs],
        "corpus": [run.corpus for run in runs],
        "name": [Path(run.name).name for run in runs],
        "colour": [colour.get(run.mechanism, GRAY) for run in runs],
    }


def _view(count: int) -> CDSView:
    """All of them at first: Bokeh warns on the console of a plot that starts without a range."""
    return CDSView(filter=IndexFilter(indices=list(range(count)), name="shown"))


def _figure() -> figure:
    plot = figure(height=HEIGHT, sizing_mode="stretch_width", tools=TOOLS, active_drag=None, active_scroll=None)
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.background_fill_alpha = plot.border_fill_alpha = 0
    plot.outline_line_color = None
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = GRAY, 0.25
    for axis in (plot.xaxis, plot.yaxis):
        axis.axis_line_color = axis.major_tick_line_color = GRAY
        axis.axis_label_text_color = axis.major_label_text_color = GRAY
        axis.axis_label_text_font_style, axis.axis_label_text_font_size = "normal", "13px"
        axis.minor_tick_line_color = None
    return plot


def _item(plot: figure, target: str) -> dict[str, Any]:
    return dict(json_item(plot, ID(target)))
