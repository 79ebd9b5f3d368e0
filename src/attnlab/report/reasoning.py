"""Records of compressed language models: a table, and a plot of accuracy over the compression rate."""

from __future__ import annotations

import shlex
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

KEYS = ("accuracy", "loss", "perplexity")
POINTS = ("dense", "compressed")
GROUP = ["Model", "Questions", "Method", "Kept", "Settings"]
NAMED = ("seed", "model", "compress", "compress.keep", "task.questions", "task.model.sample", "data_root", "cache_dir")
NUMBERS = ["Rate", "Model saved, %"]
NUMBERS += ["Accuracy dense", "compressed", "Loss dense", "compressed", "Perplexity dense", "compressed"]
DIGITS = (2, 1, 1, 1, 3, 3, 2, 2)  # of NUMBERS
DENSE = "dense"


def is_one(found: Found) -> bool:
    """Whether a record is of a language model that was asked, however it has ended.

    Args:
        found: the record.
    """
    return bool(found.record["task"] == "reasoning")


def render(records: Sequence[Found], directory: Path) -> list[Path]:
    """Write the table sweep.{md,csv,tex}, runs.csv, and accuracy.{csv,png} for the records with `compress.keep`.

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
    paths += runs_table(found).write(directory / "runs", "csv")
    points = accuracy_points(found)
    return paths + (figure.write(directory / "accuracy", points, accuracy_plot) if points.rows else [])


def sweep_table(found: Sequence[Found]) -> Grid:
    """A row for each model, question set, method, kept share and other settings: means over the seeds.

    Args:
        found: records of task=reasoning.
    """
    grid = Grid("Compressed language models: accuracy, loss and perplexity", [*GROUP, "Seeds", *NUMBERS])
    for (model, questions, method, keep, settings), members in _grouped(found):
        cells = [model, questions, method, "" if keep is None else f"{keep:g}", settings, str(len(members))]
        columns = zip(*map(_values, members), strict=True)
        errors = _errors(members[0]) if len(members) == 1 else [None] * len(NUMBERS)
        for column, digits, error in zip(columns, DIGITS, errors, strict=True):
            cells.append(_cell([value for value in column if value is not None], digits, error))
        grid.rows.append(cells)
    grid.notes += [
        "Kept: compress.keep, the share of the parameters of the matrices that the method compresses.",
        "Rate: parameters of the dense matrices that were replaced by those of their factors; matrices that the budget "
        "left dense do not count. Model saved: of all parameters, embeddings included.",
        "Accuracy in percent, loss in nats per token of the answer, both on the test split. Mean ± standard deviation "
        "over the seeds; of one seed the standard error over the questions. Of two runs of one seed the later counts.",
        "Settings: what the commands of runs with the same model, questions, method and share differ in.",
        "Each run with its command, device and revision: runs.csv.",
    ]
    return grid


def runs_table(found: Sequence[Found]) -> Grid:
    """A row for each record.

    Args:
        found: records of task=reasoning.
    """
    last = ["Corpus", "Device", "Git", "Command"]
    grid = Grid("Runs", [*GROUP, "Seed", *NUMBERS, *last])
    for (model, questions, method, keep, settings), members in _grouped(found):
        for one in members:
            record = one.record
            cells = [model, questions, method, "" if keep is None else f"{keep:g}", settings, str(record["seed"])]
            cells += [NOT_RUN if value is None else f"{value:.5g}" for value in _values(one)]
            cells += [record["corpus"], *(str(record["environment"][key]) for key in ("device", "git"))]
            grid.rows.append([*cells, record["command"]])
    return grid


def accuracy_points(found: Sequence[Found]) -> Grid:
    """The data of :func:`accuracy_plot`: mean and standard deviation over the seeds.

    Args:
        found: records of task=reasoning.
    """
    headers = ["model", "questions", "method", "kept", "seeds", "accuracy, %", "standard deviation"]
    grid = Grid("Accuracy over the compression rate", headers)
    dense: dict[tuple[str, str], dict[int, float]] = {}
    for (model, questions, name, keep, settings), members in _grouped(found):
        if keep is None:
            continue
        method = f"{name} {settings}".rstrip()
        qualities = {one.record["seed"]: one.record["compression"]["quality"] for one in members}
        each = [quality["compressed"]["accuracy"] for quality in qualities.values()]
        grid.rows.append([model, questions, method, f"{keep:g}", str(len(each)), *_spread(each)])
        seeds = dense.setdefault((model, questions), {})
        seeds |= {seed: quality["dense"]["accuracy"] for seed, quality in qualities.items()}
    for (model, questions), seeds in sorted(dense.items()):
        grid.rows.append([model, questions, DENSE, "1", str(len(seeds)), *_spread(list(seeds.values()))])
    return grid


def accuracy_plot(points: Grid) -> Figure:
    """Accuracy over the compression rate, a panel for each model and set of questions and a line for each method.

    Args:
        points: as :func:`accuracy_points` gives them.
    """
    from matplotlib.figure import Figure

    models, sets, methods = (sorted({row[i] for row in points.rows}) for i in range(3))
    page = Figure(figsize=(1 + 4.2 * len(sets), 0.6 + 3.4 * len(models)), layout="constrained")
    panels = page.subplots(len(models), len(sets), squeeze=False)
    for axes, (model, name) in zip(panels.flat, [(model, name) for model in models for name in sets], strict=True):
        rows = [row for row in points.rows if row[:2] == [model, name]]
        for i, method in enumerate(one for one in methods if one != DENSE):
            line = sorted((1 / float(row[3]), float(row[5]), float(row[6])) for row in rows if row[2] == method)
            if line:
                axes.errorbar(*zip(*[(x, y) for x, y, _ in line], strict=True), yerr=[s for *_, s in line], marker="o",
                              capsize=2, label=method, color=f"C{i}")  # fmt: skip
        for row in rows:
            if row[2] == DENSE:
                axes.axhline(float(row[5]), color="grey", linewidth=0.8, linestyle="--", label=DENSE)
        axes.set(title=f"{model}, {name}", xlabel="compression rate, 1 / compress.keep", ylabel="accuracy, %")
        axes.grid(alpha=0.3)
        if rows:
            axes.legend(fontsize=8)
    return page


Group = tuple[str, str, str, float | None, str]


def _grouped(found: Sequence[Found]) -> list[tuple[Group, list[Found]]]:
    """Records by GROUP, one of each seed, in the order of the seeds.

    Runs of one recipe and corpus belong together. A sample world follows from its seed: all count as one corpus.
    """
    alike: dict[tuple[str, str, str, float | None], dict[tuple[str, str], dict[int, Found]]] = {}
    for one in sorted(found, key=lambda one: str(one.record["started"])):
        about, corpus = one.record["identity"], one.record["config"]["data_root"]
        recipe = about["recipe"], "" if corpus is None else about["corpus"]
        groups = alike.setdefault((_model(one), _questions(one), _method(one), _keep(one)), {})
        groups.setdefault(recipe, {})[int(one.record["seed"])] = one
    rows: list[tuple[Group, list[Found]]] = []
    for shown, groups in alike.items():
        common = set.intersection(*(_settings(one) for seeds in groups.values() for one in seeds.values()))
        for seeds in groups.values():
            members = [seeds[seed] for seed in sorted(seeds)]
            rows.append(((*shown, " ".join(sorted(_settings(members[0]) - common))), members))
    return sorted(rows, key=lambda row: (row[0][:3], -(row[0][3] or 0), row[0][4]))


def _settings(one: Found) -> set[str]:
    """The settings of a record's command, but for those that have a column."""
    given = [text.lstrip("+") for text in shlex.split(one.record["command"]) if "=" in text]
    return {text for text in given if text.partition("=")[0] not in NAMED and not text.startswith("hydra.")}


def _values(one: Found) -> list[float | None]:
    """The numbers of a record, in the order of NUMBERS; None: not measured."""
    rate, quality = _rate(one), one.record["compression"]["quality"]
    points = [quality[point] if isinstance(quality.get(point), dict) else {} for point in POINTS]
    return [rate["rate"], rate["model_saving_percent"], *(point.get(key) for key in KEYS for point in points)]


def _errors(one: Found) -> list[float | None]:
    """Standard errors of a record's numbers over its questions; None: it has none."""
    quality = one.record["compression"]["quality"]
    points = [quality[point] if isinstance(quality.get(point), dict) else {} for point in POINTS]
    return [None, None, *(point.get(f"{key}_stderr") for key in KEYS for point in points)]


def _cell(values: Sequence[float], digits: int, error: float | None) -> str:
    if not values:
        return NOT_RUN
    spread = stdev(values) if len(values) > 1 else error
    return f"{mean(values):.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def _spread(each: list[float]) -> list[str]:
    return [f"{mean(each):.3f}", f"{stdev(each) if len(each) > 1 else 0:.3f}"]


def _model(one: Found) -> str:
    """The value of `model=`, or the sample model."""
    config = one.record["config"]
    return str(config["model"] or f"sample {config['task']['model']['sample']}")


def _questions(one: Found) -> str:
    """The question set, with the folder where it is not of the sample world."""
    config = one.record["config"]
    place = "" if config["data_root"] is None else f" ({Path(config['data_root']).name})"
    return f"{config['task']['questions']}{place}"


def _method(one: Found) -> str:
    return str(one.record["compress"])


def _keep(one: Found) -> float | None:
    keep = (one.record["config"].get("compress") or {}).get("keep")
    return float(keep) if isinstance(keep, int | float) else None


def _rate(one: Found) -> dict[str, Any]:
    about = one.record.get("compression")
    found: dict[str, Any] = about.get("rate") or {} if isinstance(about, dict) else {}
    return found
