"""Decoding over the length of the context, all mechanisms side by side, from records of mode=bench."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnlab.report.grid import Grid
from attnlab.report.match import composed, differences
from attnlab.report.points import STYLES, name_below
from attnlab.report.spec import Row, Spec
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANT = "variant"  # in a row's `facts`: what the record calls the mechanism
SHAPE = ("what", "batch", "prefix", "steps", "dtype")  # of the `bench` node: what a record and a row must share
HEADERS = ["mechanism", "context", "ms", "least", "most", "CPU ms", "cache MiB", "peak MiB"]
PANELS = {"ms": "ms for a step", "cache MiB": "cache, MiB", "peak MiB": "peak memory, MiB"}


def data(spec: Spec, records: Sequence[SavedRecord]) -> Grid:
    """A row for each mechanism and each length of its command; `not run` where no record has it.

    ms: wall time of one cached step of one layer, median, least and most over the rounds.

    Args:
        spec: with the name of each row's mechanism as its fact "variant", and commands of mode=bench.
        records: every record there is, the oldest first.
    """
    grid = Grid(spec.title, HEADERS)
    for row in spec.rows:
        cfg = composed(*spec.overrides(row))
        found = newest(spec, row, records)
        measured = {} if found is None else _measured(found, row)
        for context in _contexts(cfg.bench.context):
            grid.rows.append([row.label, str(context), *_cells(measured.get(context), int(cfg.bench.steps))])
    return grid


def table(spec: Spec, records: Sequence[SavedRecord]) -> Grid:
    """The same as a table: time and cache of each mechanism at each length, and the commands that are still to be run.

    Args:
        spec: as for :func:`data`.
        records: the same.
    """
    points = data(spec, records)
    lengths = sorted({int(row[1]) for row in points.rows})
    grid = Grid(
        spec.title, ["Mechanism", *(f"ms at {n:,}" for n in lengths), *(f"cache MiB at {n:,}" for n in lengths)]
    )
    at = {(row[0], int(row[1])): dict(zip(HEADERS, row, strict=True)) for row in points.rows}
    for row in spec.rows:
        cells = [at.get((row.label, length), {}) for length in lengths]
        times = [f"{one['ms']} ({one['least']}–{one['most']})" if one.get("least") else NOT_RUN for one in cells]
        grid.rows.append([row.label, *times, *(one.get("cache MiB", NOT_RUN) for one in cells)])
    grid.notes = [f"{spec.source}.", *(text.strip() for text in spec.notes.values())]
    missing: dict[str, list[str]] = {}
    used: dict[str, SavedRecord] = {}
    for row in spec.rows:
        found = newest(spec, row, records)
        if found is None:
            missing.setdefault(spec.row_command(row), []).append(row.label)
        else:
            used[found.name] = found
    for name, found in used.items():
        environment, about = found.record["environment"], found.record["bench"]["protocol"]
        busy = f"; {about['busy_cores_before']} cores busy before" if "busy_cores_before" in about else ""
        grid.notes.append(
            f"`{name}`: {environment['device']}, {environment['threads']} threads{busy}; {about['rounds']} rounds; "
            f"git {environment['git']}"
        )
    grid.notes += [f"{NOT_RUN}: {', '.join(labels)}: `{command}`" for command, labels in missing.items()]
    return grid


def newest(spec: Spec, row: Row, records: Sequence[SavedRecord]) -> SavedRecord | None:
    """The newest finished record of a row's shape, recipe and lengths that has measured the row's mechanism.

    Args:
        spec: the specification.
        row: one of its rows.
        records: the oldest first.
    """
    overrides = spec.overrides(row)
    cfg = composed(*overrides)
    wanted = {key: cfg.bench[key] for key in SHAPE}
    lengths = set(_contexts(cfg.bench.context))
    for found in reversed(records):
        about = found.record["config"].get("bench") or {}
        if found.record["status"] != "finished" or "bench" not in found.record:
            continue
        alike = {key: about.get(key) for key in SHAPE} == wanted and not differences(found, overrides)
        if alike and lengths <= _measured(found, row).keys():
            return found
    return None


def draw(points: Grid) -> "Figure":
    """Panels of time, cache and, where it was measured, peak memory over the length; the names stand below.

    Args:
        points: as :func:`data` gives them.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, StrMethodFormatter

    known = [row for row in points.rows if row[2] != NOT_RUN]
    names = list(dict.fromkeys(row[0] for row in known))
    shown = [name for name in PANELS if any(_number(row, name) for row in known)]
    page = Figure(figsize=(1 + 4.2 * len(shown), 4), layout="constrained")
    for axes, what in zip(page.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for number, name in enumerate(names):
            mine = sorted((row for row in known if row[0] == name and _number(row, what)), key=lambda row: int(row[1]))
            values = [_number(row, what) for row in mine]
            ends = [[float(row[HEADERS.index(end)]) for row in mine] for end in ("least", "most")]
            spread = [[abs(v - e) for v, e in zip(values, end, strict=True)] for end in ends] if what == "ms" else None
            axes.errorbar(
                [int(row[1]) for row in mine], values, yerr=spread, fmt="o" + STYLES[number // 10 % len(STYLES)],
                color=f"C{number % 10}", label=name, markersize=4, capsize=2,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="cached positions", ylabel=PANELS[what])
        axes.set_xticks(ticks := sorted({int(row[1]) for row in known}), [f"{tick:,}" for tick in ticks])
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    page.suptitle(points.title, fontsize=10)
    name_below(page, names)
    return page


def _contexts(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _measured(found: SavedRecord, row: Row) -> dict[int, dict[str, Any]]:
    """What a record has of a row's mechanism, by the length; rows of the batch that were reordered do not count."""
    rows = [one for one in found.record["bench"]["rows"] if one["what"] == "decoding" and not one["reorder"]]
    measured = {one.get("context", 0): one["variants"].get(row.facts[VARIANT], {}) for one in rows}
    return {length: values for length, values in measured.items() if "seconds" in values}


def _cells(values: dict[str, Any] | None, steps: int) -> list[str]:
    """The cells after mechanism and context."""
    if values is None:
        return [NOT_RUN, "", "", "", NOT_RUN, NOT_RUN]
    times = [f"{1e3 * values['seconds'][key] / steps:.4g}" for key in ("median", "min", "max")]
    processor = values.get("cpu_seconds")
    times.append(f"{1e3 * processor['median'] / steps:.4g}" if processor else "")
    peak, cache = values["peak_memory_mib"], values.get("cache_bytes")
    held = f"{cache['measured'] / 2**20:.4g}" if cache else NOT_RUN
    return [*times, held, f"{peak:.4g}" if isinstance(peak, int | float) else NOT_RUN]


def _number(row: Sequence[str], what: str) -> float:
    """A cell as a number; 0 where there is none, which a logarithmic axis cannot show."""
    cell = row[HEADERS.index(what)]
    return 0.0 if cell in ("", NOT_RUN) else float(cell)
