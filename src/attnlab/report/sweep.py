"""The comparison at the end of a multirun: finished jobs with means over seeds, and a second table of the others."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

from attnlab.callbacks import summary
from attnlab.errors import DataError, printable
from attnlab.report import figure
from attnlab.report.runs import LOWER
from attnlab.report.significance import Difference, differences
from attnlab.report.table import Grid, frame, known, spread
from attnlab.run.directory import holder_of
from attnlab.run.files import write_text
from attnlab.run.record import BUSY, NOT_RUN, RECORD
from attnlab.run.store import SavedRecord, collect
from attnlab.run.sweep import SweepJob, listed

STEM = "comparison"
MEAN = "mean ± sd"
TEST = "from the first mechanism of its seed and corpus. p is of a paired bootstrap over the test set, so of one seed"
UNEQUAL = 1.03  # ratio of parameters above which a comparison of mechanisms mentions it
HIDDEN = {"attention", "compress", "stride", "rank", "seed", "cache_dir"}  # settings without a column
NUMBERS = {  # column: its key in the record, and its format
    "Parameters": ("parameters.total", ",.0f"),
    "Cache per token and layer, numbers": ("kv_cache.elements_per_token_per_layer", "g"),
    "Updates": ("training.steps", ",.0f"),
    "Training, s": ("training.seconds", ",.1f"),
    "Training, tokens/s": ("training.tokens_per_second", ",.1f"),
    "Training, images/s": ("training.images_per_second", ",.1f"),
    "Decoding, tokens/s": ("inference.tokens_per_second", ",.1f"),
    "Scoring, images/s": ("inference.images_per_second", ",.1f"),
    "Peak memory while scoring, MiB": ("inference.peak_memory_mib", ",.1f"),
}
SIZES = tuple(NUMBERS)[:2]  # the same for every seed
SPEED = "Decoding, tokens/s"
OVER = {  # the plot's x: its key in the record
    "rank": "rank",
    "compression rate of the replaced matrices": "compression.rate.rate",
    "cached numbers per token and layer": "kv_cache.elements_per_token_per_layer",
}


def render(directory: Path) -> list[Path]:
    """Print the tables of a multirun's jobs to stderr; write comparison.{md,csv} and a plot with its data as CSV.

    Unfinished jobs are in a second table and in comparison_unfinished.csv.
    """
    begun = {job.directory / RECORD: job for job in reversed(listed(directory))}  # two jobs may be one run
    if not begun:
        return []
    there = [file for file in begun if file.is_file()]
    read = {saved.path: saved for saved in (collect(there) if there else [])}
    pairs = [(job, read.get(file)) for file, job in reversed(begun.items())]
    done = [(job, saved) for job, saved in pairs if saved and saved.record["status"] == "finished"]
    every = [job for job, _ in pairs]
    jobs = jobs_of(done, every)
    tables = {STEM: table(jobs)}
    if len(done) < len(pairs):
        tables[f"{STEM}_unfinished"] = unfinished([pair for pair in pairs if pair not in done], every)
    paths = [directory / f"{STEM}.md"]
    write_text(paths[0], "\n".join(grid.markdown() for grid in tables.values()))
    for name, grid in tables.items():
        cells = pd.DataFrame(grid.rows, columns=grid.headers)
        notes = "".join(f"\n{note}" for note in grid.notes)
        print(printable(f"{grid.title}\n{cells.to_string(index=False)}{notes}", keep="\n"), file=sys.stderr)
        for column in NUMBERS.keys() & cells.columns:
            cells[column] = cells[column].str.replace(",", "")  # plain numbers
        paths += replace(grid, rows=cells.to_numpy().tolist()).write(directory / name, "csv")
    x, points = points_of(jobs)
    if len(points.drop_duplicates(["row", "x"])) > 1:
        lower = " (lower is better)" * all(metric.startswith(LOWER) for metric in jobs["Metric"].dropna())
        title = "; ".join(sorted({saved.corpus for saved in jobs["saved"]}))
        plot = figure.Plot("", "", x, f"{jobs.attrs['quality']}{lower}")
        draw = partial(figure.scatter, plot=plot, title=title, joined=True)
        paths += figure.write(directory / f"{STEM}_points", points, draw)
    return paths


def jobs_of(pairs: Sequence[tuple[SweepJob, SavedRecord]], every: Sequence[SweepJob]) -> pd.DataFrame:
    """The finished jobs of a multirun, with its settings: an earlier one may have finished a job with others.

    Attributes: `varied` names the settings in which any of its jobs differ, `quality` the metrics.
    """
    jobs = frame(
        [saved for _, saved in pairs],
        Mechanism=lambda saved: saved.label,
        Seed=lambda saved: str(saved.record["seed"]),
        Metric=lambda saved: saved.score and saved.score[0],
        Score=lambda saved: saved.score and saved.score[1],
        **{name: partial(SavedRecord.number, dotted=key) for name, (key, _) in NUMBERS.items()},
    )
    jobs["Job"] = [job.name for job, _ in pairs]
    settings = pd.DataFrame([dict(word.split("=", 1) for word in job.settings) for job in every], dtype=object)
    varied = [key for key in settings if key not in HIDDEN and settings[key].nunique(dropna=False) > 1]
    jobs = jobs.join(settings[varied].fillna("").set_index(pd.Index([job.name for job in every])), on="Job")
    quality = ", ".join(map(summary.label, jobs["Metric"].dropna().unique())) or "Quality"
    jobs.attrs |= {"varied": varied, "quality": quality}
    return jobs


def table(jobs: pd.DataFrame) -> Grid:
    """A row for each job, and a row of means for each mechanism and setting with several seeds. No column is empty."""
    varied = jobs.attrs["varied"]
    present = [name for name in NUMBERS if jobs[name].notna().any()]
    same = ["Seed", *(key for key in varied if key == "data_root")]  # in both jobs of a difference
    kind = ["Mechanism", *(key for key in varied if key not in same)]
    first = jobs[(jobs[kind] == jobs.iloc[0][kind]).all(axis=1)] if len(jobs) else jobs
    baselines = {tuple(job[same]): job["saved"] for _, job in first.iterrows()}
    tests = [compared(baselines.get(tuple(job[same])), job["saved"]) for _, job in jobs.iterrows()]
    jobs = jobs.assign(Test=pd.Series(tests, index=jobs.index, dtype=object))
    tested = ["Difference"] * (len(first) < len(jobs))
    grid = Grid("Comparison", ["Job", "Mechanism", *varied, "Seed", jobs.attrs["quality"], *tested, *present])
    for _, job in jobs.iterrows():
        score = NOT_RUN if job["Score"] is None else f"{job['Score']:g}"
        numbers = [cell(job[name], name) for name in present]
        test = f"{job['Test'].change:+.2f}, p = {job['Test'].p:.3f}" if job["Test"] else NOT_RUN
        test = "" if baselines.get(tuple(job[same])) is job["saved"] else test
        grid.rows.append([*job[["Job", "Mechanism", *varied, "Seed"]], score, *[test] * len(tested), *numbers])
    for group, seeds in jobs.dropna(subset="Score").groupby(["Mechanism", *varied], sort=False):
        if len(seeds) > 1:
            changes = [test.change for test in seeds["Test"] if test]
            ends = f"{min(changes):+.2f} to {max(changes):+.2f}" if changes else ""
            cells = [MEAN, *group, ", ".join(seeds["Seed"]), spread(seeds["Score"].tolist(), ".2f")]
            grid.rows.append([*cells, *[ends] * len(tested), *(_mean(known(seeds[name]), name) for name in present)])
    if corpora := sorted({str(saved.record["corpus"]) for saved in jobs["saved"]}):
        grid.notes.append(f"Corpus: {'; '.join(corpora)}.")
    sizes = known(jobs["Parameters"])
    plain = not varied and all(saved.record["compress"] == "none" for saved in jobs["saved"])
    if plain and jobs["Mechanism"].nunique() > 1 and sizes and max(sizes) > UNEQUAL * min(sizes):
        more = f"Parameters differ by {100 * (max(sizes) / min(sizes) - 1):.0f} %"
        grid.notes.append(f"{more}: task.match=parameters gives every mechanism as many as attention=mha has.")
    if unequal := unequal_budgets(jobs):
        grid.notes.append(unequal)
    busy = max((saved.number("inference.busy_cores_before") or 0.0 for saved in jobs["saved"]), default=0.0)
    if busy > BUSY:
        grid.notes.append(f"Other programs kept up to {busy:.1f} cores busy before scoring: speeds are not comparable.")
    if tested:
        grid.notes += [f"Difference: {TEST}.", *verdict(jobs, kind)]
    return grid


def unequal_budgets(jobs: pd.DataFrame) -> str:
    """A note on jobs of different numbers of updates; empty: they have one number."""
    updates = jobs.dropna(subset=["Updates"]).sort_values("Updates", kind="stable")
    if updates["Updates"].nunique() < 2:
        return ""
    ends = []
    for _, job in updates.iloc[[0, -1]].iterrows():
        seconds = "" if pd.isna(job["Training, s"]) else f" in {job['Training, s']:,.0f} s"
        ends.append(f"{job['Updates']:,.0f} updates{seconds} ({job['Job']})")
    return f"Budgets are unequal, from {' to '.join(ends)}: the scores do not compare the mechanisms alone."


def verdict(jobs: pd.DataFrame, kind: list[str]) -> list[str]:
    """A sentence that says which mechanisms are better than the first; empty: jobs have several metrics, or no test."""
    tested = jobs[jobs["Test"].map(bool)]
    if tested.empty or jobs["Metric"].nunique() > 1:
        return []
    metric, names = tested.iloc[0]["Metric"], dict[str, list[str]]()
    lower = metric.startswith(LOWER)
    for _, same in tested.groupby(["Mechanism", *jobs.attrs["varied"]], sort=False):
        signs = {(test.low > 0) - (test.high < 0) for test in same["Test"]}
        how = "undecided (the 95 % interval contains 0, or seeds disagree)"
        if signs in ({1}, {-1}):
            how = "worse" if signs == {1 if lower else -1} else "better"
        names.setdefault(how, []).append(label_of(same.iloc[0], jobs.attrs["varied"]))
    first = label_of(jobs.iloc[0], kind[1:])
    results = "; ".join(f"{how}: {', '.join(names[how])}" for how in sorted(names))
    return [f"{'Lower' if lower else 'Higher'} {summary.label(metric)} is better. Compared with {first}, {results}."]


def label_of(job: pd.Series, keys: Sequence[str]) -> str:
    """A job's mechanism and its settings, for people."""
    return " ".join([job["Mechanism"], *(f"{key.rpartition('.')[2]}={job[key]}" for key in keys if job[key])])


def compared(first: SavedRecord | None, saved: SavedRecord) -> Difference | None:
    """The difference of two jobs' scores; None: they are one job, or their predictions do not give it."""
    try:
        tests = differences(first, saved) if first and first is not saved else []
    except DataError:
        return None
    return next((test for test in tests if saved.score and test.metric == saved.score[0]), None)


def unfinished(pairs: Sequence[tuple[SweepJob, SavedRecord | None]], every: Sequence[SweepJob]) -> Grid:
    """A row for each of these jobs, which may lack a record, with the settings that not all of `every` have."""
    grid = Grid("Not finished", ["Job", "Settings", "Status", "Error"])
    common = set.intersection(*(set(job.settings) for job in every)) if len(every) > 1 else set()
    for job, saved in pairs:
        status, error = saved.state() if saved else ("without a record", "it was ended before it could write one")
        if status != "failed" and (holder := holder_of(job.directory)):
            error = f"in progress elsewhere ({holder}), left to it"
        grid.rows.append([job.name, " ".join(word for word in job.settings if word not in common), status, error])
    return grid


def points_of(jobs: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """The x of the plot, a key of OVER, and the points; no points if jobs have several metrics.

    x is the rank if jobs differ in it, else the compression rate if all jobs have one, else the cache.
    """
    varied, done = jobs.attrs["varied"], jobs.dropna(subset="Score")
    numbers = {name: [saved.number(key) for saved in done["saved"]] for name, key in OVER.items()}
    measured = [name for name in OVER if None not in numbers[name] and (name != "rank" or len({*numbers[name]}) > 1)]
    x = next(iter(measured), list(OVER)[-1])
    labels = [label_of(job, varied) for _, job in done.iterrows()]
    columns = [labels, done["Seed"], numbers[x], done["Score"]]
    points = pd.DataFrame(dict(zip(figure.POINTS, columns, strict=True)), dtype=object).dropna()
    return x, points if done["Metric"].nunique() == 1 else points.iloc[:0]


def cell(value: float | None, column: str) -> str:
    """A number in the format of its column of NUMBERS; None: not measured."""
    if value == 0 and column == SIZES[1]:
        return "of fixed size"
    return NOT_RUN if value is None else format(value, NUMBERS[column][1])


def _mean(values: list[float], column: str) -> str:
    """The mean over seeds; a size has one value for all of them."""
    if len(values) == 1 or (column in SIZES and len(set(values)) == 1):
        return cell(values[0], column)
    return spread(values, NUMBERS[column][1])
