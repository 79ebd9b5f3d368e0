"""Records of compressed language models: a table, and a plot of accuracy over the kept share of the matrices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from attnlab.errors import DataError
from attnlab.report import figure
from attnlab.report.grid import Grid
from attnlab.runs.record import NOT_RUN
from attnlab.runs.store import Found

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADERS = ["Record", "Questions", "Method", "Kept", "Seed", "Rate", "Model saved, %"]
HEADERS += ["Accuracy dense", "compressed", "Loss dense", "compressed", "Perplexity dense", "compressed"]
DENSE = "dense"


def is_one(found: Found) -> bool:
    """Whether a record is of a language model that was asked."""
    return found.record["task"] == "reasoning" and isinstance(found.record.get("compression"), dict)


def render(records: Sequence[Found], directory: Path) -> list[Path]:
    """Write the table sweep.{md,csv,tex}, and accuracy.{csv,png} for the records with `compress.keep`.

    Args:
        records: records of task=reasoning with mode=compress.
        directory: where to write.

    Returns:
        The paths written.

    Raises:
        DataError: no record has a compressed model.
    """
    found = [one for one in records if one.record["status"] == "finished" and is_one(one) and _rate(one)]
    if not found:
        raise DataError("no finished record of a compressed language model among those given")
    paths = sweep_table(found).write(directory / "sweep", "md", "csv", "tex")
    points = accuracy_points(found)
    return paths + (figure.write(directory / "accuracy", points, accuracy_plot) if points.rows else [])


def sweep_table(found: Sequence[Found]) -> Grid:
    grid = Grid("Compressed language models: accuracy, loss and perplexity", HEADERS)
    order = sorted(found, key=lambda one: (_questions(one), _method(one), -(_keep(one) or 0), one.record["seed"]))
    for i, one in enumerate(order, 1):
        record, rate = one.record, _rate(one)
        keep = _keep(one)
        cells = [f"R{i}", _questions(one), _method(one), "" if keep is None else f"{keep:g}", str(record["seed"])]
        cells += [f"{rate['rate']:.2f}", f"{rate['model_saving_percent']:.1f}"]
        for key, digits in (("accuracy", 1), ("loss", 3), ("perplexity", 2)):
            cells += [_number(one, point, key, digits) for point in ("dense", "compressed")]
        grid.rows.append(cells)
        device, git = (record["environment"][key] for key in ("device", "git"))
        grid.notes.append(f"R{i}: `{record['command']}`; {record['corpus']}; {device}, git {git}")
    grid.notes.insert(0, "Kept: compress.keep, the share of the parameters of the matrices that the method compresses.")
    grid.notes.insert(1, "Rate: parameters of the dense matrices by those that replace them; 1 where dense ones do.")
    grid.notes.insert(2, "Accuracy, on the test split: ± its standard error over the questions, in percent.")
    return grid


def accuracy_points(found: Sequence[Found]) -> Grid:
    """The data of :func:`accuracy_plot`: mean and standard deviation over the seeds."""
    headers = ["questions", "method", "kept", "seeds", "accuracy, %", "standard deviation"]
    grid = Grid("Accuracy over the kept share", headers)
    values: dict[tuple[str, str, float], list[float]] = {}
    dense: dict[str, dict[int, float]] = {}
    for one in found:
        if (keep := _keep(one)) is None:
            continue
        quality = one.record["compression"]["quality"]
        values.setdefault((_questions(one), _method(one), keep), []).append(quality["compressed"]["accuracy"])
        dense.setdefault(_questions(one), {})[one.record["seed"]] = quality["dense"]["accuracy"]
    for (questions, method, keep), each in sorted(values.items()):
        grid.rows.append([questions, method, f"{keep:g}", str(len(each)), *_spread(each)])
    for questions, seeds in sorted(dense.items()):
        grid.rows.append([questions, DENSE, "1", str(len(seeds)), *_spread(list(seeds.values()))])
    return grid


def accuracy_plot(points: Grid) -> Figure:
    """Accuracy over the kept share, a panel for each set of questions and a line for each method."""
    from matplotlib.figure import Figure

    sets = sorted({row[0] for row in points.rows})
    page = Figure(figsize=(1 + 4.5 * len(sets), 4), layout="constrained")
    panels = page.subplots(1, len(sets), squeeze=False)[0]
    for axes, name in zip(panels, sets, strict=True):
        rows = [row for row in points.rows if row[0] == name]
        for method in sorted({row[1] for row in rows} - {DENSE}):
            line = sorted((float(row[2]), float(row[4]), float(row[5])) for row in rows if row[1] == method)
            axes.errorbar(*zip(*[(x, y) for x, y, _ in line], strict=True), yerr=[s for *_, s in line], marker="o",
                          capsize=2, label=method)  # fmt: skip
        for row in rows:
            if row[1] == DENSE:
                axes.axhline(float(row[4]), color="grey", linewidth=0.8, linestyle="--", label="dense")
        axes.set(title=name, xlabel="kept share of the compressed matrices", ylabel="accuracy, %")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return page


def _spread(each: list[float]) -> list[str]:
    return [f"{mean(each):.3f}", f"{stdev(each) if len(each) > 1 else 0:.3f}"]


def _questions(one: Found) -> str:
    return str(one.record["config"]["task"]["questions"])


def _method(one: Found) -> str:
    return str(one.record["compress"])


def _keep(one: Found) -> float | None:
    keep = (one.record["config"].get("compress") or {}).get("keep")
    return float(keep) if isinstance(keep, int | float) else None


def _rate(one: Found) -> dict[str, Any]:
    found: dict[str, Any] = one.record["compression"].get("rate") or {}
    return found


def _number(one: Found, point: str, key: str, digits: int) -> str:
    quality = one.record["compression"]["quality"].get(point)
    if not isinstance(quality, dict) or key not in quality:
        return NOT_RUN
    error = f" ± {quality[f'{key}_stderr']:.{digits}f}" if f"{key}_stderr" in quality else ""
    return f"{quality[key]:.{digits}f}{error}"
