"""The comparison at the end of a multirun: a row for each finished job and the means of seeds, the other jobs apart."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from types import MappingProxyType

from omegaconf import DictConfig, OmegaConf
from rich.markup import escape
from rich.table import Table

from attnlab.callbacks import summary
from attnlab.report import curves, figure, points
from attnlab.report.grid import Grid
from attnlab.report.spec import Plot
from attnlab.run.console import Screen
from attnlab.run.files import write_text
from attnlab.run.lock import held
from attnlab.run.record import BUSY, NOT_RUN
from attnlab.run.store import SavedRecord, collect
from attnlab.run.sweep import SweepJob, listed

STEM = "comparison"
UNFINISHED = "unfinished"
FINISHED = "finished"
MEAN = "mean ± sd"
WIDTH = 160  # columns where the output is not a terminal
IN_THE_MECHANISM = {"attention", "compress", "stride"}  # settings that :func:`mechanism` names
OF_THE_RUN = {"seed", "data_root", "cache_dir"}
NUMBERS = {  # column: where the record has it, and the format
    "Parameters": ("parameters.total", ",.0f"),
    "Cache per token and layer, numbers": ("kv_cache.elements_per_token_per_layer", "g"),
    "Training, tokens/s": ("training.tokens_per_second", ",.1f"),
    "Training, images/s": ("training.images_per_second", ",.1f"),
    "Decoding, tokens/s": ("inference.tokens_per_second", ",.1f"),
    "Scoring, images/s": ("inference.images_per_second", ",.1f"),
    "Peak memory while scoring, MiB": ("inference.peak_memory_mib", ",.1f"),
}
SIZES = tuple(NUMBERS)[:2]  # the same for every seed
KEPT = "compress.keep"
SPEED = "Decoding, tokens/s"
OVER = {  # what the picture's x can be: where the record has it, and the label of the axis
    "rank": ("rank", "rank"),
    "rate": ("compression.rate.rate", "compression rate of the replaced matrices"),
    "multiply-adds": ("compression.remaining.multiply_adds_percent", "multiply-adds, % of the dense model's"),
    "bytes": ("kv_cache.bytes_per_position", "cache in bytes per token, all layers"),
    "cache": ("kv_cache.elements_per_token_per_layer", "cached numbers per token and layer"),
}


def render(directory: Path, planned: Sequence[DictConfig] = (), swept: Sequence[str] = ()) -> list[Path]:
    """Compare the jobs of a multirun: comparison.md, comparison.csv, and pictures where there is something to draw.

    Jobs that have not finished stand in a table of their own, with their errors: below the other one, and in
    comparison_unfinished.csv. The pictures, each with its data as CSV: comparison_points has the quality over what the
    sweep varies (:func:`drawn_over`), comparison_speed the quality over the speed of decoding, if all jobs were
    measured alike, comparison_curves the losses of all jobs on one axis. A picture needs two points, or two runs with
    curves. The tables are also printed to stderr: standard output is for the jobs' results.

    Args:
        directory: the multirun's, with one run directory for each job.
        planned: the configuration of each job, by which those that were never started are found; empty: nobody knows.
        swept: the keys that the command line gives several values.

    Returns:
        The paths written; empty where no job has left a directory.

    Raises:
        WriteError: a file cannot be written.
    """
    jobs = listed(directory)
    if not jobs:
        return []
    found = records(jobs)
    known = {one.path.parent for one in found}
    names = {job.directory: job.name for job in jobs}
    home = directory if any(job.directory.parent != directory for job in jobs) else None
    grid = table(found, names, home)
    begun = {job.number for job in jobs}
    never = {number: cfg for number, cfg in enumerate(planned) if number not in begun}
    without = {job.name: job.what for job in jobs if job.directory not in known}
    failed = unfinished(found, without, names, home, never, swept)
    tables = [grid, *([failed] if failed.rows else [])]
    for one in tables:
        show(one)
    plain = [[_unseparated(cell, name) for cell, name in zip(row, grid.headers, strict=True)] for row in grid.rows]
    write_text(directory / f"{STEM}.md", "\n".join(one.markdown() for one in tables))
    paths = [directory / f"{STEM}.md", *replace(grid, rows=plain).write(directory / STEM, "csv")]
    if failed.rows:
        paths += failed.write(directory / f"{STEM}_{UNFINISHED}", "csv")
    over, lines = drawn_over(found)
    for name, x, draw in (
        ("points", over, points.lines if lines else points.scatter),
        ("speed", SPEED, points.scatter),
    ):
        data = over_each(found, x, lines and name == "points")
        if len({tuple(row[::2]) for row in data.rows}) > 1:
            label = OVER[x][1] if x in OVER else "decoded tokens per second"
            plot = Plot("", "", label, data.title, name=name)
            paths += figure.write(directory / f"{STEM}_{name}", data, partial(draw, plot=plot))
    losses = curves.together("", labels(found))
    if len({tuple(row[1:3]) for row in losses.rows}) > 1:
        paths += figure.write(directory / f"{STEM}_curves", losses, curves.draw_together)
    return paths


def records(jobs: Sequence[SweepJob]) -> list[SavedRecord]:
    """The records of jobs, in the order of the jobs, each with the settings that it has in this multirun.

    Args:
        jobs: of a multirun; those without a record that can be read are left out.
    """
    files = [file for job in jobs if (file := job.directory / "record.json").is_file()]
    read = {one.path: one for one in collect(files)} if files else {}
    found = []
    for job in jobs:
        if one := read.pop(job.directory / "record.json", None):  # once, if two jobs are one run
            command = {"command": shlex.join(["python", "-m", "attnlab", *job.settings])} if job.settings else {}
            found.append(SavedRecord(one.path, one.record | command))
    return found


def table(found: Sequence[SavedRecord], names: Mapping[Path, str] | None = None, home: Path | None = None) -> Grid:
    """A row for each finished job, then one for each mechanism with its settings that has more than one seed.

    Args:
        found: the jobs' records, in the order of the rows.
        names: of the jobs by their run directories; None: the directories' own names.
        home: the multirun's directory where some of its jobs lie elsewhere: a column then has their directories.

    Returns:
        The table. Columns that no job has a number for are left out, and a note names them; another note says how the
        speed of decoding was measured, or that it was not measured alike.
    """
    varied = settings(found)
    done = [one for one in found if one.record["status"] == FINISHED]
    metrics = {name for one in done if (name := metric(one))}
    quality = summary.label(metrics.pop()) if len(metrics) == 1 else "Quality"
    present = [name for name in NUMBERS if any(_number(one, name) is not None for one in done)]
    place = ["Directory"] if home else []
    grid = Grid("Comparison", ["Job", "Mechanism", *varied, "Seed", quality, *present, *place])
    for one in done:
        score = _score(one)
        cells = _named(one, varied, names)
        cells += [
            NOT_RUN if score is None else f"{score:g}" + f" {summary.label(metric(one) or '')}" * (quality == "Quality")
        ]
        cells += [cell(_number(one, name), name) for name in present]
        grid.rows.append([*cells, *([_place(one, home)] if home else [])])
    for same in groups(found):
        if len(same) > 1:
            grid.rows.append([*_means(same, varied, present), *[""] * len(place)])
    if said := _corpus_and_updates(done):
        grid.notes.append(said)
    kinds = dict.fromkeys(name.partition(",")[0] for name in NUMBERS if "images" not in name)  # in whichever unit
    absent = [kind.lower() for kind in kinds if not any(name.startswith(kind) for name in present)]
    if absent and done:
        grid.notes.append(f"{NOT_RUN} in any job: {', '.join(absent)}.")
    ways = _protocols(done)
    if ways:
        said = f"{ways.pop()}." if len(ways) == 1 else "not alike in all jobs, see `inference` in their records."
        grid.notes.append(f"Speed and memory of scoring: {said}")
    busy = max((one.number("inference.busy_cores_before") or 0.0 for one in done), default=0.0)
    if busy > BUSY:
        grid.notes.append(f"Other programs kept up to {busy:.1f} cores busy before scoring: speeds are not comparable.")
    return grid


def unfinished(
    found: Sequence[SavedRecord],
    without: Mapping[str, str] = MappingProxyType({}),
    names: Mapping[Path, str] | None = None,
    home: Path | None = None,
    never: Mapping[int, DictConfig] | None = None,
    swept: Sequence[str] = (),
) -> Grid:
    """A row for each job that has not finished: how it ended, and its error.

    Args:
        found: the jobs' records; finished ones are left out.
        without: names of jobs that have no record that can be read, and what each did, see
            :class:`attnlab.run.sweep.Decision`.
        names: as for :func:`table`.
        home: the same.
        never: the configurations of jobs that were never started, by their numbers.
        swept: the keys in which these may differ, whose columns they need.
    """
    varied = settings(found)
    if never:
        varied += [key for key in swept if key not in {*varied, *IN_THE_MECHANISM, *OF_THE_RUN}]
    place = ["Directory"] if home else []
    grid = Grid("Not finished", ["Job", "Mechanism", *varied, "Seed", *place, "Status", "Error"])
    for one in found:
        status, error = one.record["status"], one.record.get("error")
        if status != FINISHED:
            cells = [*_named(one, varied, names), *([_place(one, home)] if home else [])]
            holder = held(one.path.parent) if status == "running" else None
            said = f"in progress elsewhere ({holder}), left to it" if holder else " ".join(str(error or "").split())
            grid.rows.append([*cells, status, said])
    blank = [""] * (len(grid.headers) - 3)
    for name, what in without.items():
        left = what == "leave"
        said = "another multirun had taken it" if left else "it was ended before it could write one"
        grid.rows.append([name, *blank, "left to another multirun" if left else "without a record", said])
    grid.rows += [_never(number, cfg, varied, bool(home)) for number, cfg in (never or {}).items()]
    return grid


def drawn_over(found: Sequence[SavedRecord]) -> tuple[str, bool]:
    """What the quality is drawn over, a key of OVER, and whether as lines.

    Ranks or compression rates where the jobs differ in them: the rank of one method; of several methods, whose ranks
    are not comparable, or where other settings of the compression differ, the compression rate or the remaining
    multiply-adds. Otherwise the cache, in bytes where all jobs have them.

    Args:
        found: the jobs' records.
    """
    done = [one for same in groups(found) for one in same]
    varied = settings(found)
    methods = {mechanism(one) for one in done}
    if any("compression" in one.record for one in done):
        ranks = "rank" in varied and len(methods) == 1
        known = [
            name for name in ("rate", "multiply-adds") if all(one.number(OVER[name][0]) is not None for one in done)
        ]
        return ("rank" if ranks or not known else known[0]), True
    if "rank" in varied and len({one.number("rank") for one in done} - {None}) > 1:
        return "rank", True
    sized = done and all(one.number(OVER["bytes"][0]) is not None for one in done)
    return ("bytes" if sized else "cache"), False


def over_each(found: Sequence[SavedRecord], x: str, lines: bool = False) -> Grid:
    """The data of a picture: a row for each finished job with both numbers; none if jobs have several metrics.

    Args:
        found: the jobs' records.
        x: a key of OVER, or SPEED; of the speed no rows unless all jobs were measured alike.
        lines: whether jobs that differ in ranks or in KEPT alone are of one row.
    """
    metrics = {name for one in found if (name := metric(one))}
    grid = Grid(summary.label(metrics.pop()) if len(metrics) == 1 else "", points.HEADERS)
    done = [one for same in groups(found) for one in same] if grid.title else []
    if x == SPEED and len(_protocols(done)) > 1:
        return grid
    key = OVER[x][0] if x in OVER else NUMBERS[x][0]
    varied = [name for name in settings(found) if not (lines and (name == KEPT or "rank" in name))]
    for one in done:
        size, score = one.number(key), _score(one)
        if size is not None and score is not None:
            label = " ".join([mechanism(one), *filter(None, _settings(one, varied))])
            grid.rows.append([label, str(one.record["seed"]), repr(size), repr(score)])
    return grid


def labels(found: Sequence[SavedRecord]) -> list[tuple[str, int, Path]]:
    """Name, seed and run directory of each job; the name: the mechanism and the settings in which the jobs differ.

    Args:
        found: the jobs' records.
    """
    varied = settings(found)
    named: dict[tuple[str, int], Path] = {}
    for one in found:
        given, seed, folder = _given(one), int(one.record["seed"]), one.path.parent
        label = " ".join([mechanism(one), *(f"{k.rpartition('.')[2]}={given[k]}" for k in varied if k in given)])
        named[(label if (label, seed) not in named else f"{label} ({folder.name})"), seed] = folder
    return [(label, seed, folder) for (label, seed), folder in named.items()]


def show(grid: Grid) -> None:
    """Print a table and its notes to stderr.

    Args:
        grid: as :func:`table` or :func:`unfinished` gives it.
    """
    console = Screen(stderr=True, width=None if sys.stderr.isatty() else WIDTH, highlight=False)
    shown = Table(title=grid.title, title_justify="left", box=None, pad_edge=False)
    for name in grid.headers:
        right = name in NUMBERS or name == "Seed"
        shown.add_column(escape(name), justify="right" if right else "left", overflow="fold")
    for row in grid.rows:
        shown.add_row(*map(escape, row))
    console.print(shown)
    for note in grid.notes:
        console.print(note, markup=False)


def settings(found: Sequence[SavedRecord]) -> list[str]:
    """The keys in which the jobs' command lines differ, without the seed and what the mechanism's name says.

    Args:
        found: the jobs' records.
    """
    given = [_given(one) for one in found]
    keys = list(dict.fromkeys(key for each in given for key in each))
    hidden = IN_THE_MECHANISM | OF_THE_RUN
    return [key for key in keys if key not in hidden and len({each.get(key) for each in given}) > 1]


def groups(found: Sequence[SavedRecord]) -> list[list[SavedRecord]]:
    """The finished jobs that have a score, together where they differ in the seed alone.

    Args:
        found: the jobs' records.
    """
    varied = settings(found)
    same: dict[tuple[str, ...], list[SavedRecord]] = {}
    for one in found:
        if one.record["status"] == FINISHED and _score(one) is not None:
            same.setdefault((mechanism(one), *_settings(one, varied)), []).append(one)
    return list(same.values())


def mechanism(one: SavedRecord) -> str:
    """The attention mechanism with its stride, and the method of compression: those that the job has.

    Args:
        one: the job's record.
    """
    names = [one.mechanism, one.record["compress"]]
    return " ".join(name for name in names if not name.startswith("none")) or "none"


def metric(one: SavedRecord) -> str | None:
    """The name of the first number of a record's quality, for instance bleu; None where nothing was scored.

    Args:
        one: the job's record.
    """
    return next((name for name in one.record["quality"] if one.number(f"quality.{name}") is not None), None)


def _means(same: Sequence[SavedRecord], varied: Sequence[str], present: Sequence[str]) -> list[str]:
    """The row of several seeds: means with standard deviations; sizes do not depend on the seed."""
    seeds = ", ".join(str(one.record["seed"]) for one in same)
    cells = [MEAN, mechanism(same[0]), *_settings(same[0], varied), seeds]
    cells.append(_spread([value for one in same if (value := _score(one)) is not None], ".2f"))
    for name in present:
        values = [value for one in same if (value := _number(one, name)) is not None]
        form = NUMBERS[name][1]
        alike = name in SIZES and len(set(values)) == 1
        cells.append(cell(values[0], name) if alike or len(values) == 1 else _spread(values, form))
    return cells


def _named(one: SavedRecord, varied: Sequence[str], names: Mapping[Path, str] | None) -> list[str]:
    """The first cells of a job's row."""
    folder = one.path.parent
    return [(names or {}).get(folder, folder.name), mechanism(one), *_settings(one, varied), str(one.record["seed"])]


def _never(number: int, cfg: DictConfig, varied: Sequence[str], placed: bool) -> list[str]:
    """The row of a job that was never started."""
    choices = cfg.choices
    about = {"attention": choices.attention or "none", "stride": cfg.stride, "compress": choices.compress}
    about["config"] = {"attention": {"pattern": OmegaConf.select(cfg, "attention.pattern")}}
    values = (choices[key] if key in choices else OmegaConf.select(cfg, key) for key in varied)
    cells = [
        str(number),
        mechanism(SavedRecord(Path(), about)),
        *("" if value is None else str(value) for value in values),
    ]
    return [*cells, str(cfg.seed), *[""] * placed, "never started", ""]


def _place(one: SavedRecord, home: Path) -> str:
    return Path(os.path.relpath(one.path.parent, home)).as_posix()


def _protocols(found: Sequence[SavedRecord]) -> set[str]:
    """How the jobs were measured while they were scored."""
    return {_protocol(one) for one in found if one.number("inference.seconds") is not None}


def _spread(values: Sequence[float], form: str) -> str:
    return f"{mean(values):{form}} ± {stdev(values):{form}}" if len(values) > 1 else NOT_RUN


def _score(one: SavedRecord) -> float | None:
    name = metric(one)
    return None if name is None else one.number(f"quality.{name}")


def _number(one: SavedRecord, column: str) -> float | None:
    return one.number(NUMBERS[column][0])


def cell(value: float | None, column: str) -> str:
    """A number as the table shows it.

    Args:
        value: None: it was not measured.
        column: one of NUMBERS.
    """
    if value == 0 and column == SIZES[1]:
        return "of fixed size"
    return NOT_RUN if value is None else format(value, NUMBERS[column][1])


def _unseparated(cell: str, column: str) -> str:
    """A number as programs read it, without separators of thousands."""
    return cell.replace(",", "") if column in NUMBERS else cell


def _corpus_and_updates(found: Sequence[SavedRecord]) -> str:
    """The corpus and the updates of finished trainings; empty where there are none."""
    trained = [one for one in found if one.number("training.steps") is not None]
    corpora = sorted({str(one.record["corpus"]) for one in trained})
    steps = sorted({int(one.number("training.steps") or 0) for one in trained})
    if not trained:
        return ""
    corpus = "embedded sample corpus" if corpora == ["sample"] else "; ".join(corpora)
    return f"Corpus: {corpus}. Updates: {' to '.join(str(n) for n in dict.fromkeys((steps[0], steps[-1])))}."


def _given(one: SavedRecord) -> dict[str, str]:
    """The settings of the job's command line."""
    words = shlex.split(one.record["command"])
    words = words[words.index("attnlab") + 1 :] if "attnlab" in words else words
    return {key: value for key, equals, value in (word.partition("=") for word in words) if equals and key[0] != "-"}


def _settings(one: SavedRecord, varied: Sequence[str]) -> list[str]:
    given = _given(one)
    return [given.get(key, "") for key in varied]


def _protocol(one: SavedRecord) -> str:
    about = one.record["inference"]
    parts = [f"beam {about['beam']}"] if one.number("inference.beam") is not None else []
    return ", ".join([str(about["protocol"]), *parts, str(about["dtype"]), one.record["environment"]["device"]])
