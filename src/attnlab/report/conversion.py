"""Records of converted decoders: a table, and a plot of perplexity over the cache."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import pandas as pd

from attnlab.report import figure
from attnlab.report.frame import finished, frame, known, read_runs, spread
from attnlab.report.grid import Grid
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = {"original": "Original", "converted": "Converted", "healed": "Healed"}
STATES = list(POINTS.values())
OVER_THE_CACHE = ("convert.keep", "convert.rope_dim", "convert.latent_dim", "convert.rank", "convert.groups")
HEADERS = ["Model", "Method", "Cache, %", "Bytes per token", "Seeds", *STATES]
HEADERS += ["Converted / original", "Healed / original"]
SIZES = ["Bytes per token, original", "converted"]  # of the cache, all layers
RUN = ["Model", "Method", "Seed", *SIZES, *STATES]
RUN += ["Seconds of conversion", "Corpus", "Device", "Git", "Command"]
GROUP = ["Model", "Method", "Cache, %"]
DATA = ["model", "point", "method", "cache, %", "seeds", "perplexity", "least", "most"]
MOST = 8.0  # the plot ends at this multiple of the original's perplexity
NOTES = [
    "Perplexity of a token (of the sample model: of a byte) of the test split; mean ± standard deviation over the "
    "seeds. Ratios are taken seed by seed. Converted: without training; healed: trained afterwards.",
    "Cache: of a long text, all layers, as a share of the original's; measured bytes equal these. Slots of merged "
    "positions count as by stride; the window of unmerged positions has a fixed size and is left out, and so are "
    "layers with a sliding window. Where all layers have one: bytes of the whole cache, as measured.",
    "Method: `convert=` and the settings of the command; an experiment's name stands for its settings.",
    "Each run with its command, device and revision: runs.csv.",
]


def is_one(saved: SavedRecord) -> bool:
    """Whether a record is of a converted decoder."""
    return "conversion" in saved.record


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write the table conversions.{md,csv,tex}, runs.csv and perplexity.{csv,png}; return their paths.

    Raises:
        DataError: no record has a converted decoder.
    """
    return _write(runs_of(finished(records, is_one, "of a converted decoder")), directory)


def render_again(folder: Path, directory: Path) -> list[Path]:
    """Write the same files into `directory` from the runs.csv in `folder`."""
    return _write(_shared(read_runs(folder / "runs.csv", RUN, RUN, ["Seed", *SIZES, *STATES])), directory)


def runs_of(records: Sequence[SavedRecord]) -> pd.DataFrame:
    """The runs, with the columns RUN and the share of the cache.

    Of runs with one model, method, cache and seed each number is that of the latest that has it.
    """
    runs = frame(sorted(records, key=lambda saved: str(saved.record["started"])), run=_run)["run"]
    shared = _shared(pd.DataFrame(runs.tolist(), columns=RUN))
    return shared.groupby([*GROUP, "Seed"], as_index=False, sort=False).last()


def _write(runs: pd.DataFrame, directory: Path) -> list[Path]:
    order = {"by": [*GROUP, "Seed"], "ascending": [True, True, False, True]}
    runs = runs.sort_values(**order, kind="stable")
    listed = Grid("Runs", RUN)
    for run in runs[RUN].itertuples(index=False):
        model, method, seed, original, converted, *rest = run
        scores = [NOT_RUN if pd.isna(value) else f"{value:.6g}" for value in rest[: len(STATES)]]
        listed.rows.append(
            [model, method, f"{seed:g}", f"{original:g}", f"{converted:g}", *scores, *rest[len(STATES) :]]
        )
    paths = table(runs).write(directory / "conversions", "md", "csv", "tex") + listed.write(directory / "runs", "csv")
    return paths + figure.write(directory / "perplexity", points(runs), plot)


def table(runs: pd.DataFrame) -> Grid:
    """A row for each model, method and size of the cache: means over the seeds."""
    grid = Grid("Converted decoders: perplexity and cache", HEADERS, notes=list(NOTES))
    for (model, method, share), members in runs.groupby(GROUP, sort=False):
        sizes = " to ".join(f"{size:g}" for size in sorted(members[SIZES[1]].unique()))
        cells = [model, method, f"{share:g}", sizes, str(len(members))]
        cells += [spread(known(members[state]), ".2f") for state in STATES]
        cells += [spread(known(members[state] / members["Original"]), ".3f") for state in STATES[1:]]
        grid.rows.append(cells)
    return grid


def points(runs: pd.DataFrame) -> pd.DataFrame:
    """The data of :func:`plot`: mean, least and most over the seeds of each model, state, method and cache."""
    rows = [
        [model, point, method, f"{share:g}", *_ends(values)]
        for (model, method, share), members in runs.groupby(GROUP, sort=False)
        for point, state in list(POINTS.items())[1:]
        if (values := known(members[state]))
    ]
    for model, members in runs.dropna(subset="Original").groupby("Model"):
        original = members.drop_duplicates("Seed", keep="last")["Original"]
        rows.append([model, "original", "", "100", *_ends(original.tolist())])
    return pd.DataFrame(rows, columns=DATA)


def plot(data: pd.DataFrame) -> "Figure":
    """Perplexity over the share of the cache, a panel for each model and state, a line for each method."""
    from matplotlib.ticker import ScalarFormatter

    data = data.astype(dict.fromkeys(("cache, %", "perplexity", "least", "most"), float))
    models = sorted(data["model"].unique())
    stages = [point for point in ("converted", "healed") if (data["point"] == point).any()]
    methods = sorted(name for name in data["method"].dropna().unique() if name)
    page, panels = figure.panels(len(models), len(stages), (0.6 + 5.2 * len(stages), 0.4 + 3.6 * len(models)))
    for model, row in zip(models, panels, strict=True):
        states = data[data["model"] == model]
        (start,) = states.loc[states["point"] == "original", "perplexity"]
        for point, axes in zip(stages, row, strict=True):
            axes.axhline(start, color="grey", linewidth=0.8, linestyle="--", label="original")
            state = states[states["point"] == point]
            figure.lines(axes, state, "method", methods, "cache, %", "perplexity", ("least", "most"), markersize=4)
            axes.set(title=f"{model}, {point}", xlabel="cache per token, % of the original's", ylabel="perplexity")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_ylim(0.97 * start, MOST * start)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(ScalarFormatter())
            axes.grid(alpha=0.3, which="both")
    figure.name_below(page)
    return page


def _run(saved: SavedRecord) -> list[Any]:
    """The cells of RUN. Sliding windows in every layer bound the cache: its size is then that of all of it."""
    record, conversion = saved.record, saved.record["conversion"]
    states = [conversion["points"][point] for point in POINTS]
    size = "cache_bytes_per_token" if states[0]["cache_bytes_per_token"] else "cache_bytes_measured"
    model = record["config"]["model"]
    return [
        "sample" if model is None else Path(model).name, _method(saved), int(record["seed"]),
        *(float(state[size]) for state in states[:2]),
        *(float(state["perplexity"]) if isinstance(state, dict) else None for state in states),
        str(conversion["seconds"]), record["corpus"], *(str(record["environment"][key]) for key in ("device", "git")),
        record["command"],
    ]  # fmt: skip


def _shared(runs: pd.DataFrame) -> pd.DataFrame:
    shares = zip(runs[SIZES[0]], runs[SIZES[1]], strict=True)
    return runs.assign(**{"Cache, %": [round(100 * converted / original, 1) for original, converted in shares]})


def _method(saved: SavedRecord) -> str:
    """The experiment or the target, with the settings of the command that are not the size of the cache."""
    words = [text.lstrip("+") for text in shlex.split(saved.record["command"]) if "=" in text]
    settings = [text for text in words if text.startswith("convert.") and not text.startswith(OVER_THE_CACHE)]
    settings = [text.removeprefix("convert.") for text in settings if not text.startswith("convert.calibration.")]
    settings += [text for text in words if text.startswith("stride=")]
    experiment = str(saved.record.get("experiment") or "").removeprefix("convert/")
    return " ".join([experiment or saved.record["conversion"]["target"], *sorted(settings)])


def _ends(values: list[float]) -> list[Any]:
    """Count, mean, least and most."""
    return [len(values), *(f"{value:.4f}" for value in (mean(values), min(values), max(values)))]
