"""Multiruns as a user starts them: every job is a real process."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from attnlab.config.build import CONF
from attnlab.runs.multirun import summarize
from attnlab.runs.record import write


def start(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "attnlab", "-m", "mode=describe", "hydra.sweep.dir=sweep", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "DATA_ROOT"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def status(directory: Path) -> str | None:
    path = directory / "record.json"
    return json.loads(path.read_text())["status"] if path.is_file() else None


def test_a_failed_job_and_a_killed_one_take_no_other_with_them(tmp_path: Path) -> None:
    """The mechanism is one of the user's own, from a directory that the jobs must be told of."""
    (tmp_path / "mine" / "attention").mkdir(parents=True)
    text = (CONF / "attention" / "mha.yaml").read_text()
    (tmp_path / "mine" / "attention" / "own.yaml").write_text(text)
    process = start(tmp_path, "attention=own", "--config-dir=mine", "attention.head_dim=36,35,38")
    finished, failed, killed = (tmp_path / "sweep" / f"{number}_mustc_own" for number in range(3))
    wait_for(lambda: status(killed) == "running", process)
    (job,) = psutil.Process(process.pid).children()
    assert [f"hydra.run.dir='{path}'" for path in (Path("sweep") / killed.name, killed)].count(job.cmdline()[-1]) == 1
    job.kill()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert [status(path) for path in (finished, failed, killed)] == ["finished", "failed", "failed"]
    record = json.loads((finished / "record.json").read_text())
    words = "mode=describe attention=own attention.head_dim=36"
    assert record["command"] == f"python -m attnlab --config-dir={tmp_path}/mine {words}"
    assert "head_dim must be even" in json.loads((failed / "record.json").read_text())["error"]
    assert "\n1 of 3 jobs finished: sweep\n" in errors
    assert errors.splitlines()[-2:] == ["sweep/comparison.md", "sweep/comparison.csv"]
    with (tmp_path / "sweep" / "comparison.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["Job"], row["attention.head_dim"], row["Ended"]) for row in rows] == [
        ("0_mustc_own", "36", "finished"),
        ("1_mustc_own", "35", "failed: attention: head_dim must be even for rotary pairs, not 35"),
        ("2_mustc_own", "38", "failed: killed by SIGKILL (out of memory?)"),
    ]


@pytest.mark.slow
def test_a_signal_ends_the_job_and_those_after_it(tmp_path: Path) -> None:
    process = start(tmp_path, "attention=mha,mla")
    first = tmp_path / "sweep" / "0_mustc_mha"
    wait_for(lambda: status(first) == "running", process)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert status(first) == "interrupted"
    assert [path.name for path in (tmp_path / "sweep").glob("*_*")] == ["0_mustc_mha"]
    assert "0 of 2 jobs finished: sweep" in errors


def test_the_exit_code_of_a_multirun(tmp_path: Path) -> None:
    for name, ended in (("0_a", "finished"), ("1_b", "finished")):
        (tmp_path / name).mkdir()
        write({"status": ended}, tmp_path / name)
    assert summarize(tmp_path, 2) == 0
    assert summarize(tmp_path, 3) == 1  # a job without a record has not finished
