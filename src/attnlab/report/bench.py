"""Records of mode=bench: a table, ratios over the text length, and decoding over the length of the context."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from attnlab.report import figure
from attnlab.report.match import composed, differences
from attnlab.report.spec import Row, Spec
from attnlab.report.table import Grid, facts, finished
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADERS = ["Record", "Mechanism", "What", "Shape", "Variant", "ms", "ms least", "ms most", "Tokens/s", "Peak MiB"]
HEADERS += ["Cache MiB", "Times faster", "faster least", "faster most", "Times less peak memory", "Times less cache"]
CURVES = ["record", "mechanism", "against", "batch", "prefix", "text", "seconds", "least", "most", "peak memory"]
ENDS = ("median", "min", "max")
CONTEXT = ["mechanism", "context", "ms", "least", "most", "CPU ms", "cache MiB", "peak MiB"]
PANELS = {"ms": "ms for a step", "cache MiB": "cache, MiB", "peak MiB": "peak memory, MiB"}
VARIANT = "variant"  # in a row's `facts`: what the record calls the mechanism
SHAPE = ("what", "batch", "prefix", "steps", "dtype")  # of the `bench` node: what a record and a row must share


def is_one(saved: SavedRecord) -> bool:
    """Whether a record is of mode=bench and finished."""
    return "bench" in saved.record and saved.record["status"] == "finished"


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write bench.{md,csv}; where training was measured, also training.{csv,png}. DataError without a record."""
    benches = finished(records, is_one, "of mode=bench")
    return bench_table(benches).write(directory / "bench", "md", "csv") + figure.write(
        directory / "training", curves(benches), plot
    )


def bench_table(benches: Sequence[SavedRecord]) -> Grid:
    """A row for each variant of each measurement.

    Times are medians over rounds. "Times faster" is the variant's time divided by the mechanism's.
    """
    grid = Grid("Benchmarks with random weights", HEADERS)
    grid.list_records([facts(f"R{i}", saved, _protocol(saved)) for i, saved in enumerate(benches, 1)])
    rows = [(f"R{i}", saved, row) for i, saved in enumerate(benches, 1) for row in saved.record["bench"]["rows"]]
    for record, saved, row in rows:
        shape = " ".join(f"{k} {v}" for k, v in row.items() if k not in ("what", "variants", "ratios"))
        pairs = {pair["against"]: pair for pair in row["ratios"]}
        for name, values in row["variants"].items():
            pair = pairs.get(name, {})
            cells = [record, saved.mechanism, row["what"], shape, name]
            grid.rows.append(cells + _measured(values) + _compared(pair))
            for what, reason in ((name, values.get(NOT_RUN)), (f"ratio against {name}", pair.get(NOT_RUN))):
                if reason:
                    grid.notes.append(f"{record} {row['what']} {shape}: {what} {NOT_RUN}: {reason}")
    return grid


def _protocol(saved: SavedRecord) -> str:
    """How a record was measured, without what is explained at length."""
    protocol = saved.record["bench"]["protocol"]
    return ", ".join(f"{k} {v}" for k, v in protocol.items() if not isinstance(v, str) or len(v) < 40)


def _measured(values: dict[str, Any]) -> list[str]:
    if NOT_RUN in values:
        return [NOT_RUN, "", "", "", "", ""]
    times = [f"{1e3 * values['seconds'][key]:.4g}" for key in ENDS]
    return [*times, f"{values['tokens_per_second']:.4g}", *memory(values, missing="")]


def memory(values: dict[str, Any], missing: str) -> list[str]:
    """Peak and cache of a variant in MiB; `missing`: the cell of a variant without a cache."""
    peak, cache = values["peak_memory_mib"], values.get("cache_bytes")
    return [
        f"{peak:.4g}" if isinstance(peak, int | float) else NOT_RUN,
        f"{cache['measured'] / 2**20:.4g}" if cache else missing,
    ]


def _compared(pair: dict[str, Any]) -> list[str]:
    if "seconds" not in pair:
        return [NOT_RUN if NOT_RUN in pair else "", "", "", "", ""]
    times = [f"{pair['seconds'][key]:.4g}" for key in ENDS]
    return times + [f"{pair[key]:.4g}" if key in pair else "" for key in ("peak_memory", "cache")]


def curves(benches: Sequence[SavedRecord]) -> pd.DataFrame:
    """The measured ratios of training steps: time and peak memory of the other variant divided by the mechanism's."""
    rows = [
        [f"R{i}", saved.mechanism, pair["against"], row["batch"], row["prefix"], row["text"],
         *(pair["seconds"][key] for key in ENDS), pair.get("peak_memory", NOT_RUN)]
        for i, saved in enumerate(benches, 1)
        for row in saved.record["bench"]["rows"]
        for pair in row["ratios"]
        if row["what"] == "training" and "seconds" in pair
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=CURVES, dtype=object)


def plot(data: pd.DataFrame) -> "Figure":
    """Ratios of time on the left and of peak memory on the right, a line for each record and reference."""
    data = data.assign(memory=pd.to_numeric(data["peak memory"], errors="coerce"), text=data["text"].astype(int))
    data["line"] = data["mechanism"] + " / " + data["against"] + " (" + data["record"] + ")"
    data["shape"] = data[["line", "batch", "prefix"]].astype(str).agg(" ".join, axis=1)  # a line of its own
    page, [[time, peak]] = figure.panels(1, 2, (11, 4.2))
    names = list(data["shape"].unique())
    figure.lines(time, data, "shape", names, "text", "seconds", ("least", "most"))
    figure.lines(peak, data.dropna(subset="memory"), "shape", names, "text", "memory")
    for axes, what in ((time, "times faster (median, least to most)"), (peak, "times less peak memory")):
        axes.set(xscale="log", ylim=(0, None), xlabel="text length T", ylabel=what)
        axes.set_xticks(ticks := sorted(data["text"].unique()), [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.axhline(1, color="grey", linewidth=0.8)
    handles, _ = time.get_legend_handles_labels()
    time.legend(handles, list(data.drop_duplicates("shape")["line"]), fontsize=7)
    return page


def over_the_context(spec: Spec, records: Sequence[SavedRecord]) -> pd.DataFrame:
    """A row for each mechanism and length: wall time in ms of a cached step of one layer, median, least and most."""
    rows = []
    for row in spec.rows:
        bench = composed(*spec.overrides(row)).bench
        saved = newest(spec, row, records)
        measured = {} if saved is None else _by_length(saved, row)
        rows += [[row.label, length, *_cells(measured.get(length), bench.steps)] for length in _contexts(bench.context)]
    return pd.DataFrame(rows, columns=CONTEXT)


def context_table(spec: Spec, records: Sequence[SavedRecord]) -> Grid:
    """Time and cache of each mechanism at each length, and the commands that are still to be run."""
    points = over_the_context(spec, records)
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
    grid.notes += spec.commands([row for row in spec.rows if newest_of[row.label] is None])
    return grid


def newest(spec: Spec, row: Row, records: Sequence[SavedRecord]) -> SavedRecord | None:
    """The newest finished record of a row's shape, recipe and lengths that has measured the row's mechanism."""
    overrides = spec.overrides(row)
    cfg = composed(*overrides)
    shape = {key: cfg.bench[key] for key in SHAPE}
    for saved in filter(is_one, reversed(records)):
        about = saved.record["config"].get("bench") or {}
        alike = {key: about.get(key) for key in SHAPE} == shape and not differences(saved, overrides)
        if alike and set(_contexts(cfg.bench.context)) <= _by_length(saved, row).keys():
            return saved
    return None


def context_plot(points: pd.DataFrame, title: str = "") -> "Figure":
    """Panels of time, cache and, where it was measured, peak memory over the length; the names stand below."""
    from matplotlib.ticker import LogFormatter, StrMethodFormatter

    numbers = {name: pd.to_numeric(points[name], errors="coerce") for name in CONTEXT[1:]}
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


def _by_length(saved: SavedRecord, row: Row) -> dict[int, dict[str, Any]]:
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
