"""The curves of training runs, from their logged metrics: those of one run, or of several on one axis."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.report import figure
from attnlab.report.grid import Grid
from attnlab.report.spec import Panel
from attnlab.runs.files import write_bytes

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


COMPARED = {"loss": "training loss", "val_loss": "validation loss"}


def together(runs: Mapping[str, Path]) -> Grid:
    """The losses of several runs, as the data of :func:`draw_together`.

    Args:
        runs: run directories by the labels of their lines; those that logged no loss are left out.
    """
    grid = Grid("", ["run", "metric", "update", "value"])
    for label, directory in runs.items():
        curves = read_curves(directory)
        for name in COMPARED:
            grid.rows += [[label, name, str(step), repr(value)] for step, value in curves.get(name, [])]
    return grid


def draw_together(data: Grid) -> "Figure":
    """A panel for each loss, with a line for each run in the same colour in all panels, and one legend.

    Args:
        data: see :func:`together`.
    """
    from matplotlib.figure import Figure

    names = [name for name in COMPARED if any(row[1] == name for row in data.rows)]
    labels = list(dict.fromkeys(row[0] for row in data.rows))
    rows = -(-len(labels) // 2)  # of the legend, below the panels
    picture = Figure(figsize=(5.5 * len(names), 3.6 + 0.22 * rows), layout="constrained")
    axes = picture.subplots(1, len(names), squeeze=False)[0]
    for axis, name in zip(axes, names, strict=True):
        for number, label in enumerate(labels):
            points = [(int(row[2]), float(row[3])) for row in data.rows if row[:2] == [label, name]]
            style = ("-", "--", ":", "-.")[number // 10 % 4]  # there are ten colours
            axis.plot(*zip(*points, strict=True) if points else ([], []), style, color=f"C{number % 10}", label=label)
        axis.set(xlabel="update", ylabel=COMPARED[name])
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return picture


def several(title: str, runs: Sequence[tuple[str, int, Path]], panels: Sequence[Panel]) -> Grid:
    """The data of :func:`several_plot`: a row for each point; none of runs that have no curves.

    Args:
        title: of the figure.
        runs: label, seed and run directory of each.
        panels: the metrics.
    """
    grid = Grid(title, ["panel", "run", "seed", "update", "value"])
    for panel in panels:
        for label, seed, directory in (run for run in runs if run[0].startswith(panel.rows)):
            for update, value in read_curves(directory).get(panel.metric, []):
                drawn = math.exp(value) if panel.exp else value
                grid.rows.append([panel.label, label, str(seed), str(update), repr(drawn)])
    return grid


def several_plot(points: Grid) -> "Figure":
    """A panel for each metric and a line for each run, of one colour for all its seeds; the names stand below.

    Args:
        points: as :func:`several` gives them.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row[0] for row in points.rows))
    runs = list(dict.fromkeys(row[1] for row in points.rows))
    picture = Figure(figsize=(1 + 4.4 * len(names), 4.2), layout="constrained")
    panels = picture.subplots(1, len(names), squeeze=False)[0]
    named: set[str] = set()
    for axes, name in zip(panels, names, strict=True):
        lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for _, run, seed, update, value in (row for row in points.rows if row[0] == name):
            lines.setdefault((run, seed), []).append((int(update), float(value)))
        for (run, _), line in lines.items():
            label = None if run in named else run  # once, in the first panel that has the run
            named.add(run)
            axes.plot(*zip(*sorted(line), strict=True), color=f"C{runs.index(run)}", linewidth=1.1, label=label)
        axes.set(xlabel="update", ylabel=name)
        axes.grid(alpha=0.3)
    picture.suptitle(points.title, fontsize=10)
    wide = 0.5 + 0.065 * max(map(len, runs))  # inches of one name at 8 points, with its line
    ncols = max(1, min(len(runs), int(picture.get_figwidth() / wide)))
    picture.legend(loc="outside lower center", ncols=ncols, frameon=False, fontsize=8)
    return picture
