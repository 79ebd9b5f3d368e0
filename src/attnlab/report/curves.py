"""The curves of a training run, from its logged metrics."""

import csv
from pathlib import Path

from attnlab.report import figure
from attnlab.runs.files import write_bytes

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
