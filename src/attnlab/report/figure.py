"""Figures drawn from tables of numbers that are saved beside them as CSV, and the curves of runs."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.report.table import as_csv
from attnlab.run.files import write_bytes
from attnlab.run.record import RECORD

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnlab.run.store import SavedRecord

KEY = "Data"  # entry of the PNG's text: the SHA-256 of the CSV that it was drawn from
COLOURS = ("#0068a8", "#d1490b", "#008a5e", "#b0478c", "#4aa3df", "#b07c00", "#6a51a3", "#4d4d4d")
MARKERS = "osD^vP"  # the next one after all colours
SPAN = 20  # values that span more get a logarithmic axis
SIZES = r" [sr]=\S+"  # in labels: stride and rank
POINTS = ["row", "seed", "x", "y"]  # the columns of scatter
MANY = 16  # labels above which a page is larger
CURVES = ["panel", "run", "seed", "update", "value"]
FEW = 10  # points below which each is marked: a single point has no line


@dataclass(frozen=True)
class Plot:
    """A point for each row and seed.

    Args:
        x, y: dotted keys of the records.
        name: the end of its files' names.
    """

    x: str
    y: str
    x_label: str
    y_label: str
    name: str = "points"


@dataclass(frozen=True)
class Panel:
    """Curves of a logged metric over the updates, one for each row and seed.

    Args:
        metric: its name in the run's curves, for instance val_loss.
        exp: draw exp of the metric: the perplexity of a loss in nats.
        rows: the beginning of the labels of its rows; empty: all rows.
    """

    metric: str
    label: str
    exp: bool = False
    rows: str = ""


def write(stem: Path, data: pd.DataFrame, draw: Callable[[pd.DataFrame], Figure]) -> list[Path]:
    """Write `stem`.csv, and `stem`.png unless it was drawn from the same CSV. Of fewer than three rows write nothing.

    Pixels of a figure depend on the version of matplotlib and on fonts; the CSV does not.
    """
    if len(data) < 3:
        return []
    text = as_csv(data).encode()
    digest = hashlib.sha256(text).hexdigest()
    table, picture = stem.with_name(f"{stem.name}.csv"), stem.with_name(f"{stem.name}.png")
    write_bytes(table, text)
    if drawn_from(picture) != digest:
        shown = data.replace(r"\$", r"\\$", regex=True)
        write_bytes(picture, png(draw(shown), digest))  # no text of a record is a formula of matplotlib
    return [table, picture]


def drawn_from(picture: Path) -> str | None:
    """The SHA-256 of the CSV that a PNG was drawn from; None if the file is missing or names no CSV."""
    from PIL import Image

    try:
        with Image.open(picture) as image:
            return image.info.get(KEY)
    except OSError:  # also raised for a file that is not a picture
        return None


def png(figure: Figure, digest: str) -> bytes:
    """A figure as PNG, which stores `digest`, the SHA-256 of its data."""
    file = io.BytesIO()
    figure.savefig(file, dpi=150, format="png", metadata={KEY: digest})
    return file.getvalue()


def panels(count: int, width: float, height: float, most: int = 3, **more: Any) -> tuple[Figure, list[Axes]]:
    """A page with panels of one size in inches, at most `most` in a row; `more` of :meth:`Figure.subplots`."""
    from matplotlib.figure import Figure

    rows = -(-count // most)
    columns = -(-count // rows)
    page = Figure(figsize=(columns * width, rows * height), layout="constrained")
    every = page.subplots(rows, columns, squeeze=False, **more).flatten().tolist()
    for axes in every[count:]:
        axes.remove()
    return page, every[:count]


def split(names: Sequence[str]) -> list[list[str]]:
    """The names in as few parts of about one size as leave a colour for each name."""
    parts = -(-len(names) // len(COLOURS))
    return [list(names[len(names) * i // parts : len(names) * (i + 1) // parts]) for i in range(parts)]


def plain(axes: Axes, **labels: Any) -> None:
    """Set the labels of a panel, draw a faint grid, and leave out the upper and the right border."""
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def look(number: int) -> dict[str, Any]:
    """The colour and marker of a series. No two of the first 48 are alike."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number // len(COLOURS) % len(MARKERS)]}


def wide(values: Iterable[float]) -> bool:
    """Whether values need a logarithmic axis. Shares, which are at most 1, do not."""
    least, most = min(values := list(values)), max(values)
    return least > 0 and most > max(1, SPAN * least)


def logarithmic(axes: Axes, *directions: str, base: int = 10) -> None:
    """Make axes of a panel logarithmic after its lines are drawn, with plain numbers at their ticks."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    for direction in directions:
        axes.set(**{f"{direction}scale": "log"})
        axes.autoscale_view()
        axis = axes.xaxis if direction == "x" else axes.yaxis
        least, most = axis.get_view_interval()
        subs = (1, 1.5, 2, 3, 5, 7) if most < SPAN * least else (1, 2, 5) if most < 1000 * least else (1,)
        axis.set_major_locator(LogLocator(base, subs if base == 10 else (1,)))
        axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        axis.set_minor_locator(NullLocator())


def lines(
    axes: Axes, data: pd.DataFrame, by: str, names: Sequence[str], x: str, y: str, ends: Sequence[str] = ()
) -> None:
    """Draw a line for each name in the column `by`, with a marker at each point.

    Args:
        names: the names in all panels, so that a name has one colour.
        ends: the columns of the lower and upper ends of error bars.
    """
    for number, name in enumerate(names):
        line = data[data[by] == name].sort_values(x, kind="stable")
        if line.empty:
            continue
        xs, ys, *bars = (line[column].astype(float).to_numpy() for column in (x, y, *ends))
        axes.errorbar(xs, ys, [abs(ys - end) for end in bars] or None, capsize=2, markersize=4, label=name,
                      **look(number))  # fmt: skip


def name_ends(page: Figure) -> None:
    """Write the names of lines to the right of their panel, one above the other, joined to their last visible points.

    Of several lines with one name, the last one is joined.
    """
    import numpy as np

    for axes in page.axes:
        axes.autoscale_view()
        drawn: dict[str, tuple[str, float, Any, Any]] = {}
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            line: Any = handle[0] if isinstance(handle, tuple) else handle
            places = line.get_transform().transform(line.get_xydata())
            visible = [i for i, place in enumerate(places) if axes.bbox.padded(1).contains(*place)]
            if visible:
                last = max(visible, key=lambda i: places[i][0])
                drawn[label] = label, places[last][1], line, line.get_xydata()[last]
        chosen = sorted(drawn.values(), key=itemgetter(1))
        steps = 11 * page.dpi / 72 / axes.bbox.height * np.arange(len(chosen))  # 11 points for each name
        heights = [(y - axes.bbox.y0) / axes.bbox.height for _, y, _, _ in chosen] - steps
        heights = (np.maximum.accumulate(heights) + np.minimum.accumulate(heights[::-1])[::-1]) / 2 + steps
        for (label, _, line, end), height in zip(chosen, np.clip(heights, steps, 1 - steps[::-1]), strict=True):
            color = {"color": line.get_color()}
            joint = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5), **color}
            axes.annotate(label, end, (1.03, height), line.get_transform(), "axes fraction", fontsize=8, va="center",
                          arrowprops=joint, annotation_clip=False, **color)  # fmt: skip


def scatter(points: pd.DataFrame, plot: Plot, title: str = "", joined: bool = False) -> Figure:
    """Draw a labelled point at the mean of each row's seeds, and a small dot for each seed. `points`: POINTS.

    Rows whose labels begin with one word have one colour. With `joined` a line goes through the points of labels that
    differ in stride and rank alone.
    """
    points = points.astype({"x": float, "y": float})
    rows = points.groupby("row", sort=False)
    means = rows[["x", "y"]].mean()
    page, [axes] = panels(1, *((6.4, 3.6) if len(means) <= MANY else (10, 6.5)))
    plain(axes, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.set_title(title, fontsize=10)
    axes.margins(0.12)
    kinds = list(dict.fromkeys(re.split("[ ,]", label)[0] for label in means.index))
    sizeless = [re.sub(SIZES, "", label) for label in means.index]
    for name in dict.fromkeys(sizeless) if joined else ():
        line, style = means[[other == name for other in sizeless]], look(kinds.index(re.split("[ ,]", name)[0]))
        axes.plot(*line.sort_values("x").to_numpy().T, linewidth=1, alpha=0.5, **style | {"marker": ""})
    for label, seeds in rows:
        style = look(kinds.index(re.split("[ ,]", label)[0]))
        if len(seeds) > 1:
            axes.plot(*seeds.sort_values("y")[["x", "y"]].to_numpy().T, markersize=3, linewidth=0.6, alpha=0.6, **style)
        axes.plot(*means.loc[label], markersize=7, label=label, **style)
    if not wide(points["x"]):
        axes.set_xlim(0, None)
    for direction, base in (("x", 2), ("y", 10)):
        if wide(points[direction]):
            logarithmic(axes, direction, base=base)
    name_ends(page)
    return page


def read_curves(saved: SavedRecord) -> dict[str, list[tuple[int, float]]]:
    """The logged metrics of a run as (update, value) pairs, from all parts of a resumed run, or of a packed record.

    Of an update that was done again after a kill, the last value is taken.
    """
    packed = saved.record.get("curves", {})
    curves: dict[str, dict[int, float]] = {name: dict(packed[name]) for name in packed}
    paths = saved.path.parent.glob("curves*/metrics.csv") if saved.path.name == RECORD and not curves else ()
    for path in sorted(paths, key=lambda p: (len(str(p)), str(p))):
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and name not in ("step", "epoch"):
                        curves.setdefault(name, {})[int(row["step"])] = float(value)
    return {name: list(points.items()) for name, points in curves.items()}


def together(runs: Sequence[tuple[str, SavedRecord]], of: Sequence[Panel]) -> pd.DataFrame:
    """The table CURVES of several runs, given by label and record."""
    import pandas as pd

    logged = [(label, int(saved.record["seed"]), read_curves(saved)) for label, saved in runs]
    rows = [
        (panel.label, label, seed, update, math.exp(value) if panel.exp else value)
        for panel in of
        for label, seed, curves in logged
        if label.startswith(panel.rows)
        for update, value in curves.get(panel.metric, [])
    ]
    return pd.DataFrame(rows, columns=CURVES)


def draw_together(data: pd.DataFrame, title: str = "") -> Figure:
    """Draw panels of each metric of CURVES with at most eight runs each, the others in grey; a line for each seed."""
    data = data.astype({"update": float, "value": float})
    parts = []
    for metric, rows in data.groupby("panel", sort=False):
        parts += [(metric, rows, runs) for runs in split(rows["run"].unique())]
    page, every = panels(len(parts), 5.6, 3.8)
    for axes, (metric, rows, runs) in zip(every, parts, strict=True):
        for (run, _), line in rows.groupby(["run", "seed"], sort=False):
            points = line.sort_values(["update", "value"])
            style = {"color": COLOURS[runs.index(run)], "label": run} if run in runs else {"color": "0.85", "zorder": 0}
            axes.plot(
                points["update"], points["value"], linewidth=1.1, marker="." if len(line) < FEW else None, **style
            )
        plain(axes, xlabel="update", ylabel=metric)
        if wide(rows["value"]):
            logarithmic(axes, "y")
    page.suptitle(title, fontsize=10)
    name_ends(page)
    return page
