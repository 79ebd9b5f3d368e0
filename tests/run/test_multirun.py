"""Multiruns as a user starts them: every job is a real process."""

import csv
import json
import math
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
from attnlab.config.check import compose
from attnlab.errors import DataError, LockedError, WriteError
from attnlab.run import decision, multirun
from attnlab.run import record as records
from attnlab.run.multirun import begun, best, listed, run_job, summarize
from attnlab.run.record import write


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


@pytest.mark.slow
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
    files = [f"comparison{name}" for name in (".md", ".csv", "_unfinished.csv")]
    assert errors.splitlines()[-3:] == [f"sweep/{name}" for name in files]
    tables = [list(csv.DictReader((tmp_path / "sweep" / name).read_text().splitlines())) for name in files[1:]]
    assert [(row["Job"], row["attention.head_dim"]) for row in tables[0]] == [("0_mustc_own", "36")]
    assert [(row["Job"], row["attention.head_dim"], row["Status"], row["Error"]) for row in tables[1]] == [
        ("1_mustc_own", "35", "failed", "attention: head_dim must be even for rotary pairs, not 35"),
        ("2_mustc_own", "38", "failed", "killed by SIGKILL (out of memory?)"),
    ]


@pytest.mark.slow
def test_the_same_command_again_repeats_nothing_and_tries_what_failed(tmp_path: Path) -> None:
    given = ("attention=mha,mqa", "attention.head_dim=36,35")  # an odd dimension fails
    start(tmp_path, *given).communicate(timeout=900)
    jobs = [tmp_path / "sweep" / f"{number}_mustc_{name}" for number, name in enumerate(("mha", "mha", "mqa", "mqa"))]
    before = {job: (job / "record.json").read_bytes() for job in jobs}
    errors = start(tmp_path, *given).communicate(timeout=900)[1].splitlines()
    said = [line for line in errors if line.startswith("job ")]
    assert said[0] == "job 0: finished before, skipped: sweep/0_mustc_mha"
    assert said[1].startswith("job 1: failed before (") and said[1].endswith("starts again: sweep/1_mustc_mha_2")
    assert {job: (job / "record.json").read_bytes() for job in jobs} == before
    assert "2 of 4 jobs finished: sweep" in errors
    errors = start(tmp_path, *given, "retry=false").communicate(timeout=900)[1].splitlines()
    assert any("left (retry=false): sweep/1_mustc_mha_2" in line for line in errors)


@pytest.mark.slow
def test_a_signal_ends_the_job_and_those_after_it(tmp_path: Path) -> None:
    process = start(tmp_path, "attention=mha,mla")
    first = tmp_path / "sweep" / "0_mustc_mha"
    wait_for(lambda: status(first) == "running", process)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert status(first) == "interrupted"
    assert [path.name for path in (tmp_path / "sweep").glob("[0-9]*_*")] == ["0_mustc_mha"]
    assert "0 of 2 jobs finished: sweep" in errors


def test_a_job_is_noted_run_and_then_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(decision, "_commit_now", lambda: "abc")
    cfg = compose("task=wikitext2", "attention=mha", "hardware=cpu")
    commands = []

    def child(arguments: list[str], directory: Path, note: Path | None) -> None:
        """Interrupted at first, then finished."""
        commands.append((arguments, directory))
        record = records.new(cfg, "command")
        record["environment"] |= {"device": "cpu", "threads": 1, "git": "abc"}
        records.identify(record, "sha256:sample")
        record |= {"corpus": "sample", "status": "finished"}
        if len(commands) == 1:
            record |= {"status": "interrupted", "error": "interrupted by SIGTERM"}
            (directory / "checkpoints").mkdir(parents=True)
            (directory / "checkpoints" / "last.ckpt").touch()
            (directory / "config.yaml").touch()
        record["training"]["best_val_loss"] = 1.5
        records.write(record, directory)

    monkeypatch.setattr(multirun, "_run", child)
    given = ["--config-dir=/mine", "task=wikitext2", "attention=mha", "hardware=cpu"]
    first = Path("outputs/multirun/first/0_wikitext2_mha")
    values = []
    for name in ("first", "second", "third"):
        sweep = Path("outputs/multirun") / name
        own = (sweep / first.name).absolute()
        own.mkdir(parents=True)  # Hydra makes it
        values.append(run_job(cfg, 0, given, own, sweep))
        (job,) = listed(sweep)
        assert (job.number, job.name, job.directory) == (0, first.name, first)
        assert job.settings == ("task=wikitext2", "attention=mha", "hardware=cpu")
        assert own.exists() == (name == "first")
        assert summarize(sweep, 1) == (name == "first")
    assert [str(value) for value in values] == ["nan", "1.5", "1.5"]
    resume = ["--config-dir=/mine", "hardware=cpu", f"resume='{first.absolute()}'"]
    assert commands[0] == (given, first.absolute())
    assert [text.replace("='outputs", f"='{tmp_path}/outputs") for text in commands[1][0]] == resume
    assert len(commands) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("job")]
    assert said == [
        f"job 0: starts: {first}",
        f"job 0: interrupted before, continues from its checkpoint: {first}",
        f"job 0: finished before, skipped: {first}",
    ]


def test_the_list_of_jobs(tmp_path: Path) -> None:
    for name in ("10_b", "2_a", "other"):  # a multirun of before there were lists
        (tmp_path / name).mkdir()
    assert [job.name for job in listed(tmp_path)] == ["2_a", "10_b", "other"]
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "0.json").write_text("{")
    with pytest.raises(DataError, match="jobs/0.json: not the note of a job"):
        listed(tmp_path)
    with begun(tmp_path):
        assert [job.name for job in listed(tmp_path)] == ["2_a", "10_b", "other"]
        with pytest.raises(LockedError, match="a run is in progress there"), begun(tmp_path):
            pass
    (tmp_path / "file").touch()
    with pytest.raises(WriteError), begun(tmp_path / "file"):
        pass


def test_a_job_that_another_multirun_has_taken_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both decide before the first of them has a record."""
    monkeypatch.chdir(tmp_path)
    cfg = compose("task=wikitext2", "attention=mha", "hardware=cpu")
    first, second = Path("outputs/multirun/first"), Path("outputs/multirun/second")
    commands = []

    def child(arguments: list[str], directory: Path, note: Path | None) -> None:
        commands.append(directory)
        assert math.isnan(run_job(cfg, 0, [], second / "0_a", second))

    monkeypatch.setattr(multirun, "_run", child)
    for sweep in (first, second):
        (sweep / "0_a").mkdir(parents=True)
    run_job(cfg, 0, [], first / "0_a", first)
    assert commands == [first / "0_a"]
    assert f"taken by another multirun (process {os.getpid()} on " in capsys.readouterr().err
    assert summarize(second, 1) == 1
    assert "0 of 1 jobs finished (1 left to another process): " in capsys.readouterr().err
    assert listed(second)[0].directory == second / "0_a"
    record = records.new(cfg, "command") | {"status": "finished"}
    records.identify(record | {"environment": {"device": "cpu", "threads": 1}}, "sha256:sample")
    write(record, first / "0_a")  # it has finished when the second multirun ends
    assert listed(second)[0].directory == first / "0_a" and summarize(second, 1) == 0
    assert "1 of 1 jobs finished: " in capsys.readouterr().err
    (first / "0_a" / "record.json").unlink()
    run_job(cfg, 0, [], second / "0_a", second)  # it is free again
    assert commands == [first / "0_a", second / "0_a"] and not list(Path("outputs/.jobs").iterdir())


@pytest.mark.parametrize("training", [None, [], {}, {"best_x": 10**400}, {"best_x": None}, {"best_x": "nan"}])
def test_a_finished_record_without_a_value_to_search_by(training: Any) -> None:
    assert math.isnan(best({"status": "finished", "training": training}))
    assert math.isnan(best({"status": "finished"}))
    assert best({"status": "finished", "training": {"steps": 1, "best_x": 2}}) == 2.0


def test_the_exit_code_of_a_multirun(tmp_path: Path) -> None:
    for name, ended in (("0_a", "finished"), ("1_b", "finished")):
        (tmp_path / name).mkdir()
        write({"status": ended}, tmp_path / name)
    assert summarize(tmp_path, 2) == 0
    assert summarize(tmp_path, 3) == 1  # a job without a record has not finished
    for content in ("{", "[]", "{}", "\\xff"):
        (tmp_path / "1_b" / "record.json").write_text(content)
        assert summarize(tmp_path, 2) == 1
