"""Records of compressed language models: a table, and a plot of accuracy over the compression rate."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import pandas as pd

from attnlab.report import figure
from attnlab.report.frame import finished, frame, known, read_runs, spread
from attnlab.report.grid import Grid
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUP = ["Model", "Questions", "Method", "Kept", "Settings"]
COLUMNS = [
    "seed",
    "model",
    "compress",
    "compress.keep",
    "task.questions",
    "task.model.sample",
    "data_root",
    "cache_dir",
]
NUMBERS = {  # column: decimals; those of quality are `KEY POINT`
    "rate": 2, "model saved": 1, "accuracy dense": 1, "accuracy compressed": 1, "loss dense": 3, "loss compressed": 3,
    "perplexity dense": 2, "perplexity compressed": 2,
}  # fmt: skip
HEADERS = ["Rate", "Model saved, %"]
HEADERS += ["Accuracy dense", "compressed", "Loss dense", "compressed", "Perplexity dense", "compressed"]
ABOUT = ["Corpus", "Device", "Git", "Command"]
RUN = [*GROUP, "Seed", *HEADERS, *ABOUT]
DATA = ["model", "questions", "method", "kept", "seeds", "accuracy, %", "standard deviation"]
DENSE = "dense"
NOTES = [
    "Kept: compress.keep, the share of the parameters of the matrices that the method compresses.",
    "Rate: parameters of the dense matrices that were replaced by those of their factors; matrices that the budget "
    "left dense do not count. Model saved: of all parameters, embeddings included.",
    "Accuracy in percent, loss in nats per token of the answer, both on the test split. Mean ± standard deviation "
    "over the seeds; of one seed the standard error over the questions. Of two runs of one seed the later counts.",
    "Settings: what the commands of runs with the same model, questions, method and share differ in.",
    "Each run with its command, device and revision: runs.csv.",
]


def is_one(saved: SavedRecord) -> bool:
    """Whether a record is of a language model that was asked, however the run has ended."""
    return bool(saved.record["task"] == "reasoning")


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write sweep.{md,csv,tex}, runs.csv, and accuracy.{csv,png} of runs with `compress.keep`; return the paths.

    Raises:
        DataError: no record has a compressed model.
    """
    compressed = finished(records, lambda saved: is_one(saved) and _rate(saved), "of a compressed language model")
    return _write(runs_of(compressed), directory)


def render_again(folder: Path, directory: Path) -> list[Path]:
    """Write the same files into `directory` from the runs.csv in `folder`, without standard errors."""
    columns = [*GROUP, "Seed", *NUMBERS, *ABOUT]
    return _write(read_runs(folder / "runs.csv", RUN, columns, ["Kept", "Seed", *NUMBERS]), directory)


def runs_of(records: Sequence[SavedRecord]) -> pd.DataFrame:
    """The runs, one of each seed: those of a row of the table one after the other, in the order of the seeds.

    Records of one recipe and corpus belong together. A sample world follows from its seed: all count as one corpus.
    """
    columns: dict[str, str | Callable[[SavedRecord], Any]] = {
        "Model": _model, "Questions": _questions, "Method": "compress", "Kept": _keep, "Seed": "seed",
        "recipe": "identity.recipe", "corpus": _corpus, "settings": _settings,
        "Corpus": "corpus", "Device": "environment.device", "Git": "environment.git", "Command": "command",
    }  # fmt: skip
    runs = frame(sorted(records, key=lambda saved: str(saved.record["started"])), **columns)
    runs = runs.join(pd.DataFrame(map(_numbers, runs["saved"]), index=runs.index))
    same = [*GROUP[:4], "recipe", "corpus"]
    runs = runs.astype({"Kept": float, "Seed": int}).drop_duplicates([*same, "Seed"], keep="last")
    common = runs.groupby(GROUP[:4], dropna=False)["settings"].transform(
        lambda sets: [set.intersection(*sets)] * len(sets)
    )
    differing = [" ".join(sorted(settings - shared)) for settings, shared in zip(runs["settings"], common, strict=True)]
    runs = runs.assign(Settings=differing, group=runs.groupby(same, dropna=False, sort=False).ngroup())
    runs = runs.sort_values("Seed", kind="stable")
    runs["Settings"] = runs.groupby("group")["Settings"].transform("first")
    order = [*GROUP, "group", "Seed"]
    falls = [column != "Kept" for column in order]
    return runs.sort_values(order, ascending=falls, na_position="last", kind="stable", ignore_index=True)


def _write(runs: pd.DataFrame, directory: Path) -> list[Path]:
    listed = Grid("Runs", RUN)
    for _, run in runs.iterrows():
        numbers = [NOT_RUN if pd.isna(run[column]) else f"{run[column]:.5g}" for column in NUMBERS]
        listed.rows.append([*_group(run[GROUP]), f"{run['Seed']:g}", *numbers, *map(str, run[ABOUT])])
    paths = sweep_table(runs).write(directory / "sweep", "md", "csv", "tex") + listed.write(directory / "runs", "csv")
    return paths + figure.write(directory / "accuracy", accuracy_points(runs), accuracy_plot)


def sweep_table(runs: pd.DataFrame) -> Grid:
    """A row for each model, question set, method, kept share and other settings: means over the seeds."""
    grid = Grid("Compressed language models: accuracy, loss and perplexity", [*GROUP, "Seeds", *HEADERS], notes=NOTES)
    for members in _rows(runs):
        cells = [*_group(members.iloc[0][GROUP]), str(len(members))]
        for column, digits in NUMBERS.items():
            errors = members[f"{column} stderr"].tolist() if f"{column} stderr" in members else []
            error = errors[0] if len(errors) == 1 else None
            cells.append(spread(known(members[column]), f".{digits}f", error))
        grid.rows.append(cells)
    return grid


def accuracy_points(runs: pd.DataFrame) -> pd.DataFrame:
    """The data of :func:`accuracy_plot`: mean and standard deviation over the seeds."""
    rows = []
    swept = runs[runs["Kept"].notna()]
    for members in _rows(swept):
        model, questions, method, keep, settings = _group(members.iloc[0][GROUP])
        rows.append([model, questions, f"{method} {settings}".rstrip(), keep, *_ends(members["accuracy compressed"])])
    for (model, questions), members in swept.groupby(GROUP[:2]):
        dense = members.drop_duplicates("Seed", keep="last")["accuracy dense"]
        rows.append([model, questions, DENSE, "1", *_ends(dense)])
    return pd.DataFrame(rows, columns=DATA)


def accuracy_plot(data: pd.DataFrame) -> "Figure":
    """Accuracy over the compression rate, a panel for each model and set of questions and a line for each method."""
    models, sets, methods = (sorted(data[column].unique()) for column in DATA[:3])
    accuracy, sd = data["accuracy, %"].astype(float), data["standard deviation"].astype(float)
    data = data.assign(rate=1 / data["kept"].astype(float), mean=accuracy, low=accuracy - sd, high=accuracy + sd)
    page, panels = figure.panels(len(models), len(sets), (1 + 4.2 * len(sets), 0.6 + 3.4 * len(models)))
    for model, row in zip(models, panels, strict=True):
        for name, axes in zip(sets, row, strict=True):
            panel = data[(data["model"] == model) & (data["questions"] == name)]
            figure.lines(axes, panel, "method", [m for m in methods if m != DENSE], "rate", "mean", ("low", "high"))
            for value in panel.loc[panel["method"] == DENSE, "mean"]:
                axes.axhline(value, color="grey", linewidth=0.8, linestyle="--", label=DENSE)
            axes.set(title=f"{model}, {name}", xlabel="compression rate, 1 / compress.keep", ylabel="accuracy, %")
            axes.grid(alpha=0.3)
            if len(panel):
                axes.legend(fontsize=8)
    return page


def _rows(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """The runs of each row of the table, in order. A seed that does not rise begins a row."""
    cells = runs[GROUP].fillna("")
    begins = (cells != cells.shift()).any(axis=1) | (runs["Seed"] <= runs["Seed"].shift())
    return [members for _, members in runs.groupby(begins.cumsum())]


def _group(group: "pd.Series[Any]") -> list[str]:
    """The cells of GROUP."""
    return ["" if pd.isna(value) else f"{value:g}" if isinstance(value, float) else value for value in group]


def _ends(values: "pd.Series[float]") -> list[Any]:
    """Count, mean and standard deviation."""
    return [len(values), f"{mean(values):.3f}", f"{stdev(values) if len(values) > 1 else 0:.3f}"]


def _numbers(saved: SavedRecord) -> dict[str, float | None]:
    """The columns NUMBERS of a record, and the standard errors over the questions."""
    rate, quality = _rate(saved), saved.record["compression"]["quality"]
    values = {"rate": rate["rate"], "model saved": rate["model_saving_percent"]}
    for column in list(NUMBERS)[2:]:
        key, point = column.split()
        scores = quality[point] if isinstance(quality.get(point), dict) else {}
        values |= {column: scores.get(key), f"{column} stderr": scores.get(f"{key}_stderr")}
    return values


def _settings(saved: SavedRecord) -> set[str]:
    """The settings of a record's command without those that have a column."""
    settings = [text.lstrip("+") for text in shlex.split(saved.record["command"]) if "=" in text]
    return {text for text in settings if text.partition("=")[0] not in COLUMNS and not text.startswith("hydra.")}


def _model(saved: SavedRecord) -> str:
    """The value of `model=`, or the sample model."""
    config = saved.record["config"]
    return str(config["model"] or f"sample {config['task']['model']['sample']}")


def _questions(saved: SavedRecord) -> str:
    """The question set, with the folder where it is not of the sample world."""
    config = saved.record["config"]
    place = "" if config["data_root"] is None else f" ({Path(config['data_root']).name})"
    return f"{config['task']['questions']}{place}"


def _corpus(saved: SavedRecord) -> str:
    return "" if saved.record["config"]["data_root"] is None else saved.record["identity"]["corpus"]


def _keep(saved: SavedRecord) -> float | None:
    keep = (saved.record["config"].get("compress") or {}).get("keep")
    return float(keep) if isinstance(keep, int | float) else None


def _rate(saved: SavedRecord) -> dict[str, Any]:
    return saved.record.get("compression", {}).get("rate") or {}
