"""The comparison at the end of a multirun: a row for each finished job and the means of seeds, the other jobs apart."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich.markup import escape
from rich.table import Table

from attnlab.callbacks import summary
from attnlab.report import figure
from attnlab.report.spec import Plot
from attnlab.report.table import Grid, frame, known, spread
from attnlab.run.console import Screen
from attnlab.run.directory import holder_of
from attnlab.run.files import write_text
from attnlab.run.record import BUSY, NOT_RUN, RECORD
from attnlab.run.store import SavedRecord, collect
from attnlab.run.sweep import listed

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
KEPT = "compress.keep"
SPEED = "Decoding, tokens/s"
OVER = {  # what the picture's x can be: where the record has it, and the label of the axis
    "rank": ("rank", "rank"),
    "rate": ("compression.rate.rate", "compression rate of the replaced matrices"),
    "multiply-adds": ("compression.remaining.multiply_adds_percent", "multiply-adds, % of the dense model's"),
    "bytes": ("kv_cache.bytes_per_position", "cache in bytes per token, all layers"),
    "cache": ("kv_cache.elements_per_token_per_layer", "cached numbers per token and layer"),
    SPEED: (NUMBERS[SPEED][0], "decoded tokens per second"),
}


def render(directory: Path, planned: Sequence[DictConfig] = (), swept: Sequence[str] = ()) -> list[Path]:
    """Print the tables of a multirun's jobs to stderr; write comparison.{md,csv} and pictures with their data as CSV.

    Jobs that have not finished are in a second table and in comparison_unfinished.csv. comparison_points shows the
    quality over what the sweep varies (:func:`drawn_over`), comparison_speed over the speed of decoding if all jobs
    were measured alike, comparison_curves the losses. A picture needs two points, or two runs with curves.

    Args:
        planned: the configuration of each job, in order; jobs that were never started are listed. Empty: unknown.
        swept: the keys that the command line gives several values.

    Raises:
        WriteError: a file cannot be written.
    """
    begun = listed(directory)
    if not begun:
        return []
    settings = {job.directory / RECORD: job.settings for job in reversed(begun)}  # two jobs may be one run
    files = [file for file in reversed(settings) if file.is_file()]
    read = {saved.path: saved for saved in (collect(files) if files else [])}
    records = [_as_in_this_multirun(read[file], settings[file]) for file in files if file in read]
    elsewhere = any(job.directory.parent != directory for job in begun)
    jobs = jobs_of(records, {job.directory: job.name for job in begun}, directory if elsewhere else None)
    never = {i: cfg for i, cfg in enumerate(planned) if i not in {job.number for job in begun}}
    without = {job.name: job.what for job in begun if job.directory / RECORD not in read}
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
    over, is_line = drawn_over(jobs)
    kinds = {"points": (over, is_line, figure.seeds if is_line else figure.scatter)}
    kinds["speed"] = (SPEED, False, figure.scatter)
    for name, (x, lines, draw) in kinds.items():
        data, title = points_over(jobs, x, lines)
        if len(data.drop_duplicates(["row", "x"])) > 1:
            plot = Plot("", "", OVER[x][1], title, name=name)
            paths += figure.write(directory / f"{STEM}_{name}", data, partial(draw, plot=plot, title=title))
    losses = figure.together(labels(jobs))
    if len(losses.drop_duplicates(["run", "seed"])) > 1:
        paths += figure.write(directory / f"{STEM}_curves", losses, figure.draw_together)
    return paths


def _as_in_this_multirun(saved: SavedRecord, settings: Sequence[str]) -> SavedRecord:
    """A job's record with the command of this multirun; another one may have finished it."""
    command = {"command": shlex.join(["python", "-m", "attnlab", *settings])} if settings else {}
    return SavedRecord(saved.path, saved.record | command)


def jobs_of(
    records: Sequence[SavedRecord], names: Mapping[Path, str] | None = None, home: Path | None = None
) -> pd.DataFrame:
    """The jobs of a multirun: a row for each record; its attribute `varied` names the settings in which they differ.

    Args:
        records: in the order of the rows.
        names: of the jobs by their run directories. Default: the directories' names.
        home: the multirun's directory where some of its jobs lie elsewhere: `Directory` is relative to it.
    """
    jobs = frame(
        records,
        Job=lambda saved: (names or {}).get(saved.path.parent, saved.path.parent.name),
        Mechanism=mechanism,
        Seed=lambda saved: str(saved.record["seed"]),
        Directory=lambda saved: home and Path(os.path.relpath(saved.path.parent, home)).as_posix(),
        Status="status",
        Metric=metric,
        Score=lambda saved: saved.number(f"quality.{metric(saved)}"),
        Protocol=_protocol,
        **{name: partial(SavedRecord.number, dotted=key) for name, (key, _) in NUMBERS.items()},
    )
    settings = pd.DataFrame([_settings(saved) for saved in records], dtype=object, index=jobs.index)
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
    place = ["Directory"] if jobs["Directory"].notna().any() else []
    grid = Grid("Comparison", ["Job", "Mechanism", *varied, "Seed", quality, *present, *place])
    for _, job in done.iterrows():
        score = NOT_RUN if job["Score"] is None else f"{job['Score']:g}"
        unit = f" {summary.label(job['Metric'] or '')}" if quality == "Quality" and job["Score"] is not None else ""
        numbers = [cell(job[name], name) for name in present]
        grid.rows.append([*job[["Job", "Mechanism", *varied, "Seed"]], score + unit, *numbers, *job[place]])
    for group, same in groups(jobs):
        if len(same) > 1:
            cells = [MEAN, *group, ", ".join(same["Seed"]), spread(same["Score"].tolist(), ".2f")]
            grid.rows.append([*cells, *(_mean(known(same[name]), name) for name in present), *[""] * len(place)])
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
    without: Mapping[str, str] = MappingProxyType({}),
    never: Mapping[int, DictConfig] = MappingProxyType({}),
    swept: Sequence[str] = (),
) -> Grid:
    """A row for each job that has not finished: how it ended, and its error.

    Args:
        without: jobs without a record that can be read, and what each did, see :class:`attnlab.run.sweep.Decision`.
        never: the configurations of jobs that were never started, by their numbers; they may differ in `swept`.
    """
    keys = list(jobs.attrs["varied"])
    keys += [key for key in swept if key not in {*keys, *HIDDEN}] if never else []
    place = ["Directory"] if jobs["Directory"].notna().any() else []
    rows: list[dict[str, Any]] = []
    for _, job in jobs[jobs["Status"] != FINISHED].iterrows():
        saved = job["saved"]
        holder = holder_of(saved.path.parent) if job["Status"] == "running" else None
        error = f"in progress elsewhere ({holder}), left to it" if holder else str(saved.record.get("error") or "")
        rows.append(_settings(saved) | job.to_dict() | {"Error": " ".join(error.split())})
    for name, what in without.items():
        status, error = "without a record", "it was ended before it could write one"
        if what == "leave":
            status, error = "left to another multirun", "another multirun had taken it"
        rows.append({"Job": name, "Status": status, "Error": error})
    for i, cfg in never.items():
        settings = {key: cfg.choices[key] if key in cfg.choices else OmegaConf.select(cfg, key) for key in keys}
        job = {"Job": i, "Mechanism": _mechanism_of(cfg), "Seed": cfg.seed, "Status": "never started"}
        rows.append(settings | job)
    grid = Grid("Not finished", ["Job", "Mechanism", *keys, "Seed", *place, "Status", "Error"])
    grid.rows = [["" if row.get(key) is None else str(row[key]) for key in grid.headers] for row in rows]
    return grid


def groups(jobs: pd.DataFrame) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """The finished jobs with a score by mechanism and settings: those that differ in the seed alone are together."""
    done = jobs[(jobs["Status"] == FINISHED) & jobs["Score"].notna()]
    return list(done.groupby(["Mechanism", *jobs.attrs["varied"]], sort=False)) if len(done) else []


def drawn_over(jobs: pd.DataFrame) -> tuple[str, bool]:
    """What the quality is drawn over, a key of OVER, and whether as lines.

    Ranks or compression rates where the jobs differ in them: the rank of one method; of several methods, whose ranks
    are not comparable, or where other settings of the compression differ, the compression rate or the remaining
    multiply-adds. Otherwise the cache, in bytes where all jobs have them.
    """
    done = [saved for _, same in groups(jobs) for saved in same["saved"]]
    measured = [name for name, (key, _) in OVER.items() if all(saved.number(key) is not None for saved in done)]
    is_swept = "rank" in jobs.attrs["varied"]
    if any("compression" in saved.record for saved in done):
        methods = {mechanism(saved) for saved in done}
        rates = [name for name in ("rate", "multiply-adds") if name in measured]
        return ("rank" if (is_swept and len(methods) == 1) or not rates else rates[0]), True
    if is_swept and len({saved.number("rank") for saved in done} - {None}) > 1:
        return "rank", True
    return ("bytes" if done and "bytes" in measured else "cache"), False


def points_over(jobs: pd.DataFrame, x: str, is_line: bool = False) -> tuple[pd.DataFrame, str]:
    """The data of a picture over a key of OVER, and the name of the metric.

    There are no rows if jobs have several metrics, or were measured for SPEED in different ways. Of a line, jobs that
    differ in ranks or in KEPT alone are of one row.
    """
    metrics = jobs["Metric"].dropna().unique()
    done = [job for _, same in groups(jobs) for _, job in same.iterrows()] if len(metrics) == 1 else []
    if x == SPEED and len({job["Protocol"] for job in done} - {None}) > 1:
        done = []
    varied = [name for name in jobs.attrs["varied"] if not (is_line and (name == KEPT or "rank" in name))]
    key = OVER[x][0]
    rows = [
        [" ".join(filter(None, job[["Mechanism", *varied]])), job["Seed"], job["saved"].number(key), job["Score"]]
        for job in done
    ]
    points = pd.DataFrame(rows, columns=figure.POINTS, dtype=object).dropna()
    return points, summary.label(metrics[0]) if len(metrics) == 1 else ""


def labels(jobs: pd.DataFrame) -> list[tuple[str, int, Path]]:
    """Name, seed and run directory of each job; the name: the mechanism and the settings in which the jobs differ."""
    named: dict[tuple[str, int], Path] = {}
    for saved in jobs["saved"]:
        settings, seed, folder = _settings(saved), int(saved.record["seed"]), saved.path.parent
        words = [f"{k.rpartition('.')[2]}={settings[k]}" for k in jobs.attrs["varied"] if k in settings]
        label = " ".join([mechanism(saved), *words])
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


def _mechanism_of(cfg: DictConfig) -> str:
    record: dict[str, Any] = {"attention": cfg.choices.attention or "none", "stride": cfg.stride}
    record["config"] = {"attention": {"pattern": OmegaConf.select(cfg, "attention.pattern")}}
    return mechanism(SavedRecord(Path(), record | {"compress": cfg.choices.compress}))


def _settings(saved: SavedRecord) -> dict[str, str]:
    """The settings of the job's command line."""
    words = shlex.split(saved.record["command"])
    words = words[words.index("attnlab") + 1 :] if "attnlab" in words else words
    return {key: value for key, equals, value in (word.partition("=") for word in words) if equals and key[0] != "-"}


def _protocol(saved: SavedRecord) -> str | None:
    """How a job was measured while it was scored; None where it was not."""
    about = saved.record["inference"]
    if saved.number("inference.seconds") is None:
        return None
    beam = [f"beam {about['beam']}"] if saved.number("inference.beam") is not None else []
    return ", ".join([str(about["protocol"]), *beam, str(about["dtype"]), saved.record["environment"]["device"]])
