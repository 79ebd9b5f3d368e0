"""A sweep (`-m`): each job is a new process. Finished jobs are skipped, interrupted and failed ones continued.

A job is looked up by its identity, before data is read, in the records of runs below outputs/ and in the sweep's
directory. A note for each job in the sweep's directory, `jobs/3.json`, names the run directory of the job.
"""

import contextlib
import functools
import json
import math
import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnlab.config.compose import quoted
from attnlab.errors import AttnlabError, DataError, printable
from attnlab.run import identity, processes
from attnlab.run import record as records
from attnlab.run.directory import holder_of, locked, near
from attnlab.run.files import write_text, writing
from attnlab.run.loading import is_free
from attnlab.run.record import EMBEDDED, RECORD, corpus_of
from attnlab.run.store import OUTPUTS, LedgerEntry, entries

JOBS = "jobs"  # the folder of the notes
LAST = Path("checkpoints") / "last.ckpt"
NEVER_DONE = ("bench", "predict", "generate", "export")  # modes that are repeated: a time, or no result in the record
NOT_RESUMED = ("mode", "resume", "retry", "rerun")  # settings of a job that `resume=` gives by itself
DRAWING = ("pandas", "matplotlib.figure", "matplotlib.backends.backend_agg")  # a training imports them at its end
LOST = 255  # the exit code of a job whose server was killed
WAIT = 1.0  # seconds between two looks for the note of the first node

corpus_content = functools.cache(identity.corpus_content)  # the jobs of a sweep mostly read the same corpus


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep: its number, and what its note says."""

    number: int  # from 0
    name: str  # of the directory that Hydra gives it, `3_mustc_mtla`
    directory: Path  # of its run
    what: str  # it did, see Decision
    settings: tuple[str, ...]  # its part of the command line


@dataclass(frozen=True)
class Decision:
    """The decision about a job."""

    what: str  # "start", "continue", "skip" (finished, or left failed) or "leave" (in progress elsewhere)
    directory: Path  # of the run
    message: str  # the same for people, in one line


@contextlib.contextmanager
def begun(sweep: Path) -> Iterator[None]:
    """Lock a sweep's directory inside the block, without the notes of an earlier sweep. Its runs stay.

    SLURM is asked to end all nodes of a job when the task of one has failed. LockedError: another sweep is in progress
    there. WriteError: nothing can be written there.
    """
    with writing(sweep):
        sweep.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SLURM_KILL_BAD_EXIT", "1")  # jobs inherit it
    with locked(sweep):
        for path in (sweep / JOBS).glob("*.json"):
            path.unlink(missing_ok=True)
        yield


def listed(sweep: Path) -> list[SweepJob]:
    """The jobs of a sweep that have a note, by number. DataError: a note cannot be read."""
    jobs = []
    for path in (sweep / JOBS).glob("*.json"):
        try:
            note = json.loads(path.read_bytes())
            directory = Path(os.path.normpath(sweep / note["directory"]))
            jobs.append(SweepJob(int(path.stem), note["name"], directory, note["what"], tuple(note["settings"])))
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: not the note of a job ({reason}); the same command writes it again") from error
    return sorted(jobs, key=lambda job: job.number)


# --- what a job does ----------------------------------------------------------------------------------------------


def decide(cfg: DictConfig, job_dir: Path, sweep: Path) -> Decision:
    """Decide about a job. Hydra's directory `job_dir` may hold an earlier run. DataError: weights cannot be read."""
    free = free_directory(job_dir)
    start = Decision("start", free, f"starts: {near(free)}")
    runs = [] if cfg.mode in NEVER_DONE or cfg.get("rerun") else earlier_runs(cfg, sweep)
    if not runs:
        return start
    by_status = {run.status: run for run in runs}  # the newest of each
    if done := by_status.get("finished"):
        return Decision("skip", done.directory, f"finished before, skipped: {_near_with_commit(done)}")
    if (live := by_status.get("running")) and (holder := holder_of(live.directory)):
        message = f"in progress elsewhere ({holder}), left to it: {near(live.directory)}"
        return Decision("leave", live.directory, message)
    if (failed := by_status.get("failed")) and not cfg.get("retry", True):
        message = f"{_ending(failed)}, left (retry=false): {_near_with_commit(failed)}"
        return Decision("skip", failed.directory, message)
    resumable = [run for run in runs if all((run.directory / name).is_file() for name in (LAST, "config.yaml"))]
    if resumable and cfg.mode == "train":
        run = max(resumable, key=lambda run: (run.directory / LAST).stat().st_mtime)
        message = f"{_ending(run)}, continues from its checkpoint: {_near_with_commit(run)}"
        return Decision("continue", run.directory, message)
    return Decision("start", free, f"{_ending(runs[-1])}, starts again: {near(free)}")


def earlier_runs(cfg: DictConfig, sweep: Path) -> list[LedgerEntry]:
    """The recorded runs in outputs/ and in the sweep's directory that are this job, the oldest first."""
    folders = [OUTPUTS] if sweep.resolve().is_relative_to(OUTPUTS.resolve()) else [OUTPUTS, sweep]
    weights = identity.contents(cfg)
    recipe = identity.recipe(cfg, weights)
    identity_with = functools.cache(lambda content: identity.run(cfg, content, weights))

    def same(run: LedgerEntry) -> bool:
        if (run.value("mode"), run.value("seed"), run.value("recipe")) != (cfg.mode, cfg.seed, recipe):
            return False
        if run.value("identity.run") == records.NOT_RUN:  # it was killed: its record is that of its beginning
            return run.value("identity.weights") == weights and run.value("config.data_root") == cfg.data_root
        return run.value("identity.run") == identity_with(run.value("identity.corpus")) and _same_corpus(cfg, run)

    return sorted((run for folder in folders for run in entries(folder) if same(run)), key=lambda run: run.started)


def free_directory(job_dir: Path) -> Path:
    """A directory without a run: `job_dir`, or its name with the first free number."""
    tries = (job_dir if n == 1 else job_dir.with_name(f"{job_dir.name}_{n}") for n in range(1, sys.maxsize))
    return next(path for path in tries if not any((path / name).exists() for name in (RECORD, "config.yaml", LAST)))


def resume_settings(arguments: Sequence[str]) -> list[str]:
    """The arguments of a job that `resume=` accepts: flags, and settings that say where and how it runs."""
    accepted = []
    for text in arguments:
        key, equals, value = text.partition("=")
        name = key.lstrip("+")
        setting = equals and name not in NOT_RESUMED and is_free(name) and "${" not in value
        if text.startswith("-") or key.startswith("hydra") or setting:
            accepted.append(text)
    return accepted


def _same_corpus(cfg: DictConfig, run: LedgerEntry) -> bool:
    """Whether a run read what the job would read."""
    content, sample = run.value("identity.corpus"), corpus_of(run.record).startswith(EMBEDDED)
    root = OmegaConf.select(cfg, "task.data.root") or cfg.data_root
    if content == identity.NOTHING_READ or root is None or sample:
        return content == identity.NOTHING_READ or (root is None and sample)
    try:
        return bool(corpus_content(Path(str(root)).expanduser(), Path(cfg.cache_dir)) == content)
    except AttnlabError:  # the job will say what is wrong with its corpus
        return False


def _near_with_commit(run: LedgerEntry) -> str:
    """A run's directory, and its commit if that is not the present one."""
    commit = str(run.value("environment.git"))
    other = f" (made by commit {commit[:10]}; rerun=true repeats it)"
    return f"{near(run.directory)}{other * (commit != records.commit())}"


def _ending(run: LedgerEntry) -> str:
    """The end of a run that has not finished, in words."""
    shortened = textwrap.shorten(run.error, 80, placeholder="…")
    return f"failed before ({shortened})" if run.status == "failed" else "interrupted before"


# --- its process --------------------------------------------------------------------------------------------------


def run_job(cfg: DictConfig, number: int, arguments: Sequence[str], job_dir: Path, sweep: Path) -> float:
    """Skip a job, or run it in a new process, so that its memory is released and its end takes no other job with it.

    The decision is printed to stderr in one line. On several nodes the first one decides, and the others take part in
    its run. Returns the best value of the validation metric that the task monitors, or NaN.

    SystemExit: a signal arrived, also at the job; no further job is started. On another node than the first also: the
    processes of this node have failed.
    """
    path = sweep / JOBS / f"{number}.json"
    if processes.first_node():
        decision = decide(cfg, job_dir, sweep)
        print(printable(f"job {number}: {decision.message}"), file=sys.stderr, flush=True)
        note = {
            "name": job_dir.name,
            "directory": os.path.relpath(decision.directory, sweep),
            "what": decision.what,
            "settings": [text for text in arguments if "=" in text and text[0] != "-"],
            "start": processes.start_number(),
        }
        write_text(path, json.dumps(note, ensure_ascii=False) + "\n")
    else:
        decision = _noted(path)
    directory = decision.directory
    if directory != job_dir:
        with contextlib.suppress(OSError):  # there may be something in it
            job_dir.rmdir()
    if decision.what == "continue":
        arguments = [*resume_settings(arguments), f"resume={quoted(str(directory))}"]
    if decision.what in ("start", "continue"):
        task = str(cfg.task.kind["_target_"]).rpartition(".")[0]
        names = ("attnlab.torchvision_schemas", f"attnlab.modes.{cfg.mode}", task)
        modules = [name for name in names if name.startswith("attnlab.")]
        run_process(arguments, directory, [*modules, *(DRAWING if cfg.mode == "train" else ())])
    return best(records.recorded(directory))


def _noted(path: Path) -> Decision:
    """The decision of the job's first node, as soon as its note is there."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            note = json.loads(path.read_bytes())
            if note["start"] == processes.start_number():
                return Decision(note["what"], Path(os.path.normpath(path.parents[1] / note["directory"])), "")
        time.sleep(WAIT)


def run_process(arguments: Sequence[str], directory: Path, modules: Sequence[str]) -> None:
    """Run a command in a new process, and wait for its end. `modules`: names of modules that it needs."""
    words = [*arguments, f"hydra.run.dir={quoted(str(directory))}"]
    process = processes.start_job(words, os.environ | processes.rendezvous(), modules)
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, number)
        elif number != signal.SIGUSR2:  # the libraries are still loading
            raise SystemExit(128 + number)

    with processes.handling(forward):
        process.start()
        process.join()
    code = process.exitcode or 0
    while code == LOST and holder_of(directory):  # it gets SIGTERM
        time.sleep(0.1)
    if code < 0:
        _record_killed(directory, signal.Signals(-code).name)
    if signal.SIGUSR2 in received and code:
        processes.queue_again()
    elif received and received[0] != signal.SIGUSR2:
        raise SystemExit(128 + received[0])
    elif code and not processes.first_node():
        raise SystemExit(1)


def _record_killed(directory: Path, name: str) -> None:
    """Write "failed" into the record of a job that could not do so itself. An end that is recorded stays."""
    record = records.recorded(directory)
    if record.get("status", "running") == "running":
        message = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        print(printable(f"error: {directory}: {message}"), file=sys.stderr)
        if record:
            records.write(record | {"status": "failed", "error": message}, directory)


# --- how it ended -------------------------------------------------------------------------------------------------


def best(record: Mapping[str, Any]) -> float:
    """The best value of the metric by which a finished run chose its checkpoints, or NaN."""
    training = record.get("training") if record.get("status") == "finished" else None
    pairs = training.items() if isinstance(training, Mapping) else ()
    values = [value for name, value in pairs if name.startswith("best_") and isinstance(value, int | float)]
    return float(values[0]) if values else math.nan


def summarize(sweep: Path, jobs: int | None) -> int:
    """Print how many of `jobs` have finished; None: of those with a record. Returns the exit code, 0 if all have."""
    begun = listed(sweep)
    with_record = [job for job in begun if (job.directory / RECORD).is_file()]
    statuses = [(job.what, records.recorded(job.directory).get("status")) for job in with_record]
    jobs = len(statuses) if jobs is None else jobs
    finished = [what for what, status in statuses if status == "finished"]
    left = [what for what, status in statuses if what == "leave" and status == "running"]
    more = f" ({len(left)} left to another process)" if left else ""
    more += f", {jobs - len(begun)} not started" if jobs > len(begun) else ""
    print(printable(f"{len(finished)} of {jobs} jobs finished{more}: {sweep}"), file=sys.stderr)
    return int(len(finished) < jobs)
