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

from attnlab.callbacks import summary
from attnlab.errors import printable
from attnlab.report import figure
from attnlab.report.table import Grid, frame, known, spread
from attnlab.run.directory import holder_of
from attnlab.run.files import write_text
from attnlab.run.record import BUSY, NOT_RUN, RECORD
from attnlab.run.store import SavedRecord, collect
from attnlab.run.sweep import SweepJob, listed

STEM = "comparison"
FINISHED = "finished"
MEAN = "mean ± sd"
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
    quality over what the sweep varies (:func:`drawn_over`).

    Args:
        planned: the configuration of each job, in order; jobs that were never started are listed. Empty: unknown.
        swept: the keys that the command line gives several values.
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
    paths = [directory / f"{STEM}.md"]
    write_text(paths[0], "\n".join(grid.markdown() for grid in tables.values()))
    for name, grid in tables.items():
        cells = pd.DataFrame(grid.rows, columns=grid.headers)
        notes = "".join(f"\n{note}" for note in grid.notes)
        print(printable(f"{grid.title}\n{cells.to_string(index=False)}{notes}", keep="\n"), file=sys.stderr)
        for column in NUMBERS.keys() & cells.columns:
            cells[column] = cells[column].str.replace(",", "")  # as programs read numbers
        paths += replace(grid, rows=cells.to_numpy().tolist()).write(directory / name, "csv")
    x = drawn_over(jobs)
    points = points_over(jobs, x)
    if len(points.drop_duplicates(["row", "x"])) > 1:
        plot = figure.Plot("", "", OVER[x][1], quality_of(jobs))
        draw = partial(figure.seeds if x in LINES else figure.scatter, plot=plot)
        paths += figure.write(directory / f"{STEM}_points", points, draw)
    return paths


def jobs_of(records: Sequence[SavedRecord], begun: Mapping[Path, SweepJob] = MappingProxyType({})) -> pd.DataFrame:
    """The jobs of a multirun: a row for each record; its attribute `varied` names the settings in which they differ.

    `begun` has what the multirun notes of its jobs, by the paths of their records: another multirun may have finished
    a job, with other settings on its command line.
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

    Columns that no job has a number for are left out.
    """
    varied, done = jobs.attrs["varied"], jobs[jobs["Status"] == FINISHED]
    present = [name for name in NUMBERS if done[name].notna().any()]
    grid = Grid("Comparison", ["Job", "Mechanism", *varied, "Seed", quality_of(jobs), *present])
    for _, job in done.iterrows():
        score = NOT_RUN if job["Score"] is None else f"{job['Score']:g}"
        numbers = [cell(job[name], name) for name in present]
        grid.rows.append([*job[["Job", "Mechanism", *varied, "Seed"]], score, *numbers])
    for group, same in scored(jobs).groupby(["Mechanism", *varied], sort=False):
        if len(same) > 1:
            cells = [MEAN, *group, ", ".join(same["Seed"]), spread(same["Score"].tolist(), ".2f")]
            grid.rows.append([*cells, *(_mean(known(same[name]), name) for name in present)])
    records = done["saved"].tolist()
    if updates := [int(steps) for saved in records if (steps := saved.number("training.steps")) is not None]:
        corpora = sorted({str(s.record["corpus"]) for s in records if s.number("training.steps") is not None})
        corpus = "embedded sample corpus" if corpora == ["sample"] else "; ".join(corpora)
        ends = " to ".join(dict.fromkeys((str(min(updates)), str(max(updates)))))
        grid.notes.append(f"Corpus: {corpus}. Updates: {ends}.")
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

    Jobs `without` a record that can be read, and those that were `never` started, which may differ in `swept`, too.
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


def scored(jobs: pd.DataFrame) -> pd.DataFrame:
    """The finished jobs with a score."""
    return jobs[(jobs["Status"] == FINISHED) & jobs["Score"].notna()]


def quality_of(jobs: pd.DataFrame) -> str:
    """The names of the jobs' metrics for people."""
    return ", ".join(map(summary.label, jobs["Metric"].dropna().unique())) or "Quality"


def drawn_over(jobs: pd.DataFrame) -> str:
    """What the quality is drawn over, a key of OVER that every finished job has.

    Ranks where the jobs of one method differ in them; ranks of several methods are not comparable. Else the
    compression rate or the remaining multiply-adds, else the cache, in bytes where all jobs have them.
    """
    done = scored(jobs)
    methods = {job["Mechanism"] for _, job in done.iterrows() if "compression" in job["saved"].record}
    is_swept = "rank" in jobs.attrs["varied"] and len(methods) < 2
    names = [name for name in OVER if name != "rank" or is_swept]
    measured = [name for name in names if all(saved.number(OVER[name][0]) is not None for saved in done["saved"])]
    return next(iter(measured), "cache")


def points_over(jobs: pd.DataFrame, x: str) -> pd.DataFrame:
    """The data of a picture over a key of OVER; no rows if jobs have several metrics.

    Jobs on one line differ in ranks or in `compress.keep` alone.
    """
    done = scored(jobs)
    varied = [key for key in jobs.attrs["varied"] if x not in LINES or (key != "compress.keep" and "rank" not in key)]
    numbers = [saved.number(OVER[x][0]) for saved in done["saved"]]
    columns = [labels(done, varied), done["Seed"], numbers, done["Score"]]
    points = pd.DataFrame(dict(zip(figure.POINTS, columns, strict=True)), dtype=object).dropna()
    return points if done["Metric"].nunique() == 1 else points.iloc[:0]


def labels(jobs: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """A name for each job: the mechanism, and those of its settings that `keys` names."""
    return [
        " ".join([job["Mechanism"], *(f"{key.rpartition('.')[2]}={job[key]}" for key in keys if job[key])])
        for _, job in jobs.iterrows()
    ]


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
