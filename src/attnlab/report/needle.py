"""Needle in a haystack: recall and gain over length and depth for each state of a model, as a table and heat maps.

The records are of language-modelling runs with task.score.needle.lengths. Those of a conversion have the states
original, converted and, after training, healed.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from attnlab.report import figure
from attnlab.report.table import Grid, differing, facts, finished
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Needle in a haystack"
STATES = ("original", "converted", "healed", "scored")  # scored: a run without a conversion
NAMED = ("keep", "stride", "rank", "groups")  # settings of a conversion that are always in its name
POINTS = ["run", "state", "seed", "length", "depth", "value"]
WHAT = {"recall": ("accuracy", "recall, %", 100.0), "gain": ("gain", "gain, nats per token", 1.0)}
NOTE = (
    "Recall: share of the texts in which each token of the answer is the most probable one. Gain: mean log-probability "
    "of a token of the answer in nats, minus that in the same text without the fact; above 0 the model has used it."
)


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write needle.{md,tex,csv}, and heat maps of recall and gain with their numbers as CSV; DataError without one."""
    haystacks = finished(records, _states, "with a needle in a haystack (task.score.needle.lengths=[...])")
    paths = table(haystacks).write(directory / "needle", "md", "tex", "csv")
    for name, (_, label, _) in WHAT.items():
        paths += figure.write(directory / f"needle_{name}", points(haystacks, name), partial(draw, label=label))
    return paths


def points(records: Sequence[SavedRecord], what: str) -> pd.DataFrame:
    """The data of :func:`draw`, a row for each run, state, length and depth; `what`: recall or gain."""
    key, _, factor = WHAT[what]
    rows = [
        (row["run"], row["state"], row["seed"], int(cell["length"]), f"{float(cell['depth']):g}",
         f"{factor * float(cell[key]):.6g}")
        for row in _rows(records)
        for cell in row["cells"]
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=POINTS)


def table(records: Sequence[SavedRecord]) -> Grid:
    """Perplexity, cache, recall and gain of each run and state, and recall at each length: means over seeds."""
    states = pd.DataFrame(_rows(records))
    lengths = sorted({int(cell["length"]) for cells in states["cells"] for cell in cells})
    for length in lengths:
        states[length] = [
            [cell["accuracy"] for cell in cells if int(cell["length"]) == length] for cells in states["cells"]
        ]
    columns = {  # of `states`: the header, decimals and a factor
        "perplexity": ("Perplexity", 3, 1), "cache_bytes_per_token": ("Cache, bytes per token", 0, 1),
        "accuracy": ("Recall, %", 1, 100), "gain": ("Gain, nats", 3, 1),
    } | {length: (f"Recall at {length:,}", 1, 100) for length in lengths}  # fmt: skip
    grid = Grid(TITLE, ["Run", "State", *(header for header, _, _ in columns.values())], notes=[NOTE])
    for (run, state), seeds in states.groupby(["run", "state"], sort=False):
        means = [_mean(seeds[column].explode(), digits, factor) for column, (_, digits, factor) in columns.items()]
        grid.rows.append([run, state, *means])
    grid.list_records([facts(run, saved, _asked(saved)) for saved, run in zip(records, labels(records), strict=True)])
    return grid


def _rows(records: Sequence[SavedRecord]) -> list[dict[str, Any]]:
    """The values of each state of each run with those of its needle."""
    return [
        {"run": run, "state": state, "perplexity": None, "cache_bytes_per_token": None,
         **values, **values["needle"], "seed": saved.record["seed"]}
        for saved, run in zip(records, labels(records), strict=True)
        for state, values in _states(saved).items()
    ]  # fmt: skip


def labels(records: Sequence[SavedRecord]) -> list[str]:
    """A name for each run: its conversion and the settings in which conversions of that name differ."""
    conversions = [saved.record.get("conversion", {"target": "", "settings": {}}) for saved in records]
    targets = [conversion["target"] for conversion in conversions]
    asked = [next(iter(_states(saved).values()))["needle"]["asks"] for saved in records]
    settings = [conversion["settings"] | {"asks": asks} for conversion, asks in zip(conversions, asked, strict=True)]
    words = differing(targets, settings, always=NAMED)
    return [
        f"{target or saved.record['config'].get('model') or saved.mechanism} {shown}".rstrip()
        for saved, target, shown in zip(records, targets, words, strict=True)
    ]


def draw(data: pd.DataFrame, label: str) -> "Figure":
    """Draw a heat map for each run and state, all on one scale of colours. Equal originals are drawn once.

    Of several seeds a cell has the mean, and below it the least and most.
    """
    data = data.astype({"length": int, "depth": float, "value": float})
    data["state"] = pd.Categorical(data["state"], STATES)
    maps: dict[str, pd.DataFrame] = {}
    for (run, state), cells in data.groupby(["run", "state"], sort=False, observed=True):
        seeds = cells.pivot_table(index="depth", columns="length", values="value", aggfunc=["mean", "min", "max"])
        if state == STATES[0] and state not in maps:
            maps[state] = seeds
        elif state != STATES[0] or not seeds.equals(maps[state]):
            maps[f"{run}\n{state}"] = seeds
    percent = label == WHAT["recall"][1]
    least = min(0.0, *(cells["mean"].min().min() for cells in maps.values()))
    most = 100.0 if percent else max(*(cells["mean"].max().max() for cells in maps.values()), least + 1e-3)
    tallest, widest = (max(cells["mean"].shape[axis] for cells in maps.values()) for axis in (0, 1))
    page, panels = figure.panels(len(maps), 1.4 + 0.6 * widest, 1.1 + 0.34 * tallest, most=4)
    for axes, (name, cells) in zip(panels, maps.items(), strict=True):
        image = _heat(axes, cells, least, most, 0 if percent else 2)
        axes.set_title(name, fontsize=8)
    page.colorbar(image, ax=page.axes, label=label)
    page.suptitle(TITLE, fontsize=10)
    return page


def _heat(axes: Any, cells: pd.DataFrame, least: float, most: float, digits: int) -> Any:
    """Draw one heat map: lengths to the right, depths downwards, the numbers in each cell."""
    import numpy as np

    means = cells["mean"]
    image = axes.imshow(means, vmin=least, vmax=most, aspect="auto", interpolation="nearest")
    for (i, j), value in np.ndenumerate(means.to_numpy()):
        if not np.isnan(value):
            ends = [f"{cells[end].iat[i, j]:.{digits}f}" for end in ("min", "max")]
            text = f"{value:.{digits}f}" + (f"\n{ends[0]} to {ends[1]}" if ends[0] != ends[1] else "")
            color = "white" if value < least + 0.6 * (most - least) else "black"
            axes.text(j, i, text, ha="center", va="center", fontsize=7 if "\n" not in text else 5, color=color)
    axes.set_xticks(range(means.shape[1]), [f"{length:,}" for length in means.columns], fontsize=7)
    axes.set_yticks(range(means.shape[0]), [f"{depth:g}" for depth in means.index], fontsize=7)
    axes.set_xlabel("tokens", fontsize=8)
    axes.set_ylabel("depth", fontsize=8)
    return image


def _asked(saved: SavedRecord) -> str:
    needle = next(iter(_states(saved).values()))["needle"]
    return f"{needle['trials']} texts for each length and depth, {needle['asks']} ({needle['answer_tokens']:g} tokens)"


def _states(saved: SavedRecord) -> dict[str, Mapping[str, Any]]:
    """The states of a record that have a needle, in the order of a conversion."""
    states = saved.record.get("conversion", {}).get("points")
    if states is None:
        cache = saved.number("kv_cache.bytes_per_token")
        states = {"scored": saved.record["quality"] | {"cache_bytes_per_token": cache}}
    ordered = {state: states.get(state) for state in STATES}
    return {state: values for state, values in ordered.items() if isinstance(values, dict) and "needle" in values}


def _mean(values: pd.Series, digits: int, factor: float) -> str:
    """The mean of numbers; `not run` if one is missing."""
    numbers = pd.to_numeric(values, errors="coerce")
    return NOT_RUN if numbers.empty or numbers.hasnans else f"{factor * numbers.mean():.{digits}f}"
