"""Every ratio of records of mode=bench in one page: a table for each kind of measurement, a line for each ratio."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.errors import DataError
from attnlab.report.grid import Grid
from attnlab.report.speed_matrix import grids, is_wide
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


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write SPEED.md.

    Args:
        records: records of mode=bench; others and unfinished ones are left out.
        directory: where the file is written. Its links to the records begin here.

    Returns:
        The path of the file.

    Raises:
        DataError: there is no finished record of mode=bench with a ratio.
        WriteError: the file cannot be written.
    """
    benches = [found for found in records if "bench" in found.record and found.record["status"] == "finished"]
    kinds: dict[str, Grid] = {}
    wide: list[Grid] = []
    for found in sorted(benches, key=lambda one: one.path.as_posix()):
        if is_wide(found):
            wide += grids(found, ", ".join(_place(found, directory)))
            continue
        for row in found.record["bench"]["rows"]:
            if row["ratios"]:
                grid = kinds.setdefault(row["what"], Grid(KINDS.get(row["what"], row["what"]), HEADERS))
                about = found.record["bench"]["protocol"].get(row["what"])
                grid.notes = [f"Measured: {about.replace('<', '&lt;')}"] if about else grid.notes
                grid.rows += [_line(found, row, pair, directory) for pair in row["ratios"]]
    if not kinds and not wide:
        raise DataError("no finished record of mode=bench with a ratio among those given")
    order = sorted(kinds, key=lambda kind: [*KINDS, kind].index(kind))
    parts = [f"# {TITLE}\n\n{ABOUT}", *["## All mechanisms by length\n"] * bool(wide)]
    parts += [f"##{grid.markdown()}" for grid in wide] + [f"#{_filled(kinds[kind]).markdown()}" for kind in order]
    path = directory / "SPEED.md"
    write_text(path, "\n".join(parts))
    return [path]


def _filled(grid: Grid) -> Grid:
    """The table without the columns that no row fills."""
    kept = [i for i in range(len(grid.headers)) if any(row[i] for row in grid.rows)]
    rows = [[row[i] for i in kept] for row in grid.rows]
    return Grid(grid.title, [grid.headers[i] for i in kept], rows, grid.notes)


def _line(found: SavedRecord, row: dict[str, Any], pair: dict[str, Any], directory: Path) -> list[str]:
    """The cells of one ratio; a ratio that was not measured says why."""
    record = _place(found, directory)
    other = "published" if pair["against"] == f"published_{pair['of']}" else f"`{pair['against']}`"
    start = [_what(found), other, _shape(found, row)]
    if "seconds" not in pair:
        return [*start, f"{NOT_RUN}: {pair[NOT_RUN]}", "", "", "", *record]
    own = row["variants"].get(pair["of"], {}).get("peak_memory_mib")
    whole = isinstance(own, int | float) and own >= LEAST_PEAK
    memory = f"{pair['peak_memory']:.3g}" if whole and "peak_memory" in pair else ""
    cache = f"{pair['cache']:.3g}" if "cache" in pair else ""
    processor = _spread(pair["cpu_seconds"]) if "cpu_seconds" in pair else ""
    return [*start, _spread(pair["seconds"]), processor, memory, cache, *record]


def _place(found: SavedRecord, directory: Path) -> list[str]:
    """The machine, and a link to the record."""
    environment, protocol = found.record["environment"], found.record["bench"]["protocol"]
    device, threads = environment["device"].removeprefix("cpu: "), environment["threads"]
    place = f"{device}, {threads} thread{'s' if threads != 1 else ''}"
    place += f"; {protocol['busy_cores_before']:.1f} cores busy" if "busy_cores_before" in protocol else ""
    return [place, f"[record]({Path(os.path.relpath(found.path, directory)).as_posix()})"]


def _what(found: SavedRecord) -> str:
    """The mechanism; of a compressed model the method with the settings of its command."""
    if "compression" not in found.record:
        return f"`{found.mechanism}`"
    words = [word.removeprefix("compress.") for word in shlex.split(found.record["command"])]
    keys = {"model", "rank", *(found.record["config"].get("compress") or {})}
    settings = [word for word in words if word.partition("=")[0] in keys]
    return f"`{' '.join([found.record['compress'], *settings])}`"


def _shape(found: SavedRecord, row: dict[str, Any]) -> str:
    """The width of the layer and the sizes that are not zero, in words."""
    width = (found.record["config"]["task"].get("model") or {}).get("d_model")
    words = [f"d {width}"] if width else []
    words += [form.format(row[key]) for key, form in UNITS.items() if row.get(key)]
    return ", ".join(words + (["rows reordered"] if row.get("reorder") else []))


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:.3g} ({values['min']:.3g} to {values['max']:.3g})"
