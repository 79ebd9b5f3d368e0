"""Decoding over the length of the context, all mechanisms side by side, from records of mode=bench."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from attnlab.report import figure
from attnlab.report.bench import ENDS, is_one, memory
from attnlab.report.grid import Grid
from attnlab.report.match import composed, differences
from attnlab.report.spec import Row, Spec
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANT = "variant"  # in a row's `facts`: what the record calls the mechanism
SHAPE = ("what", "batch", "prefix", "steps", "dtype")  # of the `bench` node: what a record and a row must share
HEADERS = ["mechanism", "context", "ms", "least", "most", "CPU ms", "cache MiB", "peak MiB"]
PANELS = {"ms": "ms for a step", "cache MiB": "cache, MiB", "peak MiB": "peak memory, MiB"}


def data(spec: Spec, records: Sequence[SavedRecord]) -> pd.DataFrame:
    """A row for each mechanism and each length of its command; `not run` where no record has it.

    ms: wall time of one cached step of one layer, median, least and most over the rounds.

    Args:
        spec: with the name of each row's mechanism as its fact "variant", and commands of mode=bench.
        records: the oldest first.
    """
    rows = []
    for row in spec.rows:
        bench = composed(*spec.overrides(row)).bench
        saved = newest(spec, row, records)
        measured = {} if saved is None else _measured(saved, row)
        rows += [[row.label, length, *_cells(measured.get(length), bench.steps)] for length in _contexts(bench.context)]
    return pd.DataFrame(rows, columns=HEADERS)


def table(spec: Spec, records: Sequence[SavedRecord]) -> Grid:
    """Time and cache of each mechanism at each length, and the commands that are still to be run."""
    points = data(spec, records)
    lengths = sorted(points["context"].unique())
    headers = ["Mechanism", *(f"ms at {n:,}" for n in lengths), *(f"cache MiB at {n:,}" for n in lengths)]
    grid = Grid(spec.title, headers, notes=[f"{spec.source}.", *(text.strip() for text in spec.notes.values())])
    points["time"] = points["ms"] + " (" + points["least"] + "–" + points["most"] + ")"
    points.loc[points["least"] == "", "time"] = NOT_RUN
    wide = points.pivot(index="mechanism", columns="context", values=["time", "cache MiB"]).fillna(NOT_RUN)
    grid.rows = [[row.label, *wide.loc[row.label]] for row in spec.rows]
    newest_of = {row.label: newest(spec, row, records) for row in spec.rows}
    for saved in {saved.name: saved for saved in newest_of.values() if saved}.values():
        environment, about = saved.record["environment"], saved.record["bench"]["protocol"]
        busy = f"; {about['busy_cores_before']} cores busy before" if "busy_cores_before" in about else ""
        grid.notes.append(
            f"`{saved.name}`: {environment['device']}, {environment['threads']} threads{busy}; {about['rounds']} "
            f"rounds; git {environment['git']}"
        )
    missing: dict[str, list[str]] = {}
    for row in spec.rows:
        if newest_of[row.label] is None:
            missing.setdefault(spec.row_command(row), []).append(row.label)
    grid.notes += [f"{NOT_RUN}: {', '.join(labels)}: `{command}`" for command, labels in missing.items()]
    return grid


def newest(spec: Spec, row: Row, records: Sequence[SavedRecord]) -> SavedRecord | None:
    """The newest finished record of a row's shape, recipe and lengths that has measured the row's mechanism.

    Args:
        records: the oldest first.
    """
    overrides = spec.overrides(row)
    cfg = composed(*overrides)
    shape = {key: cfg.bench[key] for key in SHAPE}
    for saved in filter(is_one, reversed(records)):
        about = saved.record["config"].get("bench") or {}
        alike = {key: about.get(key) for key in SHAPE} == shape and not differences(saved, overrides)
        if alike and set(_contexts(cfg.bench.context)) <= _measured(saved, row).keys():
            return saved
    return None


def draw(points: pd.DataFrame, title: str = "") -> "Figure":
    """Panels of time, cache and, where it was measured, peak memory over the length; the names stand below."""
    from matplotlib.ticker import LogFormatter, StrMethodFormatter

    numbers = {name: pd.to_numeric(points[name], errors="coerce") for name in HEADERS[1:]}
    known = points.assign(**numbers).dropna(subset="ms")
    names = list(known["mechanism"].unique())
    shown = [name for name in PANELS if (known[name] > 0).any()]
    page, [row] = figure.panels(1, len(shown), (1 + 4.2 * len(shown), 4))
    for axes, what in zip(row, shown, strict=True):
        ends = ("least", "most") if what == "ms" else ()
        positive = known[known[what] > 0]  # a logarithmic axis cannot show 0
        figure.lines(axes, positive, "mechanism", names, "context", what, ends, markersize=4)
        figure.plain(axes, xscale="log", yscale="log", xlabel="cached positions", ylabel=PANELS[what])
        axes.set_xticks(ticks := sorted(known["context"].unique()), [f"{tick:,}" for tick in ticks])
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
    page.suptitle(title, fontsize=10)
    figure.name_below(page)
    return page


def _contexts(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _measured(saved: SavedRecord, row: Row) -> dict[int, dict[str, Any]]:
    """What a record has of a row's mechanism, by the length; measurements of a reordered batch do not count."""
    return {
        timed.get("context", 0): timed["variants"][row.facts[VARIANT]]
        for timed in saved.record["bench"]["rows"]
        if timed["what"] == "decoding" and not timed["reorder"]
        and "seconds" in timed["variants"].get(row.facts[VARIANT], {})
    }  # fmt: skip


def _cells(values: dict[str, Any] | None, steps: int) -> list[str]:
    """The cells after mechanism and context."""
    if values is None:
        return [NOT_RUN, "", "", "", NOT_RUN, NOT_RUN]
    times = [f"{1e3 * values['seconds'][key] / steps:.4g}" for key in ENDS]
    processor = values.get("cpu_seconds")
    times.append(f"{1e3 * processor['median'] / steps:.4g}" if processor else "")
    peak, cache = memory(values, missing=NOT_RUN)
    return [*times, cache, peak]
