"""Records of converted and of compressed decoders: tables with means over seeds, and plots.

Both kinds write runs.csv with a line for each run. Without committed records the tables are written from that file.
"""

import shlex
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from attnlab.report import compression, figure
from attnlab.report.table import Grid, differing, frame, known, read_runs, spread
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = ["Corpus", "Device", "Git", "Command"]
LISTED = "Each run with its command, device and revision: runs.csv."

# Converted decoders
STATES = ["Original", "Converted", "Healed"]
OVER_THE_CACHE = ("convert.keep", "convert.rope_dim", "convert.latent_dim", "convert.rank", "convert.groups")
SIZES = ["Bytes per token, original", "converted"]  # of the cache, all layers
CONVERTED = ["Model", "Method", "Seed", *SIZES, *STATES, "Seconds of conversion", *ABOUT]  # of runs.csv
CONVERSION = ["Model", "Method", "Cache, %"]  # the keys of a row of the table
PERPLEXITY = "perplexity (lower is better)"
MOST = 8.0  # the plot ends at this multiple of the original's perplexity
CONVERSION_NOTES = [
    "Perplexity of a token (of the sample model: of a byte) of the test split; mean ± standard deviation over the "
    "seeds. Ratios are taken seed by seed. Converted: without training; healed: trained afterwards.",
    "Cache: all layers, as a share of the original's: of a text as long as those of calibration if the record has it, "
    "windows included, else of a long text, where measured bytes equal these. There slots of merged "
    "positions count as by stride; the window of unmerged positions has a fixed size and is left out, and so are "
    "layers with a sliding window. Where all layers have one: bytes of the whole cache, as measured.",
    "Method: `convert=` and the settings of the command; an experiment's name stands for its settings.",
    LISTED,
]

# Compressed decoders
COMPRESSION = ["Model", "Questions", "Method", "Kept", "Settings"]
WITH_A_COLUMN = {
    "seed", "model", "compress", "compress.keep", "task.questions", "task.model.sample", "data_root", "cache_dir",
}  # fmt: skip
SCORES = {"accuracy": 1, "loss": 3, "perplexity": 2}  # decimals
NUMBERS = {"rate": 2, "model saved": 1} | {
    f"{key} {point}": digits for (key, digits), point in product(SCORES.items(), ("dense", "compressed"))
}
HEADERS = ["Rate", "Model saved, %"]
HEADERS += ["Accuracy dense", "compressed", "Loss dense", "compressed", "Perplexity dense", "compressed"]
DATA = ["model", "questions", "method", "kept", "seeds", "accuracy, %", "standard deviation"]
DENSE = "dense"
ACCURACY = "accuracy, % (± standard deviation)"
COMPRESSION_NOTES = [
    "Kept: compress.keep, the share of the parameters of the matrices that the method compresses.",
    "Rate: parameters of the dense matrices that were replaced by those of their factors; matrices that the budget "
    "left dense do not count. Model saved: of all parameters, embeddings included.",
    "Accuracy in percent, loss in nats per token of the answer, both on the test split. Mean ± standard deviation "
    "over the seeds; of one seed the standard error over the questions. Of two runs of one seed the later counts.",
    "Settings: what the commands of runs with the same model, questions, method and share differ in.",
    LISTED,
]


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write the report of converted decoders or, without these, of compressed models; DataError without both.

    Converted decoders: conversions.{md,csv,tex}, runs.csv and perplexity.{csv,png}. Language models:
    sweep.{md,csv,tex}, runs.csv, and accuracy.{csv,png} of runs with `compress.keep`. Vision models: `compression`.
    """
    done = [saved for saved in records if saved.record["status"] == "finished"]
    if converted := [saved for saved in done if "conversion" in saved.record]:
        return _write_conversions(conversions(converted), directory)
    if asked := [saved for saved in done if saved.record["task"] == "reasoning" and _rate(saved)]:
        return _write_compressions(compressions(asked), directory)
    return compression.render(done, directory)


def render_again(path: Path, _: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write the same files into `directory` from a runs.csv and no record; they lack the standard errors."""
    if path.with_name("conversions.csv").is_file():
        return _write_conversions(_with_share(read_runs(path, CONVERTED, ["Seed", *SIZES, *STATES])), directory)
    columns = [*COMPRESSION, "Seed", *NUMBERS, *ABOUT]
    return _write_compressions(read_runs(path, columns, ["Kept", "Seed", *NUMBERS]), directory)


def conversions(records: Sequence[SavedRecord]) -> pd.DataFrame:
    """The runs of `records` (the oldest first) with the columns CONVERTED and the share of the cache.

    Of runs with one model, method, cache and seed, the latest run that has a number gives it.
    """
    runs = _with_share(pd.DataFrame(map(_converted, records), columns=CONVERTED))
    return runs.groupby([*CONVERSION, "Seed"], as_index=False, sort=False).last()


def compressions(records: Sequence[SavedRecord]) -> pd.DataFrame:
    """The runs with the columns of runs.csv and the standard errors; of two runs of one row and seed the later one."""
    runs = frame(
        records, Model=_model, Questions=_questions, Method="compress", Kept="config.compress.keep", Seed="seed",
        Settings=_settings, Corpus="corpus", Device="environment.device", Git="environment.git", Command="command",
    ).astype({"Kept": float, "Seed": int})  # fmt: skip
    runs = runs.join(pd.DataFrame(map(_numbers, runs["saved"]), index=runs.index))
    names = [tuple(map(str, name)) for name in runs[COMPRESSION[:4]].to_numpy()]
    runs["Settings"] = differing(names, runs["Settings"])
    order = [*COMPRESSION, "Seed"]
    runs = runs.drop_duplicates(order, keep="last")
    return runs.sort_values(order, ascending=[c != "Kept" for c in order], na_position="last", kind="stable")


def _write_conversions(runs: pd.DataFrame, directory: Path) -> list[Path]:
    runs = runs.sort_values([*CONVERSION, "Seed"], ascending=[True, True, False, True], kind="stable")
    forms = dict.fromkeys(["Seed", *SIZES], "g") | dict.fromkeys(STATES, ".6g")
    ratios = {f"{state} / original": runs[state] / runs["Original"] for state in STATES[1:]}
    digits = dict.fromkeys(STATES, 2) | dict.fromkeys(ratios, 3)
    rows = _means(runs.assign(**ratios), CONVERSION, digits)
    for row, (_, members) in zip(rows, runs.groupby(CONVERSION, sort=False), strict=True):
        row.insert(len(CONVERSION), " to ".join(f"{size:g}" for size in sorted(members[SIZES[1]].unique())))
    headers = [*CONVERSION, "Bytes per token", "Seeds", *digits]
    grid = Grid("Converted decoders: perplexity and cache", headers, rows, CONVERSION_NOTES)
    paths = grid.write(directory / "conversions", "md", "csv", "tex")
    paths += _listed(runs, CONVERTED, CONVERTED, forms).write(directory / "runs", "csv")
    return paths + figure.write(directory / "perplexity", perplexities(runs), perplexity_plot)


def _write_compressions(runs: pd.DataFrame, directory: Path) -> list[Path]:
    first, forms = [*COMPRESSION, "Seed"], {"Seed": "g"} | dict.fromkeys(NUMBERS, ".5g")
    title = "Compressed language models: accuracy, loss and perplexity"
    grid = Grid(title, [*COMPRESSION, "Seeds", *HEADERS], _means(runs, COMPRESSION, NUMBERS), COMPRESSION_NOTES)
    paths = grid.write(directory / "sweep", "md", "csv", "tex")
    listed = _listed(runs, [*first, *NUMBERS, *ABOUT], [*first, *HEADERS, *ABOUT], forms)
    paths += listed.write(directory / "runs", "csv")
    return paths + figure.write(directory / "accuracy", accuracies(runs), accuracy_plot)


def _listed(runs: pd.DataFrame, columns: Sequence[str], headers: list[str], forms: Mapping[str, str]) -> Grid:
    """The table runs.csv, with a line for each run; `forms`: the formats of its numbers."""
    cells = runs[columns].astype(object)
    for column in columns:
        form = forms.get(column)
        cells[column] = [_text(v) if form is None else NOT_RUN if pd.isna(v) else format(v, form) for v in runs[column]]
    return Grid("Runs", headers, cells.to_numpy().tolist())


def _means(runs: pd.DataFrame, by: list[str], digits: Mapping[str, int]) -> list[list[str]]:
    """A row for each group of runs: keys, number of runs, and means ± deviations (of a single run its error)."""
    rows = []
    for group, members in runs.groupby(by, dropna=False, sort=False):
        rows.append([*map(_text, group), str(len(members))])
        for column, places in digits.items():
            errors = members.get(f"{column} stderr", pd.Series([None]))
            error = errors.iloc[0] if len(members) == 1 else None
            rows[-1].append(spread(known(members[column]), f".{places}f", error))
    return rows


def perplexities(runs: pd.DataFrame) -> pd.DataFrame:
    """The data of :func:`perplexity_plot`: mean, least and most over the seeds for each model, state and method."""
    states = runs.set_index(CONVERSION)[STATES[1:]].rename(columns=str.lower).stack().dropna()
    originals = runs.dropna(subset="Original").drop_duplicates(["Model", "Seed"], keep="last")
    index = [originals["Model"], [""] * len(originals), [100.0] * len(originals), ["original"] * len(originals)]
    values = pd.concat([states, pd.Series(originals["Original"].to_numpy(), pd.MultiIndex.from_arrays(index))])
    spreads = values.groupby(level=[0, 1, 2, 3], sort=False).agg(["size", "mean", "min", "max"])
    rows = [
        [model, point, method, f"{share:g}", int(count), *(f"{value:.4f}" for value in ends)]
        for (model, method, share, point), count, *ends in spreads.itertuples()
    ]
    return pd.DataFrame(rows, columns=["model", "point", "method", "cache, %", "seeds", "perplexity", "least", "most"])


def accuracies(runs: pd.DataFrame) -> pd.DataFrame:
    """The data of :func:`accuracy_plot`: number, mean and standard deviation over the seeds."""
    swept = runs[runs["Kept"].notna()]
    dense = swept.drop_duplicates(["Model", "Questions", "Seed"], keep="last").sort_values(
        COMPRESSION[:2], kind="stable"
    )
    methods = (swept["Method"] + " " + swept["Settings"].map(_text)).str.rstrip()
    values = pd.concat(
        [swept.assign(Method=methods, value=swept["accuracy compressed"]),
         dense.assign(Method=DENSE, Kept=1.0, value=dense["accuracy dense"])]
    )  # fmt: skip
    spreads = values.groupby(COMPRESSION[:4], sort=False)["value"].agg(["size", "mean", "std"]).fillna(0).reset_index()
    spreads["Kept"] = spreads["Kept"].map(_text)
    for column in ("mean", "std"):
        spreads[column] = spreads[column].map("{:.3f}".format)
    return spreads.set_axis(DATA, axis=1)


def perplexity_plot(data: pd.DataFrame) -> "Figure":
    """Draw perplexity over the share of the cache, panels for each model and state, a line for each method.

    A panel has at most eight methods. The share falls to the right, where the methods differ.
    """
    data = data.astype(dict.fromkeys(("cache, %", "perplexity", "least", "most"), float))
    parts = []
    for (model, point), state in data[data["method"] != ""].groupby(["model", "point"]):
        parts += [(model, point, state, methods) for methods in figure.split(sorted(state["method"].unique()))]
    page, panels = figure.panels(len(parts), 6, 3.8, most=2)
    for axes, (model, point, state, methods) in zip(panels, parts, strict=True):
        (start,) = data.loc[(data["model"] == model) & (data["point"] == "original"), "perplexity"]
        axes.axhline(start, color="grey", linewidth=0.8, linestyle="--", label="original")
        figure.lines(axes, state, "method", methods, "cache, %", "perplexity", ("least", "most"))
        figure.plain(axes, title=f"{model}, {point}", xlabel="cache per token, % of the original's", ylabel=PERPLEXITY)
        figure.logarithmic(axes, "x", base=2)
        axes.set_xlim(1.1 * data["cache, %"].max(), data["cache, %"].min() / 1.1)
        axes.set_ylim(0.97 * start, MOST * start)
        figure.logarithmic(axes, "y")
    figure.name_ends(page)
    return page


def accuracy_plot(data: pd.DataFrame) -> "Figure":
    """Draw accuracy over the compression rate, a panel for each model and question set, a line for each method."""
    models, sets, methods = (sorted(data[column].unique()) for column in DATA[:3])
    accuracy, sd = data["accuracy, %"].astype(float), data["standard deviation"].astype(float)
    data = data.assign(rate=1 / data["kept"].astype(float), mean=accuracy, low=accuracy - sd, high=accuracy + sd)
    page, panels = figure.panels(len(models) * len(sets), 5.1, 3.6, most=len(sets))
    for axes, (model, name) in zip(panels, product(models, sets), strict=True):
        panel = data[(data["model"] == model) & (data["questions"] == name)]
        figure.lines(axes, panel, "method", [m for m in methods if m != DENSE], "rate", "mean", ("low", "high"))
        for value in panel.loc[panel["method"] == DENSE, "mean"]:
            axes.axhline(value, color="grey", linewidth=0.8, linestyle="--", label=DENSE)
        figure.plain(axes, title=f"{model}, {name}", xlabel="compression rate, 1 / compress.keep", ylabel=ACCURACY)
    figure.name_ends(page)
    return page


def _text(value: Any) -> str:
    return "" if pd.isna(value) else f"{value:g}" if isinstance(value, float) else str(value)


def _model(saved: SavedRecord) -> str:
    config = saved.record["config"]
    return str(config["model"] or f"sample {config['task']['model']['sample']}")


def _words(saved: SavedRecord) -> list[str]:
    """The settings of a record's command."""
    return [text.lstrip("+") for text in shlex.split(saved.record["command"]) if "=" in text]


def _converted(saved: SavedRecord) -> list[Any]:
    """The cells of CONVERTED. If every layer has a sliding window, the size is that of the whole cache."""
    record, conversion = saved.record, saved.record["conversion"]
    states = [conversion["points"][state.lower()] for state in STATES]
    size = "cache_bytes_per_token" if states[0]["cache_bytes_per_token"] else "cache_bytes_measured"
    settings = [text for text in _words(saved) if text.startswith("convert.") and not text.startswith(OVER_THE_CACHE)]
    settings = [text.removeprefix("convert.") for text in settings if not text.startswith("convert.calibration.")]
    settings += [text for text in _words(saved) if text.startswith("stride=")]
    experiment = str(record.get("experiment") or "").removeprefix("convert/")
    sizes = [float(state[size]) for state in states[:2]]
    if (cache := conversion.get("cache")) and "cache_bits" not in states[1]:
        sizes[1] = sizes[0] * cache["share"]
    return [
        Path(record["config"]["model"] or "sample").name,
        " ".join([experiment or conversion["target"], *sorted(settings)]), int(record["seed"]),
        *sizes, *(float(state["perplexity"]) if isinstance(state, dict) else None for state in states),
        str(conversion["seconds"]), record["corpus"], *(str(record["environment"][key]) for key in ("device", "git")),
        record["command"],
    ]  # fmt: skip


def _with_share(runs: pd.DataFrame) -> pd.DataFrame:
    shares = zip(runs[SIZES[0]], runs[SIZES[1]], strict=True)
    return runs.assign(**{"Cache, %": [round(100 * converted / original, 1) for original, converted in shares]})


def _numbers(saved: SavedRecord) -> dict[str, float | None]:
    """The columns NUMBERS of a record and the standard errors over the questions."""
    rate, quality = _rate(saved), saved.record["compression"]["quality"]
    values = {"rate": rate["rate"], "model saved": rate["model_saving_percent"]}
    for key, point in product(SCORES, ("dense", "compressed")):
        scores = quality[point] if isinstance(quality.get(point), dict) else {}
        values |= {f"{key} {point}": scores.get(key), f"{key} {point} stderr": scores.get(f"{key}_stderr")}
    return values


def _settings(saved: SavedRecord) -> dict[str, str]:
    """The settings of a record's command that have no column."""
    pairs = sorted((key, value) for key, _, value in (text.partition("=") for text in _words(saved)))
    return {key: value for key, value in pairs if key not in WITH_A_COLUMN and not key.startswith("hydra.")}


def _questions(saved: SavedRecord) -> str:
    """The question set, with its folder if `data_root` is set."""
    config = saved.record["config"]
    place = "" if config["data_root"] is None else f" ({Path(config['data_root']).name})"
    return f"{config['task']['questions']}{place}"


def _rate(saved: SavedRecord) -> dict[str, Any]:
    return saved.record.get("compression", {}).get("rate") or {}
