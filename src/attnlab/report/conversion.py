"""Records of converted decoders: a table, and a plot of perplexity over the cache."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from attnlab.errors import DataError
from attnlab.report import figure
from attnlab.report.grid import Grid
from attnlab.report.points import name_below
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = {"original": "Original", "converted": "Converted", "healed": "Healed"}
OVER_THE_CACHE = ("convert.keep", "convert.rope_dim", "convert.latent_dim", "convert.rank", "convert.groups")
HEADERS = ["Model", "Method", "Cache, %", "Bytes per token", "Seeds", *POINTS.values()]
HEADERS += ["Converted / original", "Healed / original"]
RUN = ["Model", "Method", "Seed", "Bytes per token, original", "converted", *POINTS.values()]
ABOUT = ["Seconds of conversion", "Corpus", "Device", "Git", "Command"]
MOST = 8.0  # the plot ends at this multiple of the original's perplexity


@dataclass(frozen=True)
class Run:
    """What the table shows of a run; a line of runs.csv.

    Args:
        model: the name of `model=` without its folders, or "sample".
        method: `convert=` with the settings of the command that are not the size of the cache, or the experiment.
        seed: of the run.
        sizes: bytes of the cache per token of a long text, all layers, of the original and of the converted model; of
            all of the cache as measured, where sliding windows bound it in every layer.
        perplexities: of the original, the converted and the healed model; None: not measured.
        about: seconds of the conversion, corpus, device, revision and command.
    """

    model: str
    method: str
    seed: int
    sizes: tuple[float, float]
    perplexities: tuple[float | None, ...]
    about: tuple[str, ...]

    @property
    def share(self) -> float:
        """The cache in percent of the original's."""
        return round(100 * self.sizes[1] / self.sizes[0], 1)


def is_one(found: SavedRecord) -> bool:
    """Whether a record is of a converted decoder.

    Args:
        found: the record.
    """
    return isinstance(found.record.get("conversion"), dict)


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write what :func:`write` does, for records.

    Of runs of one model, method, cache and seed the numbers of the latest count.

    Args:
        records: of runs with `convert=`.
        directory: where to write.

    Returns:
        The paths written.

    Raises:
        DataError: no record has a converted decoder.
    """
    found = [one for one in records if one.record["status"] == "finished" and is_one(one)]
    if not found:
        raise DataError("no finished record of a converted decoder among those given")
    return write(_latest([run_of(one) for one in sorted(found, key=lambda one: str(one.record["started"]))]), directory)


def write(found: Sequence[Run], directory: Path) -> list[Path]:
    """Write the table conversions.{md,csv,tex}, runs.csv, and perplexity.{csv,png}.

    Args:
        found: at most one run of each model, method, cache and seed.
        directory: where to write.

    Returns:
        The paths written.
    """
    paths = table(found).write(directory / "conversions", "md", "csv", "tex")
    paths += runs_table(found).write(directory / "runs", "csv")
    return paths + figure.write(directory / "perplexity", points(found), plot)


def run_of(one: SavedRecord) -> Run:
    """What the table shows of a record.

    Args:
        one: a finished record of a converted decoder.
    """
    record, about = one.record, one.record["conversion"]
    states = [about["points"][point] for point in POINTS]
    given = record["config"]["model"]
    size = "cache_bytes_per_token" if states[0]["cache_bytes_per_token"] else "cache_bytes_measured"
    original, converted = (float(state[size]) for state in states[:2])
    return Run(
        "sample" if given is None else Path(given).name,
        _method(one),
        int(record["seed"]),
        (original, converted),
        tuple(float(state["perplexity"]) if isinstance(state, dict) else None for state in states),
        (str(about["seconds"]), record["corpus"], *(str(record["environment"][key]) for key in ("device", "git")),
         record["command"]),
    )  # fmt: skip


def read_runs(path: Path) -> list[Run]:
    """The lines of a file that :func:`render` has written.

    Args:
        path: runs.csv.

    Raises:
        DataError: it is something else.
    """
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    if header != [*RUN, *ABOUT]:
        raise DataError(f"{path}: line 1: expected the columns {', '.join([*RUN, *ABOUT])}")
    found = []
    for number, line in enumerate(lines, 2):
        try:
            model, method, seed, original, converted, *rest = line
            scores = tuple(None if text == NOT_RUN else float(text) for text in rest[: len(POINTS)])
            sizes = float(original), float(converted)
            found.append(Run(model, method, int(seed), sizes, scores, tuple(rest[len(POINTS) :])))
        except ValueError as error:
            raise DataError(f"{path}: line {number}: {error}") from error
    return found


def table(found: Sequence[Run]) -> Grid:
    """A row for each model, method and size of the cache: means over the seeds.

    Args:
        found: runs of any models and methods.
    """
    grid = Grid("Converted decoders: perplexity and cache", HEADERS)
    for (model, method, share), members in _grouped(found):
        sizes = sorted({one.sizes[1] for one in members})
        cells = [model, method, f"{share:g}", " to ".join(f"{size:g}" for size in sizes), str(len(members))]
        cells += [_cell(_scores(members, number)) for number in range(len(POINTS))]
        for number in (1, 2):
            pairs = [(one.perplexities[number], one.perplexities[0]) for one in members]
            cells.append(_cell([value / start for value, start in pairs if value and start], 3))
        grid.rows.append(cells)
    grid.notes += [
        "Perplexity of a token (of the sample model: of a byte) of the test split; mean ± standard deviation over the "
        "seeds. Ratios are taken seed by seed. Converted: without training; healed: trained afterwards.",
        "Cache: of a long text, all layers, as a share of the original's; measured bytes equal these. Slots of merged "
        "positions count as by stride; the window of unmerged positions has a fixed size and is left out, and so are "
        "layers with a sliding window. Where all layers have one: bytes of the whole cache, as measured.",
        "Method: `convert=` and the settings of the command; an experiment's name stands for its settings.",
        "Each run with its command, device and revision: runs.csv.",
    ]
    return grid


def runs_table(found: Sequence[Run]) -> Grid:
    """A row for each run, all that :func:`read_runs` needs.

    Args:
        found: runs.
    """
    grid = Grid("Runs", [*RUN, *ABOUT])
    for one in sorted(found, key=lambda one: (one.model, one.method, -one.share, one.seed)):
        scores = [NOT_RUN if value is None else f"{value:.6g}" for value in one.perplexities]
        sizes = [f"{size:g}" for size in one.sizes]
        grid.rows.append([one.model, one.method, str(one.seed), *sizes, *scores, *one.about])
    return grid


def points(found: Sequence[Run]) -> Grid:
    """The data of :func:`plot`: the mean, least and most over the seeds.

    Args:
        found: runs.
    """
    headers = ["model", "point", "method", "cache, %", "seeds", "perplexity", "least", "most"]
    grid = Grid("Perplexity over the cache", headers)
    originals: dict[str, dict[int, float]] = {}
    for (model, method, share), members in _grouped(found):
        for number, point in enumerate(POINTS):
            if point != "original" and (values := _scores(members, number)):
                grid.rows.append([model, point, method, f"{share:g}", *_spread(values)])
        own = {one.seed: value for one in members if (value := one.perplexities[0]) is not None}
        originals[model] = originals.get(model, {}) | own
    for model, seeds in sorted(originals.items()):
        grid.rows.append([model, "original", "", "100", *_spread(list(seeds.values()))])
    return grid


def plot(data: Grid) -> Figure:
    """Perplexity over the share of the cache, a panel for each model and point, a line for each method.

    Args:
        data: as :func:`points` gives it.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    models = sorted({row[0] for row in data.rows})
    stages = [point for point in ("converted", "healed") if any(row[1] == point for row in data.rows)]
    methods = sorted({row[2] for row in data.rows if row[2]})
    page = Figure(figsize=(0.6 + 5.2 * len(stages), 0.4 + 3.6 * len(models)), layout="constrained")
    panels = page.subplots(len(models), len(stages), squeeze=False)
    for model, line in zip(models, panels, strict=True):
        (start,) = [float(row[5]) for row in data.rows if row[:2] == [model, "original"]]
        for point, axes in zip(stages, line, strict=True):
            axes.axhline(start, color="grey", linewidth=0.8, linestyle="--", label="original")
            for number, method in enumerate(methods):
                rows = [row for row in data.rows if row[:3] == [model, point, method]]
                cells = sorted(tuple(float(row[i]) for i in (3, 5, 6, 7)) for row in rows)
                if cells:
                    x, y, least, most = zip(*cells, strict=True)
                    spread = [
                        [a - b for a, b in zip(y, least, strict=True)],
                        [b - a for a, b in zip(y, most, strict=True)],
                    ]
                    style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3]}
                    axes.errorbar(x, y, yerr=spread, marker="o", markersize=4, capsize=2, label=method, **style)
            axes.set(title=f"{model}, {point}", xlabel="cache per token, % of the original's", ylabel="perplexity")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_ylim(0.97 * start, MOST * start)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(ScalarFormatter())
            axes.grid(alpha=0.3, which="both")
    name_below(page, ["original", *methods])
    return page


def _latest(found: Sequence[Run]) -> list[Run]:
    """One run of each model, method, cache and seed; what a later one has not measured is that of the one before."""
    kept: dict[tuple[str, str, float, int], Run] = {}
    for one in found:
        place = one.model, one.method, one.share, one.seed
        before = kept.get(place, one)
        pairs = zip(one.perplexities, before.perplexities, strict=True)
        kept[place] = replace(one, perplexities=tuple(old if new is None else new for new, old in pairs))
    return list(kept.values())


def _grouped(found: Sequence[Run]) -> list[tuple[tuple[str, str, float], list[Run]]]:
    """Runs by model, method and share of the cache, in the order of their seeds."""
    groups: dict[tuple[str, str, float], list[Run]] = {}
    for one in sorted(found, key=lambda one: (one.model, one.method, -one.share, one.seed)):
        groups.setdefault((one.model, one.method, one.share), []).append(one)
    return list(groups.items())


def _method(one: SavedRecord) -> str:
    words = [text.lstrip("+") for text in shlex.split(one.record["command"]) if "=" in text]
    given = [text for text in words if text.startswith("convert.") and not text.startswith(OVER_THE_CACHE)]
    given = [text.removeprefix("convert.") for text in given if not text.startswith("convert.calibration.")]
    given += [text for text in words if text.startswith("stride=")]
    experiment = str(one.record.get("experiment") or "").removeprefix("convert/")
    return " ".join([experiment or one.record["conversion"]["target"], *sorted(given)])


def _scores(members: Sequence[Run], number: int) -> list[float]:
    return [value for one in members if (value := one.perplexities[number]) is not None]


def _cell(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return NOT_RUN
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def _spread(values: Sequence[float]) -> list[str]:
    return [str(len(values)), *(f"{value:.4f}" for value in (mean(values), min(values), max(values)))]
