"""The comparison at the end of a multirun: a row for each finished job and the means of seeds, the other jobs apart."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich.markup import escape
from rich.table import Table

from attnlab.callbacks import summary
from attnlab.report import figure
from attnlab.report.table import Grid, frame, known, spread
from attnlab.run.console import Screen
from attnlab.run.directory import holder_of
from attnlab.run.files import write_text
from attnlab.run.record import BUSY, NOT_RUN, RECORD
from attnlab.run.store import SavedRecord, collect
from attnlab.run.sweep import SweepJob, listed

STEM = "comparison"
FINISHED = "finished"
MEAN = "mean ± sd"
WIDTH = 160  # columns where the output is not a terminal
HIDDEN = {"attention", "compress", "stride", "seed", "data_root", "cache_dir"}  # settings that have no column
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
SPEED = "Decoding, tokens/s"
OVER = {  # what the picture's x can be: where the record has it, and the label of the axis
    "rank": ("rank", "rank"),
    "rate": ("compression.rate.rate", "compression rate of the replaced matrices"),
    "multiply-adds": ("compression.remaining.multiply_adds_percent", "multiply-adds, % of the dense model's"),
    "bytes": ("kv_cache.bytes_per_position", "cache in bytes per token, all layers"),
    "cache": ("kv_cache.elements_per_token_per_layer", "cached numbers per token and layer"),
}
LINES = ("rank", "rate", "multiply-adds")  # of OVER, those along which points are joined


def render(directory: Path, planned: Sequence[DictConfig] = (), swept: Sequence[str] = ()) -> list[Path]:
    """Print the tables of a multirun's jobs to stderr; write comparison.{md,csv} and pictures with their data as CSV.

    Jobs that have not finished are in a second table and in comparison_unfinished.csv. comparison_points shows the
    quality over what the sweep varies (:func:`drawn_over`), comparison_curves the losses. A picture needs two points,
    or two runs with curves.

    Args:
        planned: the configuration of each job, in order; jobs that were never started are listed. Empty: unknown.
        swept: the keys that the command line gives several values.

    Raises:
        WriteError: a file cannot be written.
    """
    begun = listed(directory)
    if not begun:
        return []
    files = {job.directory / RECORD: job for job in reversed(begun)}  # two jobs may be one run
    there = [file for file in reversed(files) if file.is_file()]
    read = {saved.path: saved for saved in (collect(there) if there else [])}
    jobs = jobs_of([read[file] for file in there if file in read], files)
    without = [job for job in begun if job.directory / RECORD not in read]
    never = {i: cfg for i, cfg in enumerate(planned) if i not in {job.number for job in begun}}
    tables = {STEM: table(jobs), f"{STEM}_unfinished": unfinished(jobs, without, never, swept)}
    tables = {name: grid for name, grid in tables.items() if name == STEM or grid.rows}
    for grid in tables.values():
        show(grid)
    paths = [directory / f"{STEM}.md"]
    write_text(paths[0], "\n".join(grid.markdown() for grid in tables.values()))
    for name, grid in tables.items():
        plain = [
            [cell.replace(",", "") if name in NUMBERS else cell for cell, name in zip(row, grid.headers, strict=True)]
            for row in grid.rows
        ]  # numbers as programs read them
        paths += replace(grid, rows=plain).write(directory / name, "csv")
    x = drawn_over(jobs)
    data, title = points_over(jobs, x)
    if len(data.drop_duplicates(["row", "x"])) > 1:
        draw = partial(figure.seeds if x in LINES else figure.scatter, plot=figure.Plot("", "", OVER[x][1], title))
        paths += figure.write(directory / f"{STEM}_points", data, draw)
    losses = figure.together(labels(jobs))
    if len(losses.drop_duplicates(["run", "seed"])) > 1:
        paths += figure.write(directory / f"{STEM}_curves", losses, figure.draw_together)
    return paths


def jobs_of(records: Sequence[SavedRecord], begun: Mapping[Path, SweepJob] = MappingProxyType({})) -> pd.DataFrame:
    """The jobs of a multirun: a row for each record; its attribute `varied` names the settings in which they differ.

    Args:
        records: in the order of the rows.
        begun: what the multirun notes of its jobs, by the paths of their records. Another multirun may have finished
            a job: its settings are then those of this one.
    """

    def settings_of(saved: SavedRecord) -> dict[str, str]:
        words = begun[saved.path].settings if saved.path in begun else ()
        pairs = [word.partition("=") for word in words or shlex.split(saved.record["command"])]
        return {key: value for key, equals, value in pairs if equals and key[0] != "-"}

    jobs = frame(
        records,
        Job=lambda saved: begun[saved.path].name if saved.path in begun else saved.path.parent.name,
        Mechanism=mechanism,
        Seed=lambda saved: str(saved.record["seed"]),
        Settings=settings_of,
        Status="status",
        Metric=metric,
        Score=lambda saved: saved.number(f"quality.{metric(saved)}"),
        Protocol=_protocol,
        **{name: partial(SavedRecord.number, dotted=key) for name, (key, _) in NUMBERS.items()},
    )
    settings = pd.DataFrame(jobs["Settings"].tolist(), dtype=object, index=jobs.index)
    varied = [key for key in settings if key not in HIDDEN and settings[key].nunique(dropna=False) > 1]
    jobs = jobs.join(settings[varied].fillna(""))
    jobs.attrs["varied"] = varied
    return jobs


def table(jobs: pd.DataFrame) -> Grid:
    """A row for each finished job, then one for each mechanism with its settings that has more than one seed.

    Columns that no job has a number for are left out, and a note names them.
    """
    varied, done = jobs.attrs["varied"], jobs[jobs["Status"] == FINISHED]
    metrics = done["Metric"].dropna().unique()
    quality = summary.label(metrics[0]) if len(metrics) == 1 else "Quality"
    present = [name for name in NUMBERS if done[name].notna().any()]
    grid = Grid("Comparison", ["Job", "Mechanism", *varied, "Seed", quality, *present])
    for _, job in done.iterrows():
        score = NOT_RUN if job["Score"] is None else f"{job['Score']:g}"
        unit = f" {summary.label(job['Metric'] or '')}" if quality == "Quality" and job["Score"] is not None else ""
        numbers = [cell(job[name], name) for name in present]
        grid.rows.append([*job[["Job", "Mechanism", *varied, "Seed"]], score + unit, *numbers])
    for group, same in groups(jobs):
        if len(same) > 1:
            cells = [MEAN, *group, ", ".join(same["Seed"]), spread(same["Score"].tolist(), ".2f")]
            grid.rows.append([*cells, *(_mean(known(same[name]), name) for name in present)])
    records = done["saved"].tolist()
    if updates := [int(steps) for saved in records if (steps := saved.number("training.steps")) is not None]:
        corpora = sorted({str(s.record["corpus"]) for s in records if s.number("training.steps") is not None})
        corpus = "embedded sample corpus" if corpora == ["sample"] else "; ".join(corpora)
        ends = " to ".join(dict.fromkeys((str(min(updates)), str(max(updates)))))
        grid.notes.append(f"Corpus: {corpus}. Updates: {ends}.")
    kinds = dict.fromkeys(name.partition(",")[0] for name in NUMBERS if "images" not in name)  # in whichever unit
    absent = [kind.lower() for kind in kinds if not any(name.startswith(kind) for name in present)]
    if absent and records:
        grid.notes.append(f"{NOT_RUN} in any job: {', '.join(absent)}.")
    if len(protocols := done["Protocol"].dropna().unique()):
        unlike = "not alike in all jobs, see `inference` in their records"
        grid.notes.append(f"Speed and memory of scoring: {protocols[0] if len(protocols) == 1 else unlike}.")
    busy = max((saved.number("inference.busy_cores_before") or 0.0 for saved in records), default=0.0)
    if busy > BUSY:
        grid.notes.append(f"Other programs kept up to {busy:.1f} cores busy before scoring: speeds are not comparable.")
    return grid


def unfinished(
    jobs: pd.DataFrame,
    without: Sequence[SweepJob] = (),
    never: Mapping[int, DictConfig] = MappingProxyType({}),
    swept: Sequence[str] = (),
) -> Grid:
    """A row for each job that has not finished: how it ended, and its error.

    Args:
        without: jobs without a record that can be read.
        never: the configurations of jobs that were never started, by their numbers; they may differ in `swept`.
    """
    grid = Grid("Not finished", ["Job", "Settings", "Status", "Error"])
    for _, job in jobs[jobs["Status"] != FINISHED].iterrows():
        saved, settings = job["saved"], [f"{key}={value}" for key, value in job["Settings"].items()]
        holder = holder_of(saved.path.parent) if job["Status"] == "running" else None
        error = f"in progress elsewhere ({holder}), left to it" if holder else str(saved.record.get("error") or "")
        grid.rows.append([job["Job"], " ".join(settings), job["Status"], " ".join(error.split())])
    for job in without:
        ends = ["without a record", "it was ended before it could write one"]
        if job.what == "leave":
            ends = ["left to another multirun", "another multirun had taken it"]
        grid.rows.append([job.name, " ".join(job.settings), *ends])
    for i, cfg in never.items():
        values = {key: cfg.choices[key] if key in cfg.choices else OmegaConf.select(cfg, key) for key in swept}
        words = [f"{key}={value}" for key, value in values.items()]
        grid.rows.append([str(i), " ".join(words), "never started", ""])
    return grid


def groups(jobs: pd.DataFrame) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """The finished jobs with a score by mechanism and settings: those that differ in the seed alone are together."""
    done = jobs[(jobs["Status"] == FINISHED) & jobs["Score"].notna()]
    return list(done.groupby(["Mechanism", *jobs.attrs["varied"]], sort=False)) if len(done) else []


def drawn_over(jobs: pd.DataFrame) -> str:
    """What the quality is drawn over, a key of OVER that every finished job has.

    Ranks where the jobs of one method differ in them; ranks of several methods are not comparable. Else the
    compression rate or the remaining multiply-adds, else the cache, in bytes where all jobs have them.
    """
    done = [saved for _, same in groups(jobs) for saved in same["saved"]]
    methods = {mechanism(saved) for saved in done if "compression" in saved.record}
    is_swept = "rank" in jobs.attrs["varied"] and len(methods) < 2
    names = [name for name in OVER if name != "rank" or is_swept]
    measured = [name for name in names if all(saved.number(OVER[name][0]) is not None for saved in done)]
    return next(iter(measured), "cache")


def points_over(jobs: pd.DataFrame, x: str) -> tuple[pd.DataFrame, str]:
    """The data of a picture over a key of OVER, and the name of the metric; no rows if jobs have several metrics.

    Jobs on one line differ in ranks or in `compress.keep` alone.
    """
    metrics = jobs["Metric"].dropna().unique()
    done = [job for _, same in groups(jobs) for _, job in same.iterrows()] if len(metrics) == 1 else []
    varied = [
        name for name in jobs.attrs["varied"] if x not in LINES or (name != "compress.keep" and "rank" not in name)
    ]
    rows = [
        [
            " ".join(filter(None, job[["Mechanism", *varied]])),
            job["Seed"],
            job["saved"].number(OVER[x][0]),
            job["Score"],
        ]
        for job in done
    ]
    points = pd.DataFrame(rows, columns=figure.POINTS, dtype=object).dropna()
    return points, summary.label(metrics[0]) if len(metrics) == 1 else ""


def labels(jobs: pd.DataFrame) -> list[tuple[str, int, Path]]:
    """Name, seed and run directory of each job; the name: the mechanism and the settings in which the jobs differ."""
    named: dict[tuple[str, int], Path] = {}
    for _, job in jobs.iterrows():
        settings, seed, folder = job["Settings"], int(job["Seed"]), job["saved"].path.parent
        words = [f"{k.rpartition('.')[2]}={settings[k]}" for k in jobs.attrs["varied"] if k in settings]
        label = " ".join([job["Mechanism"], *words])
        named[(label if (label, seed) not in named else f"{label} ({folder.name})"), seed] = folder
    return [(label, seed, folder) for (label, seed), folder in named.items()]


def show(grid: Grid) -> None:
    """Print a table and its notes to stderr."""
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


def mechanism(saved: SavedRecord) -> str:
    """The attention mechanism with its stride, and the method of compression: those that the job has."""
    names = [saved.mechanism, saved.record["compress"]]
    return " ".join(name for name in names if not name.startswith("none")) or "none"


def metric(saved: SavedRecord) -> str | None:
    """The name of the first number of a record's quality, for instance bleu; None where nothing was scored."""
    return next((name for name in saved.record["quality"] if saved.number(f"quality.{name}") is not None), None)


def cell(value: float | None, column: str) -> str:
    """A number as the column of NUMBERS shows it; None: it was not measured."""
    if value == 0 and column == SIZES[1]:
        return "of fixed size"
    return NOT_RUN if value is None else format(value, NUMBERS[column][1])


def _mean(values: list[float], column: str) -> str:
    """The mean over several seeds; sizes do not depend on the seed."""
    if len(values) == 1 or (column in SIZES and len(set(values)) == 1):
        return cell(values[0], column)
    return spread(values, NUMBERS[column][1])


def _protocol(saved: SavedRecord) -> str | None:
    """How a job was measured while it was scored; None where it was not."""
    about = saved.record["inference"]
    if saved.number("inference.seconds") is None:
        return None
    beam = [f"beam {about['beam']}"] if saved.number("inference.beam") is not None else []
    return ", ".join([str(about["protocol"]), *beam, str(about["dtype"]), saved.record["environment"]["device"]])
