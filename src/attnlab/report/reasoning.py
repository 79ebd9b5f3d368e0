"""Records of compressed language models: a table, and a plot of accuracy over the compression rate."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from attnlab.errors import DataError
from attnlab.report import figure
from attnlab.report.grid import Grid
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = ("accuracy", "loss", "perplexity")
POINTS = ("dense", "compressed")
GROUP = ["Model", "Questions", "Method", "Kept", "Settings"]
NAMED = ("seed", "model", "compress", "compress.keep", "task.questions", "task.model.sample", "data_root", "cache_dir")
NUMBERS = ["Rate", "Model saved, %"]
NUMBERS += ["Accuracy dense", "compressed", "Loss dense", "compressed", "Perplexity dense", "compressed"]
DIGITS = (2, 1, 1, 1, 3, 3, 2, 2)  # of NUMBERS
ABOUT = ["Corpus", "Device", "Git", "Command"]
RUN = [*GROUP, "Seed", *NUMBERS, *ABOUT]
DENSE = "dense"


Group = tuple[str, str, str, float | None, str]


@dataclass(frozen=True)
class Run:
    """What the table shows of a run; a line of runs.csv.

    Args:
        group: model, questions, method, kept share of the parameters (None: the budget is none) and other settings.
        seed: of the run.
        values: in the order of NUMBERS; None: not measured.
        about: corpus, device, revision and command.
        errors: standard errors of the values over the questions; None: there is none. Not in runs.csv.
    """

    group: Group
    seed: int
    values: tuple[float | None, ...]
    about: tuple[str, ...]
    errors: tuple[float | None, ...] = (None,) * len(NUMBERS)


def is_one(found: SavedRecord) -> bool:
    """Whether a record is of a language model that was asked, however it has ended.

    Args:
        found: the record.
    """
    return bool(found.record["task"] == "reasoning")


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write what :func:`write` does, for records.

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
    return write(runs_of(found), directory)


def write(runs: Sequence[Run], directory: Path) -> list[Path]:
    """Write the table sweep.{md,csv,tex}, runs.csv, and accuracy.{csv,png} for the runs with `compress.keep`.

    Args:
        runs: those of a row one after the other, as :func:`runs_of` and :func:`read_runs` give them.
        directory: where to write.

    Returns:
        The paths written.
    """
    paths = sweep_table(runs).write(directory / "sweep", "md", "csv", "tex")
    paths += runs_table(runs).write(directory / "runs", "csv")
    points = accuracy_points(runs)
    return paths + (figure.write(directory / "accuracy", points, accuracy_plot) if points.rows else [])


def read_runs(path: Path) -> list[Run]:
    """The lines of a file that :func:`render` has written.

    Args:
        path: runs.csv.

    Raises:
        DataError: it is something else.
    """
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    if header != RUN:
        raise DataError(f"{path}: line 1: expected the columns {', '.join(RUN)}")
    runs = []
    for number, line in enumerate(lines, 2):
        try:
            model, questions, method, keep, settings, seed, *rest = line
            values = tuple(None if text == NOT_RUN else float(text) for text in rest[: len(NUMBERS)])
            group = (model, questions, method, float(keep) if keep else None, settings)
            runs.append(Run(group, int(seed), values, tuple(rest[len(NUMBERS) :])))
        except ValueError as error:
            raise DataError(f"{path}: line {number}: {error}") from error
    return runs


def sweep_table(runs: Sequence[Run]) -> Grid:
    """A row for each model, question set, method, kept share and other settings: means over the seeds.

    Args:
        runs: as for :func:`write`.
    """
    grid = Grid("Compressed language models: accuracy, loss and perplexity", [*GROUP, "Seeds", *NUMBERS])
    for group, members in _grouped(runs):
        cells = [*_shown(group), str(len(members))]
        columns = zip(*(one.values for one in members), strict=True)
        errors = members[0].errors if len(members) == 1 else [None] * len(NUMBERS)
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


def runs_table(runs: Sequence[Run]) -> Grid:
    """A row for each run.

    Args:
        runs: as for :func:`write`.
    """
    grid = Grid("Runs", RUN)
    for one in runs:
        values = [NOT_RUN if value is None else f"{value:.5g}" for value in one.values]
        grid.rows.append([*_shown(one.group), str(one.seed), *values, *one.about])
    return grid


def accuracy_points(runs: Sequence[Run]) -> Grid:
    """The data of :func:`accuracy_plot`: mean and standard deviation over the seeds.

    Args:
        runs: as for :func:`write`.
    """
    headers = ["model", "questions", "method", "kept", "seeds", "accuracy, %", "standard deviation"]
    grid = Grid("Accuracy over the compression rate", headers)
    dense: dict[tuple[str, str], dict[int, float]] = {}
    for (model, questions, name, keep, settings), members in _grouped(runs):
        if keep is None:
            continue
        method = f"{name} {settings}".rstrip()
        each = [_accuracy(one, "compressed") for one in members]
        grid.rows.append([model, questions, method, f"{keep:g}", str(len(each)), *_spread(each)])
        seeds = dense.setdefault((model, questions), {})
        seeds |= {one.seed: _accuracy(one, DENSE) for one in members}
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


def runs_of(found: Sequence[SavedRecord]) -> list[Run]:
    """What the table shows of records, one of each seed: those of a row one after the other, in the order of the seeds.

    Records of one recipe and corpus belong together. A sample world follows from its seed: all count as one corpus.

    Args:
        found: finished records of compressed language models.
    """
    alike: dict[tuple[str, str, str, float | None], dict[tuple[str, str], dict[int, SavedRecord]]] = {}
    for one in sorted(found, key=lambda one: str(one.record["started"])):
        about, corpus = one.record["identity"], one.record["config"]["data_root"]
        recipe = about["recipe"], "" if corpus is None else about["corpus"]
        groups = alike.setdefault((_model(one), _questions(one), _method(one), _keep(one)), {})
        groups.setdefault(recipe, {})[int(one.record["seed"])] = one
    rows: list[tuple[Group, list[SavedRecord]]] = []
    for shown, groups in alike.items():
        common = set.intersection(*(_settings(one) for seeds in groups.values() for one in seeds.values()))
        for seeds in groups.values():
            members = [seeds[seed] for seed in sorted(seeds)]
            rows.append(((*shown, " ".join(sorted(_settings(members[0]) - common))), members))
    rows.sort(key=lambda row: (row[0][:3], -(row[0][3] or 0), row[0][4]))
    return [_run(group, one) for group, members in rows for one in members]


def _run(group: Group, one: SavedRecord) -> Run:
    record, rate = one.record, _rate(one)
    quality = record["compression"]["quality"]
    points = [quality[point] if isinstance(quality.get(point), dict) else {} for point in POINTS]
    values = rate["rate"], rate["model_saving_percent"], *(point.get(key) for key in KEYS for point in points)
    errors = None, None, *(point.get(f"{key}_stderr") for key in KEYS for point in points)
    about = record["corpus"], *(str(record["environment"][key]) for key in ("device", "git")), record["command"]
    return Run(group, int(record["seed"]), values, about, errors)


def _grouped(runs: Sequence[Run]) -> list[tuple[Group, list[Run]]]:
    """Runs by their group, in the order in which they stand. A seed that does not rise begins a row of its own."""
    rows: list[tuple[Group, list[Run]]] = []
    for one in runs:
        if not rows or rows[-1][0] != one.group or one.seed <= rows[-1][1][-1].seed:
            rows.append((one.group, []))
        rows[-1][1].append(one)
    return rows


def _shown(group: Group) -> list[str]:
    """The cells of GROUP."""
    model, questions, method, keep, settings = group
    return [model, questions, method, "" if keep is None else f"{keep:g}", settings]


def _accuracy(one: Run, point: str) -> float:
    value = one.values[2 + POINTS.index(point)]
    assert value is not None
    return value


def _settings(one: SavedRecord) -> set[str]:
    """The settings of a record's command, but for those that have a column."""
    given = [text.lstrip("+") for text in shlex.split(one.record["command"]) if "=" in text]
    return {text for text in given if text.partition("=")[0] not in NAMED and not text.startswith("hydra.")}


def _cell(values: Sequence[float], digits: int, error: float | None) -> str:
    if not values:
        return NOT_RUN
    spread = stdev(values) if len(values) > 1 else error
    return f"{mean(values):.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def _spread(each: list[float]) -> list[str]:
    return [f"{mean(each):.3f}", f"{stdev(each) if len(each) > 1 else 0:.3f}"]


def _model(one: SavedRecord) -> str:
    """The value of `model=`, or the sample model."""
    config = one.record["config"]
    return str(config["model"] or f"sample {config['task']['model']['sample']}")


def _questions(one: SavedRecord) -> str:
    """The question set, with the folder where it is not of the sample world."""
    config = one.record["config"]
    place = "" if config["data_root"] is None else f" ({Path(config['data_root']).name})"
    return f"{config['task']['questions']}{place}"


def _method(one: SavedRecord) -> str:
    return str(one.record["compress"])


def _keep(one: SavedRecord) -> float | None:
    keep = (one.record["config"].get("compress") or {}).get("keep")
    return float(keep) if isinstance(keep, int | float) else None


def _rate(one: SavedRecord) -> dict[str, Any]:
    about = one.record.get("compression")
    found: dict[str, Any] = about.get("rate") or {} if isinstance(about, dict) else {}
    return found
