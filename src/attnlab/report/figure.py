"""Figures drawn from tables of numbers that are saved beside them as CSV; curves of one run or of several."""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.run.files import write_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEY = "Data"  # entry of the PNG's text: the SHA-256 of the CSV that it was drawn from
STYLES = ("-", "--", ":", "-.")  # of lines; the next one after every ten colours
POINTS = ["row", "seed", "x", "y"]  # the columns of scatter
SIDES = (  # places for a label: offsets to the right and up, and the alignment of the text; the last is always taken
    (8, 0, "left", "center"), (-8, 0, "right", "center"), (0, 8, "center", "bottom"), (0, -8, "center", "top"),
    (7, 7, "left", "bottom"), (7, -7, "left", "top"), (-7, 7, "right", "bottom"), (-7, -7, "right", "top"),
    (0, 20, "center", "bottom"), (0, -20, "center", "top"), (0, 32, "center", "bottom"), (0, -32, "center", "top"),
    (0, -44, "center", "top"),
)  # fmt: skip
MANY = 16  # labels above which a page is larger
LOGGED = {"loss": ("loss", "val_loss", "ctc_loss"), "accuracy": ("val_accuracy",), "learning rate": ("lr-*",)}
CURVES = ["panel", "run", "seed", "update", "value"]
FEW = 10  # points below which each is marked: a single point has no line


@dataclass(frozen=True)
class Plot:
    """A point for each row and seed.

    Args:
        x, y: dotted keys of the records.
        name: the end of its files' names.
        frontier: "max" or "min", the better values of y. A line joins the rows that no row with as small an x
            surpasses. Empty: no line.
    """

    x: str
    y: str
    x_label: str
    y_label: str
    log_x: bool = False
    name: str = "points"
    frontier: str = ""


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
    """Write `stem`.csv, and `stem`.png unless it was drawn from the same CSV. Without rows write nothing.

    Pixels of a figure depend on the version of matplotlib and on fonts; the CSV does not.
    """
    if data.empty:
        return []
    text = data.to_csv(index=False, lineterminator="\n").encode()
    digest = hashlib.sha256(text).hexdigest()
    table, picture = stem.with_name(f"{stem.name}.csv"), stem.with_name(f"{stem.name}.png")
    write_bytes(table, text)
    if drawn_from(picture) != digest:
        write_bytes(picture, png(draw(data), digest))
    return [table, picture]


def drawn_from(picture: Path) -> str | None:
    """The SHA-256 of the CSV that a PNG was drawn from; None if the file is missing or names no CSV."""
    from PIL import Image

    try:
        with Image.open(picture) as image:
            return image.info.get(KEY)
    except OSError:  # also raised for a file that is not a picture
        return None


def png(figure: Figure, digest: str = "") -> bytes:
    """A figure as PNG. It stores `digest`, the SHA-256 of its data, unless that is empty."""
    file = io.BytesIO()
    figure.savefig(file, dpi=150, format="png", metadata={KEY: digest} if digest else None)
    return file.getvalue()


def panels(rows: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Figure, list[list[Axes]]]:
    """A page with a grid of panels; `size` in inches."""
    from matplotlib.figure import Figure

    page = Figure(figsize=size, layout="constrained")
    return page, page.subplots(rows, columns, squeeze=False, **more).tolist()


def plain(axes: Axes, **labels: Any) -> None:
    """Set the labels of a panel, draw a faint grid, and leave out the upper and the right border."""
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def lines(
    axes: Axes, data: pd.DataFrame, by: str, names: Sequence[str], x: str, y: str, ends: Sequence[str] = (), **more: Any
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
        axes.errorbar(xs, ys, [abs(ys - end) for end in bars] or None, color=f"C{number % 10}", marker="o", capsize=2,
                      linestyle=STYLES[number // 10 % len(STYLES)], label=name, **{"markersize": 5} | more)  # fmt: skip


def name_below(page: Figure) -> None:
    """Put a legend with each label once below the panels. The page grows by the rows of the legend."""
    handles: dict[str, Artist] = {}
    for axes in page.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(label), handle)
    width = 0.6 + 0.065 * max(map(len, handles))  # inches of one name at 8 points, with its line
    columns = max(1, min(len(handles), int(page.get_figwidth() / width)))
    page.set_figheight(page.get_figheight() + 0.2 * -(-len(handles) // columns))
    page.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )


def scatter(points: pd.DataFrame, plot: Plot, title: str = "") -> Figure:
    """Draw a labelled point at the mean of each row's seeds, and a small dot for each seed. `points`: POINTS."""
    from matplotlib.ticker import ScalarFormatter

    page, [[axes]] = panels(1, 1, (6.4, 3.6))
    plain(axes, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.set_title(title, fontsize=10)
    axes.margins(0.12)
    if plot.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
    points = points.astype({"x": float, "y": float})
    rows = points.groupby("row", sort=False)
    means = rows[["x", "y"]].mean()
    if len(means) > MANY:
        page.set_size_inches(10, 6.5)
    for number, (label, seeds) in enumerate(rows):
        if len(seeds) > 1:
            axes.plot(seeds["x"], seeds["y"], "o", markersize=3, color=f"C{number}", alpha=0.6)
        axes.plot(*means.loc[label], "o", markersize=7, color=f"C{number}")
    if plot.frontier:
        best = frontier(means, plot.frontier)
        axes.plot(best["x"], best["y"], color="gray", linewidth=1, linestyle="--", zorder=0, drawstyle="steps-post")
    if not plot.log_x:
        axes.set_xlim(0, None)  # after the points: from here on the limits stay as they are
    _place_labels(page, list(means.itertuples(name=None)))
    return page


def frontier(points: pd.DataFrame, better: str) -> pd.DataFrame:
    """The points (x, y) that no other surpasses at as small an x (Pareto). `better`: "max" or "min", the better y."""
    ordered = points.sort_values(["x", "y"], ascending=[True, better == "min"])
    y = ordered["y"] * (1 if better == "max" else -1)
    return ordered[y > y.cummax().shift(fill_value=-math.inf)]


def _place_labels(page: Figure, points: Sequence[tuple[str, float, float]]) -> None:
    """Write each label beside its point (label, x, y), on the first side on which it covers no point or label."""
    from matplotlib.transforms import Bbox

    (axes,) = page.axes
    page.draw_without_rendering()  # the layout decides where the points are
    dot = 6 * page.dpi / 72  # half the side of the square around a point, with room for the line of its circle
    centres = axes.transData.transform([(x, y) for _, x, y in points])
    taken = [Bbox.from_bounds(x - dot, y - dot, 2 * dot, 2 * dot) for x, y in centres]
    for label, x, y in points:
        for right, up, horizontal, vertical in SIDES:
            text = axes.annotate(
                label, (x, y), textcoords="offset points", xytext=(right, up), fontsize=9, ha=horizontal, va=vertical
            )
            box = text.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            if (inside and not box.count_overlaps(taken)) or (right, up, horizontal, vertical) == SIDES[-1]:
                taken.append(box)
                break
            text.remove()


def read_curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The logged metrics of a run directory as (update, value) pairs, from all parts of a resumed run."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(directory.glob("curves*/metrics.csv"), key=lambda p: (len(str(p)), str(p))):
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and name not in ("step", "epoch"):
                        curves.setdefault(name, []).append((int(row["step"]), float(value)))
    return curves


def plot_curves(directory: Path) -> Path | None:
    """Write curves.png into a run directory; None if nothing was logged. Pandas, slow to import, is not needed."""
    rows = [
        (title, name, 0, *point)
        for title, patterns in LOGGED.items()
        for name, curve in read_curves(directory).items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        for point in curve
    ]
    if not rows:
        return None
    path = directory / "curves.png"
    write_bytes(path, png(draw_rows(rows)))
    return path


def together(runs: Sequence[tuple[str, int, Path]], of: Sequence[Panel]) -> pd.DataFrame:
    """The table CURVES of several runs, given by label, seed and run directory."""
    import pandas as pd

    logged = {directory: read_curves(directory) for _, _, directory in runs}
    rows = [
        (panel.label, label, seed, update, math.exp(value) if panel.exp else value)
        for panel in of
        for label, seed, directory in runs
        if label.startswith(panel.rows)
        for update, value in logged[directory].get(panel.metric, [])
    ]
    return pd.DataFrame(rows, columns=CURVES)


def draw_together(data: pd.DataFrame, title: str = "") -> Figure:
    """Draw the table CURVES by :func:`draw_rows`."""
    return draw_rows(list(data[CURVES].itertuples(index=False, name=None)), title)


def draw_rows(rows: Sequence[tuple[Any, ...]], title: str = "") -> Figure:
    """Draw a panel for each metric of CURVES, a line for each run and seed, a colour for each run, and names below."""
    lines: dict[Any, dict[Any, list[tuple[float, float]]]] = {}  # by panel; by run and seed
    for panel, run, seed, update, value in rows:
        lines.setdefault(panel, {}).setdefault((run, seed), []).append((float(update), float(value)))
    runs = list(dict.fromkeys(row[1] for row in rows))
    page, [row] = panels(1, len(lines), (1 + 4.4 * len(lines), 4))
    for axes, (name, curves) in zip(row, lines.items(), strict=True):
        for (run, _), points in curves.items():
            number = runs.index(run)
            style = STYLES[number // 10 % len(STYLES)]
            axes.plot(*zip(*sorted(points), strict=True), style, color=f"C{number % 10}", linewidth=1.1, label=run,
                      marker="." if len(points) < FEW else None)  # fmt: skip
        plain(axes, xlabel="update", ylabel=name)
    page.suptitle(title, fontsize=10)
    name_below(page)
    return page
