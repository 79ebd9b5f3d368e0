"""The jobs of a multirun: each one is a process of its own, and how they ended is counted."""

import math
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from attnlab.runs import record as records
from attnlab.runs.parents import environment
from attnlab.runs.signals import handling


def run_job(arguments: Sequence[str], directory: Path) -> float:
    """Run one job in a new process, so that its memory is released and a job that is killed takes no other with it.

    Args:
        arguments: the job's command line.
        directory: its run directory.

    Returns:
        The best value of the validation metric that the task monitors; NaN if the job did not finish or has none.

    Raises:
        SystemExit: a signal arrived. The job has received it too; the jobs after it are not started.
    """
    place = str(directory).replace("'", "\\'")
    command = [sys.executable, "-m", "attnlab", *arguments, f"hydra.run.dir='{place}'"]
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal(number)

    # in a session of its own: Ctrl-C arrives once, through `forward`
    process = subprocess.Popen(command, env=environment(), start_new_session=True)
    with handling(forward):
        code = process.wait()
    if code < 0:
        _record_killed(directory, signal.Signals(-code).name)
    if received:
        raise SystemExit(128 + received[0])
    return best(records.read(directory)) if (directory / "record.json").is_file() else math.nan


def best(record: Mapping[str, Any]) -> float:
    """The best value of the metric by which a finished run chose its checkpoints; NaN if there is none.

    Args:
        record: of a run that has ended.
    """
    values = [value for name, value in record["training"].items() if name.startswith("best_")]
    finished = record["status"] == "finished" and values and isinstance(values[0], int | float)
    return float(values[0]) if finished else math.nan


def _record_killed(directory: Path, name: str) -> None:
    """Write "failed" into the record of a job that could not do so itself."""
    message = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    print(f"error: {directory}: {message}", file=sys.stderr)
    if (directory / "record.json").is_file():
        records.write(records.read(directory) | {"status": "failed", "error": message}, directory)


def summarize(directory: Path, jobs: int | None) -> int:
    """Print to stderr how many jobs have finished, as their records have it.

    Args:
        directory: the multirun's directory, with one run directory per job.
        jobs: how many jobs there were; None: as many as have a record.

    Returns:
        The exit code: 0 if all have finished, else 1.
    """
    found = [records.read(path.parent) for path in directory.glob("*/record.json")]
    jobs = len(found) if jobs is None else jobs
    finished = [record for record in found if record["status"] == "finished"]
    print(f"{len(finished)} of {jobs} jobs finished: {directory}", file=sys.stderr)
    return int(len(finished) < jobs)
