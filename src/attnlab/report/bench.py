"""Records of mode=bench as a table, and ratios over the text length as a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from attnlab.report import figure
from attnlab.report.frame import finished
from attnlab.report.grid import Grid, facts
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADERS = ["Record", "Mechanism", "What", "Shape", "Variant", "ms", "ms least", "ms most", "Tokens/s", "Peak MiB"]
HEADERS += ["Cache MiB", "Times faster", "faster least", "faster most", "Times less peak memory", "Times less cache"]
CURVES = ["record", "mechanism", "against", "batch", "prefix", "text", "seconds", "least", "most", "peak memory"]
ENDS = ("median", "min", "max")


def is_one(saved: SavedRecord) -> bool:
    """Whether a record is of mode=bench and finished."""
    return "bench" in saved.record and saved.record["status"] == "finished"


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write bench.{md,csv}; where training was measured, also training.{csv,png}. Return their paths.

    Raises:
        DataError: there is no finished record of mode=bench.
    """
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
    for i, saved in enumerate(benches, 1):
        for row in saved.record["bench"]["rows"]:
            shape = " ".join(f"{k} {v}" for k, v in row.items() if k not in ("what", "variants", "ratios"))
            pairs = {pair["against"]: pair for pair in row["ratios"]}
            for name, values in row["variants"].items():
                pair = pairs.get(name, {})
                cells = [f"R{i}", saved.mechanism, row["what"], shape, name]
                grid.rows.append(cells + _measured(values) + _compared(pair))
                for what, reason in ((name, values.get(NOT_RUN)), (f"ratio against {name}", pair.get(NOT_RUN))):
                    if reason:
                        grid.notes.append(f"R{i} {row['what']} {shape}: {what} {NOT_RUN}: {reason}")
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
