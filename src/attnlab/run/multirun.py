"""The jobs of a multirun: each one is a process of its own, and how they ended is counted.

Which run a job is, stands in the multirun's directory: `jobs/3.json` names the run directory of job 3, which lies
elsewhere if the job was finished before, or continues an interrupted run.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig

from attnlab.errors import AttnlabError, DataError, WriteError, printable
from attnlab.run import cluster
from attnlab.run import record as records
from attnlab.run.decision import Decision, claimed, decide, left_to, settings
from attnlab.run.files import write_text
from attnlab.run.lock import locked
from attnlab.run.parents import environment
from attnlab.run.signals import handling, starting

WAIT = 1.0  # seconds between two looks for the decision of the first node
LATER = 30.0  # seconds between two looks whether the run of the first node has ended
JOBS = "jobs"  # the folder in a multirun's directory with a note for each job


@dataclass(frozen=True)
class Job:
    """A job of a multirun.

    Args:
        number: its place in the multirun, from 0.
        name: of the directory that Hydra gives it, `3_mustc_mtla`.
        directory: its run directory.
        what: what it did, see :class:`attnlab.run.decision.Decision`; empty where nobody has noted it.
        settings: its part of the command line.
    """

    number: int
    name: str
    directory: Path
    what: str = ""
    settings: tuple[str, ...] = ()


@contextlib.contextmanager
def begun(sweep: Path) -> Iterator[None]:
    """Hold a multirun's directory inside the block. The jobs of an earlier multirun in it are forgotten, its runs stay.

    Also ask SLURM, where there is one, to end all nodes of a job when the task of one has failed.

    Args:
        sweep: the multirun's directory.

    Raises:
        LockedError: another multirun is in progress there.
        WriteError: nothing can be written there.
    """
    try:
        sweep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(sweep)) from error
    os.environ.setdefault("SLURM_KILL_BAD_EXIT", "1")  # jobs inherit it
    with locked(sweep):
        for path in (sweep / JOBS).glob("*.json"):
            path.unlink(missing_ok=True)
        yield


def listed(sweep: Path) -> list[Job]:
    """The jobs of a multirun in their order, those that were started, skipped or left to another multirun.

    A job that was left has the directory of the other multirun's run as soon as that has a record. Of a multirun
    without a list, the folders in its directory.

    Args:
        sweep: the multirun's directory.

    Raises:
        DataError: the list cannot be read.
    """
    files = list((sweep / JOBS).glob("*.json"))
    if not files:
        jobs = [Job(_number(path), path.name, path) for path in sweep.glob("*") if path.is_dir() and path.name != JOBS]
        return sorted(jobs, key=lambda job: (job.number, job.name))
    jobs = []
    for path in files:
        try:
            found = json.loads(path.read_bytes())
            place = Path(os.path.normpath(sweep / found["directory"]))
            if found.get("left") and (run := left_to(found["left"], sweep)):
                place = Path(os.path.normpath(sweep / os.path.relpath(run, sweep)))
            jobs.append(Job(int(path.stem), found["name"], place, found["what"], tuple(found["settings"])))
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: not the note of a job ({reason}); the same command writes it again") from error
    return sorted(jobs, key=lambda job: job.number)


def run_job(cfg: DictConfig, number: int, arguments: Sequence[str], own: Path, sweep: Path) -> float:
    """Skip a job, or run it in a new process, so that its memory is released and its end takes no other job with it.

    What is done and why is printed to stderr in one line. Of a job on several nodes the first one decides, and the
    others take part in its run.

    Args:
        cfg: the job's fixed configuration.
        number: of the job.
        arguments: the job's command line.
        own: the directory that Hydra gives it.
        sweep: the multirun's directory.

    Returns:
        The best value of the validation metric that the task monitors; NaN if the job did not finish or has none.

    Raises:
        SystemExit: a signal arrived. The job has received it too; the jobs after it are not started. On another node
            than the first also: the processes of this node have failed.
    """
    path = sweep / JOBS / f"{number}.json"
    if not cluster.first_node():
        return _run_job(_decided(path), cfg, arguments, own, path)
    shown = [text for text in arguments if "=" in text and text[0] != "-"]
    others = cluster.nodes() > 1  # they wait for the note
    with claimed(cfg, sweep) as other:
        try:
            decision = decide(cfg, own, sweep, other)
        except AttnlabError:
            if others:
                _note(path, own, Decision("leave", own, ""), shown)
            raise
        print(printable(f"job {number}: {decision.said}"), file=sys.stderr, flush=True)
        _note(path, own, decision, shown)
        try:
            return _run_job(decision, cfg, arguments, own)
        finally:
            if others:
                _note(path, own, replace(decision, what="ended"), shown)


def _run_job(
    decision: Decision, cfg: DictConfig, arguments: Sequence[str], own: Path, note: Path | None = None
) -> float:
    """Do what is decided; `note`: on another node than the first one, the job's."""
    directory = decision.directory
    if directory != own:
        with contextlib.suppress(OSError):  # there may be something in it
            own.rmdir()
    if decision.what in ("start", "continue"):
        resumed = [*settings(cfg, arguments), f"resume={quoted(directory)}"]
        _run(resumed if decision.what == "continue" else arguments, directory, note)
    if not (directory / "record.json").is_file():
        return math.nan
    try:
        record = records.read(directory)
    except (OSError, ValueError, RecursionError):  # the summary counts it as not finished
        return math.nan
    if decision.what == "skip" and cfg.mode == "describe":
        print(records.dumps(record))  # as the mode itself does
    return best(record)


def _note(path: Path, own: Path, decision: Decision, shown: Sequence[str]) -> None:
    """Write down what a job does."""
    where = os.path.relpath(decision.directory, path.parents[1])
    note: dict[str, Any] = {"name": own.name, "directory": where, "what": decision.what, "settings": shown}
    note |= {"left": dict(decision.left)} if decision.left else {}
    note |= {"start": cluster.start_number()} if cluster.inside() else {}
    write_text(path, json.dumps(note, ensure_ascii=False) + "\n")


def _decided(path: Path) -> Decision:
    """What the first node of this job has decided, as soon as it has."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            note = json.loads(path.read_bytes())
            if note.get("start") == cluster.start_number():
                return Decision(note["what"], Path(os.path.normpath(path.parents[1] / note["directory"])), "")
        time.sleep(WAIT)


def _run(arguments: Sequence[str], directory: Path, note: Path | None = None) -> None:
    """Run a command in a new process, and wait for its end.

    Args:
        arguments: the command line.
        directory: the run's.
        note: on another node than the first one: the job's. The process is killed when the first node's has ended.
    """
    command = [sys.executable, "-m", "attnlab", *arguments, f"hydra.run.dir={quoted(directory)}"]
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal(number)

    # in a session of its own: Ctrl-C arrives once, through `forward`
    with starting():
        process = subprocess.Popen(command, env=environment() | cluster.rendezvous(), start_new_session=True)
    with handling(forward):
        while True:
            try:
                code = process.wait(LATER if note else None)
                break
            except subprocess.TimeoutExpired:
                if note and _decided(note).what == "ended":
                    process.kill()
                    process.wait()
                    return
    if code < 0:
        _record_killed(directory, signal.Signals(-code).name)
    if signal.SIGUSR2 in received and code:
        cluster.queue_again()
    elif received and received[0] != signal.SIGUSR2:
        raise SystemExit(128 + received[0])
    elif code and note:
        raise SystemExit(1)


def quoted(path: Path) -> str:
    """A path in the quotes that Hydra needs.

    Args:
        path: of a person.
    """
    return "'{}'".format(str(path).replace("'", "\\'"))


def best(record: Mapping[str, Any]) -> float:
    """The best value of the metric by which a finished run chose its checkpoints; NaN if there is none.

    Args:
        record: of a run that has ended.
    """
    training = record.get("training") if isinstance(record, Mapping) and record.get("status") == "finished" else None
    found = training.items() if isinstance(training, Mapping) else ()
    values = [value for name, value in found if name.startswith("best_")]
    try:
        return float(values[0]) if values and isinstance(values[0], int | float) else math.nan
    except OverflowError:  # an int that no float holds
        return math.nan


def _record_killed(directory: Path, name: str) -> None:
    """Write "failed" into the record of a job that could not do so itself; one that had finished stays finished."""
    message = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    print(printable(f"error: {directory}: {message}"), file=sys.stderr)
    record = records.read(directory) if (directory / "record.json").is_file() else {}
    if record.get("status") == "running":
        records.write(record | {"status": "failed", "error": message}, directory)


def summarize(directory: Path, jobs: int | None) -> int:
    """Print to stderr how many jobs have finished, as their records have it.

    Args:
        directory: the multirun's directory, with one run directory per job.
        jobs: how many jobs there were; None: as many as were started or skipped.

    Returns:
        The exit code: 0 if all have finished, else 1.
    """
    there = listed(directory)
    ended = {job.number: _status(job.directory) for job in there if (job.directory / "record.json").is_file()}
    jobs = len(ended) if jobs is None else jobs
    finished = [number for number, status in ended.items() if status == "finished"]
    left = sum(job.what == "leave" and ended.get(job.number, "running") == "running" for job in there)
    said = f" ({left} left to another process)" if left else ""
    print(printable(f"{len(finished)} of {jobs} jobs finished{said}: {directory}"), file=sys.stderr)
    return int(len(finished) < jobs)


def _status(run: Path) -> str:
    """As the record has it; "broken" where that cannot be read."""
    try:
        return str(records.read(run)["status"])
    except (OSError, ValueError, LookupError, TypeError):
        return "broken"


def _number(path: Path) -> int:
    """The number with which a job's directory begins; without one it comes last."""
    number = re.match(r"\d+", path.name)
    return int(number[0]) if number else sys.maxsize
