"""The comparison at the end of a multirun: a row for each job, and for settings with several seeds their mean."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnlab.report import curves, figure
from attnlab.report.grid import Grid
from attnlab.report.render import scatter
from attnlab.report.spec import Plot
from attnlab.runs import multirun
from attnlab.runs.multirun import Job
from attnlab.runs.record import NOT_RUN
from attnlab.runs.store import Found, collect

STEM = "comparison"
MEAN = "mean ± sd"
WIDTH = 160  # columns where the output is not a terminal
IN_THE_MECHANISM = {"attention", "compress", "stride"}  # settings that :func:`mechanism` names
OF_THE_RUN = {"seed", "data_root", "cache_dir"}
NUMBERS = {  # column: where the record has it, and the format
    "Parameters": ("parameters.total", ",.0f"),
    "Cache per token and layer, numbers": ("kv_cache.elements_per_token_per_layer", "g"),
    "Training, tokens/s": ("training.tokens_per_second", ",.1f"),
    "Decoding, tokens/s": ("inference.tokens_per_second", ",.1f"),
    "Scoring, images/s": ("inference.images_per_second", ",.1f"),
    "Peak memory while scoring, MiB": ("inference.peak_memory_mib", ",.1f"),
}
SIZES = tuple(NUMBERS)[:2]  # the same for every seed


def render(directory: Path) -> list[Path]:
    """Compare the jobs of a multirun: comparison.md, comparison.csv, and a picture where there is something to draw.

    The picture, comparison_points.png, has the quality over the cached numbers per token and layer, with its data as
    CSV beside it; it needs two mechanisms or settings that have both. comparison_curves.png has the losses of all jobs
    on one axis, if two of them have curves. The table is also printed to stderr: standard
    output is for the jobs' results.

    Args:
        directory: the multirun's, with one run directory for each job.

    Returns:
        The paths written; empty where no job has left a directory.

    Raises:
        WriteError: a file cannot be written.
    """
    jobs = multirun.listed(directory)
    if not jobs:
        return []
    found = records(jobs)
    known = {one.path.parent for one in found}
    names = {job.directory: job.name for job in jobs}
    away = any(job.directory.parent != directory for job in jobs)
    grid = table(found, [job.name for job in jobs if job.directory not in known], names, directory if away else None)
    show(grid)
    plain = [[_unseparated(cell, name) for cell, name in zip(row, grid.headers, strict=True)] for row in grid.rows]
    paths = [*grid.write(directory / STEM, "md"), *replace(grid, rows=plain).write(directory / STEM, "csv")]
    drawn = points(found)
    if len(drawn.rows) > 1:
        plot = Plot("", "", "cached numbers per token and layer", drawn.title)
        paths += figure.write(directory / f"{STEM}_points", drawn, lambda data: scatter(data, plot))
    lines = curves.together(labels(found))
    if len({row[0] for row in lines.rows}) > 1:
        paths += figure.write(directory / f"{STEM}_curves", lines, curves.draw_together)
    return paths


def records(jobs: Sequence[Job]) -> list[Found]:
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
            found.append(Found(one.path, one.record | command))
    return found


def table(
    found: Sequence[Found],
    without: Sequence[str] = (),
    names: Mapping[Path, str] | None = None,
    home: Path | None = None,
) -> Grid:
    """A row for each job, then one for each mechanism with its settings that has more than one finished seed.

    Args:
        found: the jobs' records, in the order of the rows.
        without: names of jobs that have no record that can be read.
        names: of the jobs by their run directories; None: the directories' own names.
        home: the multirun's directory where some of its jobs lie elsewhere: a column then has their directories.

    Returns:
        The table. Columns that no job has a number for are left out, and a note names them; another note says how the
        speed of decoding was measured, or that it was not measured alike.
    """
    varied = settings(found)
    metrics = {name for one in found if (name := metric(one))}
    quality = metrics.pop() if len(metrics) == 1 else "Quality"
    present = [name for name in NUMBERS if any(_number(one, name) is not None for one in found)]
    place = ["Directory"] if home else []
    grid = Grid("Comparison", ["Job", "Mechanism", *varied, "Seed", quality, *present, *place, "Ended"])
    for one in found:
        record = one.record
        score = _score(one)
        folder = one.path.parent
        cells = [(names or {}).get(folder, folder.name), mechanism(one), *_settings(one, varied), str(record["seed"])]
        cells += [NOT_RUN if score is None else f"{score:g}" + f" {metric(one)}" * (quality == "Quality")]
        cells += [_cell(_number(one, name), name) for name in present]
        cells += [Path(os.path.relpath(folder, home)).as_posix()] if home else []
        error = record.get("error")
        grid.rows.append([*cells, record["status"] + (f": {' '.join(str(error).split())}" if error else "")])
    blank = [""] * (len(grid.headers) - 2)
    grid.rows += [[name, *blank, "without a record: it was ended before it could write one"] for name in without]
    for same in groups(found):
        if len(same) > 1:
            means = _means(same, varied, present)
            grid.rows.append([*means[:-1], *[""] * len(place), means[-1]])
    if said := _trained_on(found):
        grid.notes.append(said)
    absent = [name.partition(",")[0].lower() for name in NUMBERS if name not in present and "images" not in name]
    if absent:
        grid.notes.append(f"{NOT_RUN} in any job: {', '.join(absent)}.")
    if any(one.number("inference.seconds") is not None for one in found):
        ways = {_protocol(one) for one in found if one.number("inference.seconds") is not None}
        said = f"{ways.pop()}." if len(ways) == 1 else "not alike in all jobs, see `inference` in their records."
        grid.notes.append(f"Speed and memory of scoring: {said}")
    return grid


def points(found: Sequence[Found]) -> Grid:
    """The data of the picture: for each mechanism with its settings the cache and the mean quality of its seeds.

    Args:
        found: the jobs' records; those without one of the two numbers are left out, and all if they have several
            metrics.
    """
    metrics = {name for one in found if (name := metric(one))}
    grid = Grid(metrics.pop() if len(metrics) == 1 else "", ["row", "x", "y"])
    varied = settings(found)
    for same in groups(found) if grid.title else []:
        cache = _number(same[0], SIZES[1])
        if cache is not None:
            label = " ".join([mechanism(same[0]), *filter(None, _settings(same[0], varied))])
            scores = [value for one in same if (value := _score(one)) is not None]
            grid.rows.append([label, repr(cache), repr(mean(scores))])
    return grid


def labels(found: Sequence[Found]) -> dict[str, Path]:
    """The run directories of jobs by mechanism, settings in which the jobs differ, and seed if there are several.

    Args:
        found: the jobs' records.
    """
    varied, several = settings(found), len({one.record["seed"] for one in found}) > 1
    named: dict[str, Path] = {}
    for one in found:
        given = _given(one)
        words = [f"{key.rpartition('.')[2]}={given[key]}" for key in varied if key in given]
        words += [f"seed {one.record['seed']}"] * several
        label = " ".join([mechanism(one), *words])
        named[label if label not in named else f"{label} ({one.path.parent.name})"] = one.path.parent
    return named


def show(grid: Grid) -> None:
    """Print a table and its notes to stderr, without the last column where every job has finished.

    Args:
        grid: as :func:`table` gives it.
    """
    console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH, highlight=False)
    shown = Table(title=grid.title, title_justify="left", box=None, pad_edge=False)
    finished = all(row[-1] == "finished" or row[0] == MEAN for row in grid.rows)
    width = len(grid.headers) - finished
    for name in grid.headers[:width]:
        right = name in NUMBERS or name == "Seed"
        shown.add_column(escape(name), justify="right" if right else "left", overflow="fold")
    for row in grid.rows:
        shown.add_row(*map(escape, row[:width]))
    console.print(shown)
    for note in grid.notes:
        console.print(note, markup=False)


def settings(found: Sequence[Found]) -> list[str]:
    """The keys in which the jobs' command lines differ, without the seed and what the mechanism's name says.

    Args:
        found: the jobs' records.
    """
    given = [_given(one) for one in found]
    keys = list(dict.fromkeys(key for each in given for key in each))
    hidden = IN_THE_MECHANISM | OF_THE_RUN
    return [key for key in keys if key not in hidden and len({each.get(key) for each in given}) > 1]


def groups(found: Sequence[Found]) -> list[list[Found]]:
    """The finished jobs that have a score, together where they differ in the seed alone.

    Args:
        found: the jobs' records.
    """
    varied = settings(found)
    same: dict[tuple[str, ...], list[Found]] = {}
    for one in found:
        if one.record["status"] == "finished" and _score(one) is not None:
            same.setdefault((mechanism(one), *_settings(one, varied)), []).append(one)
    return list(same.values())


def mechanism(one: Found) -> str:
    """The attention mechanism with its stride, and the method of compression: those that the job has.

    Args:
        one: the job's record.
    """
    names = [one.mechanism, one.record["compress"]]
    return " ".join(name for name in names if not name.startswith("none")) or "none"


def metric(one: Found) -> str | None:
    """The name of the first number of a record's quality, for instance bleu; None where nothing was scored.

    Args:
        one: the job's record.
    """
    return next((name for name in one.record["quality"] if one.number(f"quality.{name}") is not None), None)


def _means(same: Sequence[Found], varied: Sequence[str], present: Sequence[str]) -> list[str]:
    """The row of several seeds: means with standard deviations; sizes do not depend on the seed."""
    seeds = ", ".join(str(one.record["seed"]) for one in same)
    cells = [MEAN, mechanism(same[0]), *_settings(same[0], varied), seeds]
    cells.append(_spread([value for one in same if (value := _score(one)) is not None], ".2f"))
    for name in present:
        values = [value for one in same if (value := _number(one, name)) is not None]
        form = NUMBERS[name][1]
        alike = name in SIZES and len(set(values)) == 1
        cells.append(_cell(values[0], name) if alike or len(values) == 1 else _spread(values, form))
    return [*cells, f"{len(same)} seeds"]


def _spread(values: Sequence[float], form: str) -> str:
    return f"{mean(values):{form}} ± {stdev(values):{form}}" if len(values) > 1 else NOT_RUN


def _score(one: Found) -> float | None:
    name = metric(one)
    return None if name is None else one.number(f"quality.{name}")


def _number(one: Found, column: str) -> float | None:
    return one.number(NUMBERS[column][0])


def _cell(value: float | None, column: str) -> str:
    if value == 0 and column == SIZES[1]:
        return "of fixed size"
    return NOT_RUN if value is None else format(value, NUMBERS[column][1])


def _unseparated(cell: str, column: str) -> str:
    """A number as programs read it, without separators of thousands."""
    return cell.replace(",", "") if column in NUMBERS else cell


def _trained_on(found: Sequence[Found]) -> str:
    """The corpus and the updates of finished trainings; empty where there are none."""
    trained = [one for one in found if one.number("training.steps") is not None]
    corpora = sorted({str(one.record["corpus"]) for one in trained})
    steps = sorted({int(one.number("training.steps") or 0) for one in trained})
    if not trained:
        return ""
    corpus = "embedded sample corpus" if corpora == ["sample"] else "; ".join(corpora)
    return f"Corpus: {corpus}. Updates: {' to '.join(str(n) for n in dict.fromkeys((steps[0], steps[-1])))}."


def _given(one: Found) -> dict[str, str]:
    """The settings of the job's command line."""
    words = shlex.split(one.record["command"])
    words = words[words.index("attnlab") + 1 :] if "attnlab" in words else words
    return {key: value for key, equals, value in (word.partition("=") for word in words) if equals and key[0] != "-"}


def _settings(one: Found, varied: Sequence[str]) -> list[str]:
    given = _given(one)
    return [given.get(key, "") for key in varied]


def _protocol(one: Found) -> str:
    about = one.record["inference"]
    parts = [f"beam {about['beam']}"] if one.number("inference.beam") is not None else []
    return ", ".join([str(about["protocol"]), *parts, str(about["dtype"]), one.record["environment"]["device"]])
