"""The curves of training runs, from their logged metrics: those of one run, or of several on one axis."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.report import figure
from attnlab.report.grid import Grid
from attnlab.report.points import STYLES, name_below
from attnlab.report.spec import Panel
from attnlab.run.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {  # a name that ends in a hyphen: every metric that begins with it
    "loss": ("loss", "val_loss", "ctc_loss"),
    "accuracy": ("val_accuracy",),
    "learning rate": ("lr-",),
}
FEW = 10  # points: they are marked, since one alone has no line


def read_curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The logged metrics of a run, over all its parts where it was resumed.

    Args:
        directory: the run directory.

    Returns:
        For each metric its (update, value) pairs.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(directory.glob("curves*/metrics.csv"), key=lambda p: (len(str(p)), str(p))):
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and name not in ("step", "epoch"):
                        curves.setdefault(name, []).append((int(row["step"]), float(value)))
    return curves


def _is_one(name: str, names: tuple[str, ...]) -> bool:
    """Whether a metric is one of `names`, or begins with one that ends in a hyphen: lr-AdamW."""
    return any(name == one or (one.endswith("-") and name.startswith(one)) for one in names)


def plot_curves(directory: Path) -> Path | None:
    """Write curves.png into a run directory; its path, or None where nothing was logged.

    Args:
        directory: the run's, with the curves as CSV.
    """
    from matplotlib.figure import Figure

    curves = read_curves(directory)
    panels = {title: [n for n in curves if _is_one(n, names)] for title, names in PANELS.items()}
    panels = {title: names for title, names in panels.items() if names}
    if not panels:
        return None
    picture = Figure(figsize=(4.5 * len(panels), 3.2), layout="constrained")
    axes = picture.subplots(1, len(panels), squeeze=False)
    for axis, (title, names) in zip(axes[0], panels.items(), strict=True):
        for name in names:
            axis.plot(
                *zip(*curves[name], strict=True),
                label=name,
                linewidth=1.2,
                marker="." if len(curves[name]) < FEW else None,
            )
        axis.set(title=title, xlabel="update")
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    path = directory / "curves.png"
    write_bytes(path, figure.png(picture))
    return path


LOSSES = (Panel("loss", "training loss"), Panel("val_loss", "validation loss"))


def together(title: str, runs: Sequence[tuple[str, int, Path]], panels: Sequence[Panel] = LOSSES) -> Grid:
    """The data of :func:`draw_together`: a row for each point; none of runs that have no curves.

    Args:
        title: of the figure.
        runs: label, seed and run directory of each.
        panels: the metrics.
    """
    grid = Grid(title, ["panel", "run", "seed", "update", "value"])
    logged = {directory: read_curves(directory) for _, _, directory in runs}
    for panel in panels:
        for label, seed, directory in (run for run in runs if run[0].startswith(panel.rows)):
            for update, value in logged[directory].get(panel.metric, []):
                drawn = math.exp(value) if panel.exp else value
                grid.rows.append([panel.label, label, str(seed), str(update), repr(drawn)])
    return grid


def draw_together(data: Grid) -> "Figure":
    """A panel for each metric and a line for each run, of one colour for all its seeds; the names stand below.

    Args:
        data: as :func:`together` gives them.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row[0] for row in data.rows))
    runs = list(dict.fromkeys(row[1] for row in data.rows))
    picture = Figure(figsize=(1 + 4.4 * len(names), 4), layout="constrained")
    panels = picture.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for _, run, seed, update, value in (row for row in data.rows if row[0] == name):
            lines.setdefault((run, seed), []).append((int(update), float(value)))
        for (run, _), line in lines.items():
            number = runs.index(run)
            style = STYLES[number // 10 % len(STYLES)]
            axes.plot(*zip(*sorted(line), strict=True), style, color=f"C{number % 10}", linewidth=1.1, label=run,
                      marker="." if len(line) < FEW else None)  # fmt: skip
        axes.set(xlabel="update", ylabel=name)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if data.title:
        picture.suptitle(data.title, fontsize=10)
    name_below(picture, runs)
    return picture
