"""Records of mode=bench: a table, ratios over the text length, decoding over the context, and every ratio in SPEED.md.

SPEED.md has a table for each kind of measurement, with a line for each ratio. A record that compares one mechanism with
many over several lengths has its own tables, with a line for each mechanism and a column for each length.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from attnlab.errors import DataError
from attnlab.report import figure
from attnlab.report.match import composed, is_recipe
from attnlab.report.spec import Row, Spec
from attnlab.report.table import Grid, facts, finished
from attnlab.run.files import write_text
from attnlab.run.markup import code, plain
from attnlab.run.record import NOT_RUN, RECORD
from attnlab.run.store import PACKED, SavedRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADERS = ["Record", "Mechanism", "What", "Shape", "Variant", "ms", "ms least", "ms most", "Tokens/s", "Peak MiB"]
HEADERS += ["Cache MiB", "Times faster", "faster least", "faster most", "Times less peak memory", "Times less cache"]
CURVES = ["record", "mechanism", "against", "batch", "prefix", "text", "seconds", "least", "most", "peak memory"]
RATIOS = {"seconds": "times faster (median, least to most)", "memory": "times less peak memory"}
ENDS = ("median", "min", "max")
CONTEXT = ["mechanism", "context", "ms", "least", "most", "CPU ms", "cache MiB", "peak MiB"]
PANELS = {"ms": "ms for a step", "cache MiB": "cache, MiB", "peak MiB": "peak memory, MiB"}
VARIANT = "variant"  # key of a row's `facts`: the mechanism's name in the record
SHAPE = ("what", "batch", "prefix", "steps", "dtype")  # keys of `bench` that a record shares with its row

TITLE = "How fast: every measured ratio"
SPEED = ["What", "Compared with", "Shape", "Times faster", "By CPU seconds", "Times less memory", "Times less cache"]
SPEED += ["Machine", "Record"]
ABOUT = """\
Random weights. A mechanism and what it is compared with ran in turns, after the mechanism had been found equal to its
reference in float64. "Times faster" is the other's wall-clock time divided by the mechanism's: median (least to most)
over the rounds; below 1 the mechanism is slower. Where other programs kept cores busy, the ratio of CPU seconds is the
better one. "Times less memory" divides the peaks, each of a process of its own. Every record has its command.
In the tables of all mechanisms a ratio is the mechanism's number by that of the first line: below 1 it is faster or
smaller.

`mha` is multi-head attention through `scaled_dot_product_attention` with a preallocated cache, "published" the
published algorithm with the same weights, `..._copied` our own with the prefix stored once for each hypothesis, `dense`
the model before compression, `loop` a loop over heads of different ranks.
"""
KINDS = {
    "training": "Training step", "model": "Training step of a whole model", "decoding": "Decoding, token by token",
    "beam": "Beam search", "forward": "Forward pass of a compressed attention layer",
    "projections": "Projections of a compressed attention layer", "whole": "Forward pass of a whole compressed model",
    "decomposition": "Decomposition of a layer", "parts": "Beam search: where the time goes",
}  # fmt: skip
PARTS = ("prefix", "attention", "feed_forward", "vocabulary", "search", "reorder")  # of a row's `parts`
PART_HEADERS = [
    "Mechanism",
    "Shape",
    *(f"{part.replace('_', ' ')}, ms" for part in PARTS),
    "At most times faster",
    *SPEED[-2:],
]
PART_NOTE = (
    "One search, timed by itself. Feed forward includes norms and embedding, search the softmax over the vocabulary. "
    "At most times faster: if attention, with its projections, and the reordering of its cache took no time"
)
UNITS = {"text": "{} positions", "prefix": "prefix {}", "context": "{} cached", "steps": "{} steps", "beam": "beam {}"}
UNITS |= {"batch": "batch {}", "tokens": "{} tokens", "multiply_adds_percent": "{} % of the multiply-adds"}
UNITS |= {"rate": "rate {}", "ranks": "ranks {}", "tensors": "tensors {}"}
LEAST_PEAK = 1.0  # MiB: below it the ratio of two peaks is noise
LEAST = 4  # references from which on a record has tables by the length
SHARE = "share_outside_products"
MEASURES = {
    "seconds": "time by wall clock, over {}'s of the same round",
    "peak_memory": "peak memory, over {}'s",
    "cache": "cache, over {}'s",
    SHARE: "share of the time outside of matrix products",
}
LENGTHS = {"training": "text", "model": "text", "decoding": "context", "generation": "context", "prefill": "text"}
NOISE = (
    "Products were timed in another run than the whole: these shares are off by ten percent or so either way; "
    "disturbed: other work slowed the products down"
)


def is_one(saved: SavedRecord) -> bool:
    """Whether a record is of mode=bench and finished."""
    return "bench" in saved.record and saved.record["status"] == "finished"


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write bench.{md,csv} and, for measured training steps, training.{csv,png}. DataError without a record."""
    benches = finished(records, is_one, "of mode=bench")
    return bench_table(benches).write(directory / "bench", "md", "csv") + figure.write(
        directory / "training", curves(benches), plot
    )


def bench_table(benches: Sequence[SavedRecord]) -> Grid:
    """A row for each variant of each measurement: medians over rounds, and its time divided by the mechanism's."""
    grid = Grid("Benchmarks with random weights", HEADERS)
    named = []
    for i, saved in enumerate(benches, 1):
        protocol = saved.record["bench"]["protocol"].items()
        short = ", ".join(f"{k} {v}" for k, v in protocol if not isinstance(v, str) or len(v) < 40)
        named.append(facts(f"R{i}", saved, short))
    grid.list_records(named)
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


def _measured(values: dict[str, Any]) -> list[str]:
    if NOT_RUN in values:
        return [NOT_RUN, "", "", "", "", ""]
    times = [f"{1e3 * values['seconds'][key]:.4g}" for key in ENDS]
    return [*times, f"{values['tokens_per_second']:.4g}", *memory(values, missing="")]


def memory(values: dict[str, Any], missing: str) -> list[str]:
    """Peak and cache of a variant in MiB; `missing`: the cell of a variant without a cache."""
    peak, cache = values["peak_memory_mib"], values.get("cache_bytes")
    shown = f"{peak:.4g}" if isinstance(peak, int | float) else NOT_RUN
    return [shown, f"{cache['measured'] / 2**20:.4g}" if cache else missing]


def _compared(pair: dict[str, Any]) -> list[str]:
    if "seconds" not in pair:
        return [NOT_RUN if NOT_RUN in pair else "", "", "", "", ""]
    times = [f"{pair['seconds'][key]:.4g}" for key in ENDS]
    return times + [f"{pair[key]:.4g}" if key in pair else "" for key in ("peak_memory", "cache")]


def curves(benches: Sequence[SavedRecord]) -> pd.DataFrame:
    """The measured ratios of training steps: the other variant's time and peak memory divided by the mechanism's."""
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
    """Draw ratios of time on the left and of peak memory on the right, a line for each record and reference.

    Mechanisms whose names begin with one word have a row of panels, if it has at least three points.
    """
    data = data.assign(memory=pd.to_numeric(data["peak memory"], errors="coerce"), text=data["text"].astype(int))
    data["line"] = data["mechanism"] + " / " + data["against"] + " (" + data["record"] + ")"
    for key in ("batch", "prefix"):  # a line of its own
        several = data.groupby("line")[key].transform("nunique") > 1
        data["line"] += (f" {key} " + data[key].astype(str)).where(several, "")
    kinds = data["mechanism"].str.split(" ").str[0]
    data["kind"] = kinds if kinds.value_counts().min() > 2 else ""
    parts = [
        (rows, what) for _, rows in data.groupby("kind", sort=False) for what in RATIOS if rows[what].notna().any()
    ]
    page, panels = figure.panels(len(parts), 7, 4.2, most=2)
    for axes, (rows, what) in zip(panels, parts, strict=True):
        names, ends = list(rows["line"].unique()), ("least", "most") if what == "seconds" else ()
        figure.lines(axes, rows.dropna(subset=what), "line", names, "text", what, ends)
        _over_lengths(axes, rows["text"], "text length T", RATIOS[what])
        axes.axhline(1, color="grey", linewidth=0.8)
    figure.name_ends(page)
    return page


def _over_lengths(axes: "Axes", lengths: pd.Series, label: str, what: str) -> None:
    """Make both axes of a panel logarithmic, with a tick at each length."""
    figure.plain(axes, xlabel=label, ylabel=what)
    figure.logarithmic(axes, "x", "y")
    axes.set_xticks(ticks := sorted(lengths.unique()), [f"{tick:,}" for tick in ticks], fontsize=7)


def over_the_context(spec: Spec, records: Sequence[SavedRecord]) -> pd.DataFrame:
    """A row for each mechanism and length: wall time of a cached step of one layer in ms (median, least, most)."""
    rows = []
    for row in spec.rows:
        bench = composed(*spec.overrides(row)).bench
        saved = newest(spec, row, records)
        measured = {} if saved is None else _by_length(saved, row)
        rows += [[row.label, length, *_cells(measured.get(length), bench.steps)] for length in bench.context]
    return pd.DataFrame(rows, columns=CONTEXT)


def context_table(spec: Spec, records: Sequence[SavedRecord]) -> Grid:
    """Time and cache of each mechanism at each length, and the commands of the mechanisms without a record."""
    points = over_the_context(spec, records)
    lengths = sorted(points["context"].unique())
    headers = ["Mechanism", *(f"ms at {n:,}" for n in lengths), *(f"cache MiB at {n:,}" for n in lengths)]
    grid = Grid(spec.title, headers, notes=[f"{spec.source}.", *(text.strip() for text in spec.notes.values())])
    measured = points["ms"] + " (" + points["least"] + "–" + points["most"] + ")"
    points["time"] = measured.where(points["least"] != "", NOT_RUN)
    wide = points.pivot(index="mechanism", columns="context", values=["time", "cache MiB"]).fillna(NOT_RUN)
    grid.rows = [[row.label, *wide.loc[row.label]] for row in spec.rows]
    newest_of = {row.label: newest(spec, row, records) for row in spec.rows}
    for saved in {saved.name: saved for saved in newest_of.values() if saved}.values():
        environment, about = saved.record["environment"], saved.record["bench"]["protocol"]
        machine = f"`{saved.name}`: {environment['device']}, {environment['threads']} threads"
        busy = f"; {about['busy_cores_before']} cores busy before" if "busy_cores_before" in about else ""
        grid.notes.append(f"{machine}{busy}; {about['rounds']} rounds; git {environment['git']}")
    grid.notes += spec.commands([row for row in spec.rows if newest_of[row.label] is None])
    return grid


def newest(spec: Spec, row: Row, records: Sequence[SavedRecord]) -> SavedRecord | None:
    """The newest finished record with a row's shape, recipe and lengths that has measured the row's mechanism."""
    overrides = spec.overrides(row)
    cfg = composed(*overrides)
    shape = {key: cfg.bench[key] for key in SHAPE}
    for saved in filter(is_one, reversed(records)):
        about = saved.record["config"].get("bench") or {}
        alike = {key: about.get(key) for key in SHAPE} == shape and is_recipe(saved, overrides)
        if alike and set(cfg.bench.context) <= _by_length(saved, row).keys():
            return saved
    return None


def context_plot(points: pd.DataFrame, title: str = "") -> "Figure":
    """Draw panels of time, cache and, if measured, peak memory over the length."""
    numbers = {name: pd.to_numeric(points[name], errors="coerce") for name in CONTEXT[1:]}
    known = points.assign(**numbers).dropna(subset="ms")
    names = list(known["mechanism"].unique())
    shown = [name for name in PANELS if (known[name] > 0).any()]
    page, panels = figure.panels(len(shown), 5.4, 4)
    for axes, what in zip(panels, shown, strict=True):
        ends = ("least", "most") if what == "ms" else ()
        positive = known[known[what] > 0]  # a logarithmic axis cannot show 0
        figure.lines(axes, positive, "mechanism", names, "context", what, ends)
        _over_lengths(axes, known["context"], "cached positions", PANELS[what])
    page.suptitle(title, fontsize=10)
    figure.name_ends(page)
    return page


def _by_length(saved: SavedRecord, row: Row) -> dict[int, dict[str, Any]]:
    """The measurements of a row's mechanism in a record, by length; those of a reordered batch do not count."""
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


def render_speeds(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write SPEED.md, whose links to the records are relative to `directory`. DataError without a ratio."""
    kinds: dict[str, Grid] = {}
    by_length: list[Grid] = []
    for saved in sorted(filter(is_one, records), key=lambda saved: saved.path.as_posix()):
        rows = saved.record["bench"]["rows"]
        if rows and all(_is_by_length(row) for row in rows):
            by_length += grids(saved, ", ".join(_place(saved, directory)))
            continue
        for row in rows:
            if row["ratios"]:
                grid = kinds.setdefault(row["what"], Grid(KINDS.get(row["what"]) or plain(row["what"]), SPEED))
                about = saved.record["bench"]["protocol"].get(row["what"])
                grid.notes = [f"Measured: {about}"] if about else grid.notes
                grid.rows += [_line(saved, row, pair, directory) for pair in row["ratios"]]
            if lines := [_parts(saved, row, name, directory) for name, v in row["variants"].items() if "parts" in v]:
                kinds.setdefault("parts", Grid(KINDS["parts"], PART_HEADERS, notes=[PART_NOTE])).rows += lines
    if not kinds and not by_length:
        raise DataError("no finished record of mode=bench with a ratio among these records")
    parts = [f"# {TITLE}\n\n{ABOUT}", *["## All mechanisms by length\n"] * bool(by_length)]
    parts += [f"##{grid.markdown()}" for grid in by_length]
    parts += [f"#{_filled(kinds[kind]).markdown()}" for kind in dict.fromkeys([*KINDS, *kinds]) if kind in kinds]
    path = directory / "SPEED.md"
    write_text(path, "\n".join(parts))
    return [path]


def grids(saved: SavedRecord, place: str) -> list[Grid]:
    """The tables of a record by length: times, peak memory, caches and, if measured, shares outside matrix products."""
    kinds: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in saved.record["bench"]["rows"]:
        kinds.setdefault((row["what"], bool(row.get("reorder"))), []).append(row)
    tables = []
    for (what, reorder), rows in kinds.items():
        of = rows[0]["ratios"][0]["of"]
        fixed = ", ".join(f"{key} {rows[0][key]}" for key in ("batch", "prefix", "steps") if rows[0].get(key))
        width = (saved.record["config"]["task"].get("model") or {}).get("d_model")
        title = f"{plain(what)}{', rows reordered' * reorder}, {f'd {width}, ' * bool(width)}{fixed}"
        headers = ["Mechanism", *(f"{row[LENGTHS[what]]} positions" for row in rows)]
        names = [of, *(name for name in rows[0]["variants"] if name != of)]
        for measure, words in MEASURES.items():
            lines = [[f"`{name}`", *(_number(row, name, of, measure) for row in rows)] for name in names]
            if any(cell for line in lines[1:] for cell in line[1:] if not cell.startswith(NOT_RUN)):
                notes = [NOISE] * (measure == SHARE) + [place]
                tables.append(Grid(f"{title}: {words.format(code(of))}", headers, lines, notes))
    return tables


def _is_by_length(row: dict[str, Any]) -> bool:
    """Whether a measurement compares one mechanism with many."""
    mechanisms = {pair["of"] for pair in row["ratios"]}
    return row["what"] in LENGTHS and len(row["ratios"]) >= LEAST and len(mechanisms) == 1


def _number(row: dict[str, Any], name: str, of: str, measure: str) -> str:
    """A share, the number of the mechanism `of`, or the ratio of another to it: median (least to most) of a time."""
    if measure == SHARE:
        share = row["variants"].get(name, {}).get(SHARE)
        if isinstance(share, float) and share < 0:  # the products alone took longer than the whole
            return "disturbed"
        return f"{share:.0%}" if isinstance(share, float) else ""
    if name == of:
        return _absolute(row["variants"][of], measure)
    pair: dict[str, Any] = next((pair for pair in row["ratios"] if pair["against"] == name), {})
    if NOT_RUN in pair:
        return f"{NOT_RUN}: {pair[NOT_RUN]}" if measure == "seconds" else ""
    value = pair.get(measure)
    return _spread(value) if isinstance(value, dict) else f"{value:.3g}" if isinstance(value, int | float) else ""


def _absolute(variant: dict[str, Any], measure: str) -> str:
    if measure == "seconds":
        return f"{1e3 * variant['seconds']['median']:.3g} ms" if "seconds" in variant else NOT_RUN
    value = variant.get("peak_memory_mib")
    if measure == "cache":
        value = variant["cache_bytes"]["measured"] / 2**20 if "cache_bytes" in variant else None
    return f"{value:.3g} MiB" if isinstance(value, int | float) else ""


def _filled(grid: Grid) -> Grid:
    """The table without its empty columns."""
    filled = [i for i in range(len(grid.headers)) if any(row[i] for row in grid.rows)]
    headers, *rows = ([row[i] for i in filled] for row in [grid.headers, *grid.rows])
    return Grid(grid.title, headers, rows, grid.notes)


def _line(saved: SavedRecord, row: dict[str, Any], pair: dict[str, Any], directory: Path) -> list[str]:
    """The cells of one ratio. A ratio that was not measured gives the reason."""
    record = _place(saved, directory)
    other = "published" if pair["against"] == f"published_{pair['of']}" else f"`{pair['against']}`"
    start = [_what(saved), other, _shape(saved, row)]
    if "seconds" not in pair:
        return [*start, f"{NOT_RUN}: {pair[NOT_RUN]}", "", "", "", *record]
    peak = row["variants"].get(pair["of"], {}).get("peak_memory_mib")
    times = [_spread(pair[key]) if key in pair else "" for key in ("seconds", "cpu_seconds")]
    sizes = [f"{pair[key]:.3g}" if key in pair else "" for key in ("peak_memory", "cache")]
    if not isinstance(peak, int | float) or peak < LEAST_PEAK:
        sizes[0] = ""
    return [*start, *times, *sizes, *record]


def _parts(saved: SavedRecord, row: dict[str, Any], name: str, directory: Path) -> list[str]:
    """The cells of the parts of a variant's search."""
    found = row["variants"][name]
    cells = [*(f"{1e3 * found['parts'][part]:.1f}" for part in PARTS), f"{found['most_times_faster']:.3g}"]
    return [f"`{name}`", _shape(saved, row), *cells, *_place(saved, directory)]


def _place(saved: SavedRecord, directory: Path) -> list[str]:
    """The machine, and the record's name with a link to its file, which may be a packed one."""
    environment, protocol = saved.record["environment"], saved.record["bench"]["protocol"]
    device, threads = environment["device"].removeprefix("cpu: "), environment["threads"]
    place = f"{device}, {threads} thread{'s' if threads != 1 else ''}"
    place += f"; {protocol['busy_cores_before']:.1f} cores busy" if "busy_cores_before" in protocol else ""
    path = next(
        (f for f in (saved.path, *(folder / PACKED for folder in saved.path.parents)) if f.exists()), saved.path
    )
    name = saved.path.parent.name if saved.path.name == RECORD else saved.path.stem
    return [place, f"[{name}]({Path(os.path.relpath(path, directory)).as_posix()})"]


def _what(saved: SavedRecord) -> str:
    """The mechanism, or the compression method with the settings of its command."""
    if "compression" not in saved.record:
        return f"`{saved.mechanism}`"
    words = [word.removeprefix("compress.") for word in shlex.split(saved.record["command"])]
    keys = {"model", "rank", *(saved.record["config"].get("compress") or {})}
    settings = [word for word in words if word.partition("=")[0] in keys]
    return f"`{' '.join([saved.record['compress'], *settings])}`"


def _shape(saved: SavedRecord, row: dict[str, Any]) -> str:
    """The width of the layer and all sizes other than zero, in words."""
    width = (saved.record["config"]["task"].get("model") or {}).get("d_model")
    words = [f"d {width}"] if width else []
    words += [form.format(row[key]) for key, form in UNITS.items() if row.get(key)]
    return ", ".join(words + (["rows reordered"] if row.get("reorder") else []))


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:.3g} ({values['min']:.3g} to {values['max']:.3g})"
