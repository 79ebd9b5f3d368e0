"""The curves of training runs, from their logged metrics: those of one run, or of several on one axis."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.report import figure
from attnlab.report.spec import Panel
from attnlab.run.files import write_bytes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PANELS = {"loss": ("loss", "val_loss", "ctc_loss"), "accuracy": ("val_accuracy",), "learning rate": ("lr-*",)}
LOSSES = (Panel("loss", "training loss"), Panel("val_loss", "validation loss"))
COLUMNS = ["panel", "run", "seed", "update", "value"]
FEW = 10  # points: they are marked, since one alone has no line


def read_curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The logged metrics of a run directory as (update, value) pairs, over all parts of a resumed run."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(directory.glob("curves*/metrics.csv"), key=lambda p: (len(str(p)), str(p))):
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and name not in ("step", "epoch"):
                        curves.setdefault(name, []).append((int(row["step"]), float(value)))
    return curves


def plot_curves(directory: Path) -> Path | None:
    """Write curves.png into a run directory; None where nothing was logged."""
    curves = read_curves(directory)
    names = {
        title: metrics
        for title, patterns in PANELS.items()
        if (metrics := [name for name in curves if any(fnmatchcase(name, pattern) for pattern in patterns)])
    }
    if not names:
        return None
    page, [row] = figure.panels(1, len(names), (4.5 * len(names), 3.2))
    for axes, (title, metrics) in zip(row, names.items(), strict=True):
        for name in metrics:
            marker = "." if len(curves[name]) < FEW else None
            axes.plot(*zip(*curves[name], strict=True), label=name, linewidth=1.2, marker=marker)
        axes.set(title=title, xlabel="update")
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    path = directory / "curves.png"
    write_bytes(path, figure.png(page))
    return path


def together(runs: Sequence[tuple[str, int, Path]], panels: Sequence[Panel] = LOSSES) -> pd.DataFrame:
    """The curves of several runs: a row for each point, with COLUMNS.

    Args:
        runs: label, seed and run directory of each.
    """
    import pandas as pd

    logged = {directory: read_curves(directory) for _, _, directory in runs}
    rows = [
        (panel.label, label, seed, update, math.exp(value) if panel.exp else value)
        for panel in panels
        for label, seed, directory in runs
        if label.startswith(panel.rows)
        for update, value in logged[directory].get(panel.metric, [])
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def draw_together(data: pd.DataFrame, title: str = "") -> Figure:
    """A panel for each metric and a line for each run, of one colour for all its seeds; the names stand below.

    Args:
        data: as :func:`together` gives it.
    """
    names, runs = list(data["panel"].unique()), list(data["run"].unique())
    page, [row] = figure.panels(1, len(names), (1 + 4.4 * len(names), 4))
    for axes, name in zip(row, names, strict=True):
        for (run, _), line in data[data["panel"] == name].groupby(["run", "seed"], sort=False):
            number = runs.index(run)
            points = line[["update", "value"]].astype(float).sort_values(["update", "value"])
            style = figure.STYLES[number // 10 % len(figure.STYLES)]
            axes.plot(points["update"], points["value"], style, color=f"C{number % 10}", linewidth=1.1, label=run,
                      marker="." if len(line) < FEW else None)  # fmt: skip
        figure.plain(axes, xlabel="update", ylabel=name)
    if title:
        page.suptitle(title, fontsize=10)
    figure.name_below(page)
    return page
