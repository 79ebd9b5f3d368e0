"""Needle in a haystack: a heat map of recall over length and depth for each state of a model, and the same in figures.

The records are those of language-modelling runs with task.score.needle.lengths; of a conversion they have the states
original, converted and, where it was trained, healed.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from attnlab.errors import DataError
from attnlab.report import figure
from attnlab.report.grid import Grid, facts
from attnlab.run.record import NOT_RUN, UNREADABLE
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = "needle"  # below a paper's folder: where its records are
STEM = "needle"  # of the files
TITLE = "Needle in a haystack"
STATES = ("original", "converted", "healed", "scored")  # the last: of a run without a conversion
NAMED = ("keep", "stride", "rank", "groups")  # settings of a conversion that its name always has
POINTS = ["run", "state", "seed", "length", "depth", "value"]
WHAT = {"recall": ("accuracy", "recall, %", 100.0), "gain": ("gain", "gain, nats per token", 1.0)}
NOTES = [
    "Recall: share of the texts in which each token of the answer is the most probable one. Gain: mean log-probability "
    "of a token of the answer in nats, minus that in the same text without the fact; above 0 the model has used it.",
]


def is_one(found: SavedRecord) -> bool:
    """Whether a record is that of a finished run which has a needle in a haystack.

    Args:
        found: of any task.
    """
    return found.record["status"] == "finished" and bool(_states(found))


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write the table as Markdown, LaTeX and CSV, and the heat maps of recall and gain with their numbers as CSV.

    Args:
        records: of any task; those without a needle are left out.
        directory: where the files are written.

    Returns:
        The paths of the files.

    Raises:
        DataError: no record has a needle, or one is damaged.
        WriteError: a file cannot be written.
    """
    mine = [found for found in records if is_one(found)]
    if not mine:
        raise DataError("no finished record with a needle in a haystack: give task.score.needle.lengths=[...] to a run")
    try:
        paths = table(mine).write(directory / STEM, "md", "tex", "csv")
        for name, (_, label, _) in WHAT.items():
            paths += figure.write(directory / f"{STEM}_{name}", points(mine, name), partial(draw, label=label))
    except UNREADABLE as error:
        names = ", ".join(found.name for found in mine)
        raise DataError(f"{names}: the needle of a record is damaged: {type(error).__name__}: {error}") from error
    return paths


def points(records: Sequence[SavedRecord], what: str) -> Grid:
    """The data of :func:`draw`: a row for each run, state, length and depth.

    Args:
        records: with a needle.
        what: "recall" or "gain".
    """
    key, _, factor = WHAT[what]
    grid = Grid(TITLE, POINTS)
    for found, run in zip(records, labels(records), strict=True):
        for state, values in _states(found).items():
            grid.rows += [
                [run, state, str(found.record["seed"]), str(int(cell["length"])), f"{float(cell['depth']):g}",
                 f"{factor * float(cell[key]):.6g}"]
                for cell in values["needle"]["cells"]
            ]  # fmt: skip
    return grid


def table(records: Sequence[SavedRecord]) -> Grid:
    """Perplexity, cache, recall and gain of each run and state, the mean of its seeds; recall for each length too.

    Args:
        records: with a needle.
    """
    every = [values["needle"] for found in records for values in _states(found).values()]
    lengths = sorted({int(cell["length"]) for needle in every for cell in needle["cells"]})
    headers = ["Run", "State", "Perplexity", "Cache, bytes per token", "Recall, %", "Gain, nats"]
    grid = Grid(TITLE, [*headers, *(f"Recall at {length:,}" for length in lengths)])
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for found, run in zip(records, labels(records), strict=True):
        for state, values in _states(found).items():
            rows.setdefault((run, state), []).append(values)
    for (run, state), seeds in rows.items():
        needles = [values["needle"] for values in seeds]
        cells = [_mean(seeds, "perplexity", 3), _mean(seeds, "cache_bytes_per_token", 0)]
        cells += [_mean(needles, "accuracy", 1, 100), _mean(needles, "gain", 3)]
        for length in lengths:
            cells.append(_mean([c for n in needles for c in n["cells"] if c["length"] == length], "accuracy", 1, 100))
        grid.rows.append([run, state, *cells])
    grid.notes = list(NOTES)
    grid.list_records([facts(run, one, _asked(one)) for one, run in zip(records, labels(records), strict=True)])
    return grid


def _asked(found: SavedRecord) -> str:
    needle = next(iter(_states(found).values()))["needle"]
    return f"{needle['trials']} texts for each length and depth, {needle['asks']} ({needle['answer_tokens']:g} tokens)"


def labels(records: Sequence[SavedRecord]) -> list[str]:
    """A name for each run: its conversion with those settings in which conversions of that name differ.

    Args:
        records: with a needle.
    """
    known = [_conversion(found) for found in records]
    names = []
    for found, (target, settings) in zip(records, known, strict=True):
        if not target:
            names.append(str(found.record["config"].get("model") or found.mechanism))
            continue
        alike = [other for name, other in known if name == target]
        differing = [key for key in settings if len({str(other.get(key)) for other in alike}) > 1]
        shown = [key for key in settings if key in differing or (key in NAMED and settings[key] is not None)]
        names.append(" ".join([target, *(f"{key}={settings[key]}" for key in shown)]))
    return names


def draw(data: Grid, label: str) -> "Figure":
    """A line of heat maps for each run: its states side by side, all in the same colours; the mean of the seeds.

    Args:
        data: as :func:`points` gives it.
        label: what the colours say.
    """
    from matplotlib.figure import Figure

    runs = list(dict.fromkeys(row[0] for row in data.rows))
    states = [state for state in STATES if any(row[1] == state for row in data.rows)]
    cells: dict[tuple[str, str], dict[tuple[int, float], list[float]]] = {}
    for run, state, _, length, depth, value in data.rows:
        cells.setdefault((run, state), {}).setdefault((int(length), float(depth)), []).append(float(value))
    means = {panel: {at: fmean(values) for at, values in found.items()} for panel, found in cells.items()}
    most = max(value for found in means.values() for value in found.values())
    least = min(0.0, *(value for found in means.values() for value in found.values()))
    percent = label == WHAT["recall"][1]
    most = 100.0 if percent else max(most, least + 1e-3)
    widest = max(len({length for length, _ in found}) for found in means.values())
    tallest = max(len({depth for _, depth in found}) for found in means.values())
    size = ((1.6 + 0.6 * widest) * len(states) + 1.4, (1.0 + 0.34 * tallest) * len(runs) + 0.6)
    page = Figure(figsize=size, layout="constrained")
    panels = page.subplots(len(runs), len(states), squeeze=False)
    image = None
    for line, run in zip(panels, runs, strict=True):
        for axes, state in zip(line, states, strict=True):
            found = means.get((run, state))
            if found is None:
                axes.set_axis_off()
                axes.set_title(f"{state}: {NOT_RUN}", fontsize=8)
                continue
            image = _heat(axes, found, least, most, 0 if percent else 2)
            axes.set_title(f"{run}: {state}" if state != "original" else state, fontsize=8)
    assert image is not None
    page.colorbar(image, ax=panels.ravel().tolist(), label=label)
    page.suptitle(data.title, fontsize=10)
    return page


def _heat(axes: Any, found: Mapping[tuple[int, float], float], least: float, most: float, digits: int) -> Any:
    """One heat map: lengths to the right, depths downwards, the number in each cell."""
    import numpy as np

    lengths, depths = sorted({length for length, _ in found}), sorted({depth for _, depth in found})
    values = np.array([[found.get((length, depth), np.nan) for length in lengths] for depth in depths])
    image = axes.imshow(values, vmin=least, vmax=most, aspect="auto", interpolation="nearest")
    for (i, j), value in np.ndenumerate(values):
        if not np.isnan(value):
            dark = value < least + 0.6 * (most - least)
            axes.text(
                j, i, f"{value:.{digits}f}", ha="center", va="center", fontsize=7, color="white" if dark else "black"
            )
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
    axes.set_xlabel("tokens", fontsize=8)
    axes.set_ylabel("depth", fontsize=8)
    return image


def _states(found: SavedRecord) -> dict[str, Mapping[str, Any]]:
    """The states of a record that have a needle, in the order of a conversion."""
    conversion, quality = found.record.get("conversion"), found.record["quality"]
    if isinstance(conversion, Mapping) and isinstance(known := conversion.get("points"), Mapping):
        states = {state: known.get(state) for state in STATES}
    else:
        states = {STATES[-1]: quality | {"cache_bytes_per_token": found.number("kv_cache.bytes_per_token")}}
    return {
        state: values
        for state, values in states.items()
        if isinstance(values, Mapping) and isinstance(values.get("needle"), Mapping)
    }


def _conversion(found: SavedRecord) -> tuple[str, dict[str, Any]]:
    """The target of a record's conversion with its settings; an empty name: the model keeps its attention."""
    conversion = found.record.get("conversion")
    if isinstance(conversion, Mapping):
        return str(conversion["target"]), dict(conversion["settings"])
    node = found.record["config"].get("convert") or {}
    settings = {key: value for key, value in node.items() if key not in ("_target_", "calibration", "healing")}
    name = str((found.record["config"].get("choices") or {}).get("convert") or "")
    return (name, settings) if settings else ("", {})


def _mean(values: Sequence[Mapping[str, Any]], key: str, digits: int, by: float = 1) -> str:
    """The mean of a number over some states; `not run` where one lacks it."""
    numbers = [value.get(key) for value in values]
    known = [float(number) for number in numbers if isinstance(number, int | float)]
    return f"{by * fmean(known):.{digits}f}" if known and len(known) == len(numbers) else NOT_RUN
