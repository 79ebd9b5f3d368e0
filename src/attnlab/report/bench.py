"""Records of mode=bench as a table, and ratios over the text length as a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.errors import DataError
from attnlab.report import figure
from attnlab.report.grid import Grid, facts
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADERS = ["Record", "Mechanism", "What", "Shape", "Variant", "ms", "ms least", "ms most", "Tokens/s", "Peak MiB"]
HEADERS += ["Cache MiB", "Times faster", "faster least", "faster most", "Times less peak memory", "Times less cache"]
CURVES = ["record", "mechanism", "against", "batch", "prefix", "text", "seconds", "least", "most", "peak memory"]


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write bench.md and bench.csv; where training was measured, also training.csv and training.png.

    Args:
        records: records of mode=bench; others and unfinished ones are left out.
        directory: where the files are written.

    Returns:
        The paths of the files.

    Raises:
        DataError: there is no finished record of mode=bench.
        WriteError: a file cannot be written.
    """
    benches = [found for found in records if "bench" in found.record and found.record["status"] == "finished"]
    if not benches:
        raise DataError("no finished record of mode=bench among those given")
    paths = bench_table(benches).write(directory / "bench", "md", "csv")
    sweep = curves(benches)
    if sweep.rows:
        paths += figure.write(directory / "training", sweep, plot)
    return paths


def bench_table(benches: Sequence[SavedRecord]) -> Grid:
    """A row for each variant of each measurement.

    Times are medians over rounds.  "Times faster" is the variant's time divided by the mechanism's.

    Args:
        benches: records of mode=bench.
    """
    grid = Grid("Benchmarks with random weights", HEADERS)
    grid.list_records([facts(f"R{i}", found, _protocol(found)) for i, found in enumerate(benches, 1)])
    for i, found in enumerate(benches, 1):
        bench = found.record["bench"]
        for row in bench["rows"]:
            shape = " ".join(f"{k} {v}" for k, v in row.items() if k not in ("what", "variants", "ratios"))
            pairs = {pair["against"]: pair for pair in row["ratios"]}
            for name, values in row["variants"].items():
                pair = pairs.get(name, {})
                cells = [f"R{i}", found.mechanism, row["what"], shape, name]
                grid.rows.append(cells + _measured(values) + _compared(pair))
                for what, reason in ((name, values.get(NOT_RUN)), (f"ratio against {name}", pair.get(NOT_RUN))):
                    if reason:
                        grid.notes.append(f"R{i} {row['what']} {shape}: {what} {NOT_RUN}: {reason}")
    return grid


def _protocol(found: SavedRecord) -> str:
    """How a record was measured, without what is explained at length."""
    protocol = found.record["bench"]["protocol"]
    return ", ".join(f"{k} {v}" for k, v in protocol.items() if not isinstance(v, str) or len(v) < 40)


def _measured(values: dict[str, Any]) -> list[str]:
    if NOT_RUN in values:
        return [NOT_RUN, "", "", "", "", ""]
    times = [f"{1e3 * values['seconds'][key]:.4g}" for key in ("median", "min", "max")]
    peak, cache = values["peak_memory_mib"], values.get("cache_bytes")
    memory = [f"{peak:.4g}" if isinstance(peak, int | float) else NOT_RUN]
    return [*times, f"{values['tokens_per_second']:.4g}", *memory, f"{cache['measured'] / 2**20:.4g}" if cache else ""]


def _compared(pair: dict[str, Any]) -> list[str]:
    if "seconds" not in pair:
        return [NOT_RUN if NOT_RUN in pair else "", "", "", "", ""]
    times = [f"{pair['seconds'][key]:.4g}" for key in ("median", "min", "max")]
    return times + [f"{pair[key]:.4g}" if key in pair else "" for key in ("peak_memory", "cache")]


def curves(benches: Sequence[SavedRecord]) -> Grid:
    """The measured ratios of training steps: time and peak memory of the other variant divided by the mechanism's.

    Args:
        benches: records of mode=bench.
    """
    grid = Grid("Training: ratios over the text length", CURVES)
    for i, found in enumerate(benches, 1):
        for row in found.record["bench"]["rows"]:
            for pair in row["ratios"]:
                if row["what"] == "training" and "seconds" in pair:
                    cells = [f"R{i}", found.mechanism, pair["against"], row["batch"], row["prefix"], row["text"]]
                    cells += [pair["seconds"][key] for key in ("median", "min", "max")]
                    grid.rows.append([str(cell) for cell in [*cells, pair.get("peak_memory", NOT_RUN)]])
    return grid


def plot(sweep: Grid) -> "Figure":
    """Ratios of time on the left and of peak memory on the right, a line for each record and reference.

    Args:
        sweep: as :func:`curves` gives it.
    """
    from matplotlib.figure import Figure

    panels = Figure(figsize=(11, 4.2), layout="constrained")
    time, memory = panels.subplots(1, 2)
    lines: dict[tuple[str, ...], list[list[str]]] = {}
    for row in sweep.rows:
        lines.setdefault(tuple(row[:5]), []).append(row[5:])
    for (record, mechanism, against, _, _), points in lines.items():
        points.sort(key=lambda point: int(point[0]))
        label = f"{mechanism} / {against} ({record})"
        x, y, least, most = ([float(point[k]) for point in points] for k in range(4))
        (drawn,) = time.plot(x, y, marker="o", label=label)
        time.fill_between(x, least, most, color=drawn.get_color(), alpha=0.15)
        known = [(float(point[0]), float(point[4])) for point in points if point[4] != NOT_RUN]
        memory.plot(*zip(*known, strict=True) if known else ([], []), marker="o", label=label)
    for axes, what in ((time, "times faster (median, least to most)"), (memory, "times less peak memory")):
        axes.set(xscale="log", ylim=(0, None), xlabel="text length T", ylabel=what)
        axes.set_xticks(ticks := sorted({int(row[5]) for row in sweep.rows}), [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.axhline(1, color="grey", linewidth=0.8)
    time.legend(fontsize=7)
    return panels
