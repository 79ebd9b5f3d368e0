"""Every ratio of records of mode=bench in one page, SPEED.md.

Ratios of one measurement are lines of a table for its kind. A record that compares one mechanism with many by the
length has tables of its own, with a line for each mechanism and a column for each length.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.errors import DataError
from attnlab.report.bench import is_one
from attnlab.report.table import Grid
from attnlab.run.files import write_text
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

TITLE = "How fast: every measured ratio"
HEADERS = ["What", "Compared with", "Shape", "Times faster", "By CPU seconds", "Times less memory", "Times less cache"]
HEADERS += ["Machine", "Record"]
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
    "decomposition": "Decomposition of a layer",
}  # fmt: skip
UNITS = {"text": "{} positions", "prefix": "prefix {}", "context": "{} cached", "steps": "{} steps", "beam": "beam {}"}
UNITS |= {"batch": "batch {}", "tokens": "{} tokens", "multiply_adds_percent": "{} % of the multiply-adds"}
UNITS |= {"rate": "rate {}", "ranks": "ranks {}", "tensors": "tensors {}"}
LEAST_PEAK = 1.0  # MiB: below it the ratio of two peaks is noise
LEAST = 4  # references from which on a record has tables by the length
MEASURES = {
    "seconds": "time by wall clock, over `{}`'s of the same round",
    "peak_memory": "peak memory, over `{}`'s",
    "cache": "cache, over `{}`'s",
}
LENGTHS = {"training": "text", "model": "text", "decoding": "context", "generation": "context", "prefill": "text"}
SHARE = "share_outside_products"
NOISE = (
    "Products were timed in another run than the whole: these shares are off by ten percent or so either way; "
    "disturbed: other work slowed the products down"
)


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write SPEED.md, whose links to the records begin in `directory`; DataError without a ratio."""
    kinds: dict[str, Grid] = {}
    by_length: list[Grid] = []
    for saved in sorted(filter(is_one, records), key=lambda saved: saved.path.as_posix()):
        rows = saved.record["bench"]["rows"]
        if rows and all(_is_by_length(row) for row in rows):
            by_length += grids(saved, ", ".join(_place(saved, directory)))
            continue
        for row in rows:
            if row["ratios"]:
                grid = kinds.setdefault(row["what"], Grid(KINDS.get(row["what"], row["what"]), HEADERS))
                about = saved.record["bench"]["protocol"].get(row["what"])
                grid.notes = [f"Measured: {about.replace('<', '&lt;')}"] if about else grid.notes
                grid.rows += [_line(saved, row, pair, directory) for pair in row["ratios"]]
    if not kinds and not by_length:
        raise DataError("no finished record of mode=bench with a ratio among these records")
    parts = [f"# {TITLE}\n\n{ABOUT}", *["## All mechanisms by length\n"] * bool(by_length)]
    parts += [f"##{grid.markdown()}" for grid in by_length]
    parts += [f"#{_filled(kinds[kind]).markdown()}" for kind in dict.fromkeys([*KINDS, *kinds]) if kind in kinds]
    path = directory / "SPEED.md"
    write_text(path, "\n".join(parts))
    return [path]


def grids(saved: SavedRecord, place: str) -> list[Grid]:
    """The tables by length: times, peak memory, caches, and shares outside of matrix products if it has these."""
    kinds: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in saved.record["bench"]["rows"]:
        kinds.setdefault((row["what"], bool(row.get("reorder"))), []).append(row)
    tables = []
    for (what, reorder), rows in kinds.items():
        of = rows[0]["ratios"][0]["of"]
        fixed = ", ".join(f"{key} {rows[0][key]}" for key in ("batch", "prefix", "steps") if rows[0].get(key))
        width = (saved.record["config"]["task"].get("model") or {}).get("d_model")
        title = f"{what}{', rows reordered' * reorder}, {f'd {width}, ' * bool(width)}{fixed}"
        headers = ["Mechanism", *(f"{row[LENGTHS[what]]} positions" for row in rows)]
        names = [of, *(name for name in rows[0]["variants"] if name != of)]
        for measure, words in MEASURES.items():
            lines = [[f"`{name}`", *(_number(row, name, of, measure) for row in rows)] for name in names]
            if any(cell for line in lines[1:] for cell in line[1:] if not cell.startswith(NOT_RUN)):
                tables.append(Grid(f"{title}: {words.format(of)}", headers, lines, [place]))
        names = list(rows[0]["variants"])
        lines = [[f"`{name}`", *(_share(row["variants"].get(name, {})) for row in rows)] for name in names]
        if any(cell for line in lines for cell in line[1:]):
            notes = [NOISE, place]
            tables.append(Grid(f"{title}: share of the time outside of matrix products", headers, lines, notes))
    return tables


def _is_by_length(row: dict[str, Any]) -> bool:
    """Whether a measurement compares one mechanism with many."""
    references = {pair["of"] for pair in row["ratios"]}
    return row["what"] in LENGTHS and len(row["ratios"]) >= LEAST and len(references) == 1


def _number(row: dict[str, Any], name: str, of: str, measure: str) -> str:
    """The number of the mechanism `of`, or the ratio of another to it: median (least to most) of a time."""
    if name == of:
        return _measured(row["variants"][of], measure)
    pair: dict[str, Any] = next((pair for pair in row["ratios"] if pair["against"] == name), {})
    if NOT_RUN in pair:
        return f"{NOT_RUN}: {pair[NOT_RUN]}" if measure == "seconds" else ""
    value = pair.get(measure)
    return _spread(value) if isinstance(value, dict) else f"{value:.3g}" if isinstance(value, int | float) else ""


def _measured(variant: dict[str, Any], measure: str) -> str:
    if measure == "seconds":
        return f"{1e3 * variant['seconds']['median']:.3g} ms" if "seconds" in variant else NOT_RUN
    peak = variant.get("peak_memory_mib")
    cache = variant["cache_bytes"]["measured"] / 2**20 if "cache_bytes" in variant else None
    value = peak if measure == "peak_memory" else cache
    return f"{value:.3g} MiB" if isinstance(value, int | float) else ""


def _share(variant: dict[str, Any]) -> str:
    share = variant.get(SHARE)
    if isinstance(share, float) and share < 0:  # the products alone took longer than the whole
        return "disturbed"
    return f"{share:.0%}" if isinstance(share, float) else ""


def _filled(grid: Grid) -> Grid:
    """The table without the columns that no row fills."""
    filled = [i for i in range(len(grid.headers)) if any(row[i] for row in grid.rows)]
    headers, *rows = ([row[i] for i in filled] for row in [grid.headers, *grid.rows])
    return Grid(grid.title, headers, rows, grid.notes)


def _line(saved: SavedRecord, row: dict[str, Any], pair: dict[str, Any], directory: Path) -> list[str]:
    """The cells of one ratio; a ratio that was not measured says why."""
    record = _place(saved, directory)
    other = "published" if pair["against"] == f"published_{pair['of']}" else f"`{pair['against']}`"
    start = [_what(saved), other, _shape(saved, row)]
    if "seconds" not in pair:
        return [*start, f"{NOT_RUN}: {pair[NOT_RUN]}", "", "", "", *record]
    peak = row["variants"].get(pair["of"], {}).get("peak_memory_mib")
    is_large = isinstance(peak, int | float) and peak >= LEAST_PEAK
    memory = f"{pair['peak_memory']:.3g}" if is_large and "peak_memory" in pair else ""
    cache = f"{pair['cache']:.3g}" if "cache" in pair else ""
    processor = _spread(pair["cpu_seconds"]) if "cpu_seconds" in pair else ""
    return [*start, _spread(pair["seconds"]), processor, memory, cache, *record]


def _place(saved: SavedRecord, directory: Path) -> list[str]:
    """The machine, and a link to the record."""
    environment, protocol = saved.record["environment"], saved.record["bench"]["protocol"]
    device, threads = environment["device"].removeprefix("cpu: "), environment["threads"]
    place = f"{device}, {threads} thread{'s' if threads != 1 else ''}"
    place += f"; {protocol['busy_cores_before']:.1f} cores busy" if "busy_cores_before" in protocol else ""
    return [place, f"[record]({Path(os.path.relpath(saved.path, directory)).as_posix()})"]


def _what(saved: SavedRecord) -> str:
    """The mechanism; of a compressed model the method with the settings of its command."""
    if "compression" not in saved.record:
        return f"`{saved.mechanism}`"
    words = [word.removeprefix("compress.") for word in shlex.split(saved.record["command"])]
    keys = {"model", "rank", *(saved.record["config"].get("compress") or {})}
    settings = [word for word in words if word.partition("=")[0] in keys]
    return f"`{' '.join([saved.record['compress'], *settings])}`"


def _shape(saved: SavedRecord, row: dict[str, Any]) -> str:
    """The width of the layer and the sizes that are not zero, in words."""
    width = (saved.record["config"]["task"].get("model") or {}).get("d_model")
    words = [f"d {width}"] if width else []
    words += [form.format(row[key]) for key, form in UNITS.items() if row.get(key)]
    return ", ".join(words + (["rows reordered"] if row.get("reorder") else []))


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:.3g} ({values['min']:.3g} to {values['max']:.3g})"
