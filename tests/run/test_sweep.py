"""Sweeps: the decision for each job by the existing records, and the end of its process."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import DictConfig, OmegaConf

from attnlab.config.build import CONF
from attnlab.config.check import compose
from attnlab.errors import DataError, LockedError, WriteError
from attnlab.run import identity, sweep
from attnlab.run import record as records
from attnlab.run.directory import is_run, locked
from attnlab.run.files import write_text
from attnlab.run.identity import NOTHING_READ
from attnlab.run.sweep import begun, best, decide, free_directory, listed, resume_settings, run_job, summarize
from tests.command import environment
from tests.run.test_identity import changed

SWEEP = Path("outputs/multirun/new")
JOB = SWEEP / "3_job"
WORDS = ["task=wikitext2", "attention=mtla", "hardware=cpu"]


@pytest.fixture(scope="module")
def cfg() -> DictConfig:
    return compose(*WORDS)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "commit", lambda: "new" * 10)
    sweep.corpus_content.cache_clear()
    return tmp_path


def ran(cfg: DictConfig, directory: str, status: str = "finished", checkpoint: bool = False, **more: Any) -> Path:
    """A run directory in outputs/."""
    record = records.new(cfg, "command")
    record["environment"] |= {"device": "cpu", "threads": 1, "git": "new" * 10}
    record["status"] = status
    if status != "running":  # a record is not written again until the run ends
        records.identify(record, more.pop("content", "sha256:sample"))
        record["corpus"] = "sample"
    record |= {"error": "no\nluck"} if status in ("failed", "interrupted") else {}
    path = Path("outputs") / directory
    path.mkdir(parents=True, exist_ok=True)
    more = {key: record[key] | value if isinstance(value, dict) else value for key, value in more.items()}
    records.write(record | more, path)
    OmegaConf.save(cfg, path / "config.yaml")
    if checkpoint:
        (path / "checkpoints").mkdir()
        (path / "checkpoints" / "last.ckpt").touch()
    return path


# --- what a job does ----------------------------------------------------------------------------------------------


def test_a_new_job_starts(cfg: DictConfig) -> None:
    ran(changed(cfg, seed=2), "other_seed")
    ran(changed(cfg, mode="describe"), "other_mode")
    ran(changed(cfg, attention__stride=3), "other_recipe")
    decision = decide(cfg, JOB, SWEEP)
    assert (decision.what, decision.directory) == ("start", JOB)


@pytest.mark.parametrize(
    ("runs", "changes", "what", "words"),
    [
        (["finished"], {}, "skip", "finished before"),
        (["finished"], {"rerun": True}, "start", "starts: "),
        (["finished", "failed"], {"retry": False}, "skip", "finished before"),
        (["interrupted"], {}, "start", "interrupted before, starts again"),
        (["running"], {}, "start", "interrupted before, starts again"),  # killed: its lock is free
        (["interrupted", "interrupted+"], {}, "continue", "interrupted before, continues"),
        (["running+"], {}, "continue", "interrupted before, continues"),
        (["failed"], {}, "start", "failed before (no luck), starts again"),
        (["failed+"], {}, "continue", "failed before (no luck), continues"),
        (["failed"], {"retry": False}, "skip", "failed before (no luck), left (retry=false)"),
    ],
)
def test_a_job_by_its_earlier_runs(
    cfg: DictConfig, runs: list[str], changes: dict[str, Any], what: str, words: str
) -> None:
    paths = [ran(cfg, f"{i}", status.rstrip("+"), status.endswith("+")) for i, status in enumerate(runs)]
    decision = decide(changed(cfg, hardware__devices=1, tags=["c"], **changes), JOB, SWEEP)
    assert decision.what == what and words in decision.message
    last = paths[0] if "finished" in runs else paths[-1]
    assert decision.directory == (JOB if what == "start" else last) and str(decision.directory) in decision.message


def test_a_skipped_job_names_another_commit(cfg: DictConfig) -> None:
    ran(cfg, "done", environment={"git": "0123456789abcdef-dirty"})
    assert "made by commit 0123456789;" in decide(cfg, JOB, SWEEP).message


def test_a_run_in_progress_is_left_alone(cfg: DictConfig) -> None:
    path = ran(cfg, "running", status="running", checkpoint=True)
    with locked(path):
        decision = decide(cfg, JOB, SWEEP)
    assert (decision.what, decision.directory) == ("leave", path) and "in progress elsewhere" in decision.message


def test_a_corpus_that_changed_at_its_place_is_another(cfg: DictConfig, here: Path) -> None:
    corpus = here / "corpus"
    corpus.mkdir()
    (corpus / "train.txt").write_text("one two three")
    real = changed(cfg, data_root=str(corpus), cache_dir=str(here / "cache"))
    content = identity.corpus_content(corpus, here / "cache")
    done = ran(real, "done", content=content, corpus=f"WikiText-2 at {corpus}: ...")
    assert decide(real, JOB, SWEEP).directory == done
    assert decide(cfg, JOB, SWEEP).what == "start"  # of the sample corpus
    moved = corpus.rename(here / "moved")
    assert decide(changed(real, data_root=str(moved)), JOB, SWEEP).directory == done
    (moved / "train.txt").write_text("one two four!")
    sweep.corpus_content.cache_clear()
    assert decide(changed(real, data_root=str(moved)), JOB, SWEEP).what == "start"
    assert decide(changed(real, data_root=str(here / "nowhere")), JOB, SWEEP).what == "start"  # the run will refuse it


def test_modes(cfg: DictConfig) -> None:
    for mode in ("describe", "bench", "generate"):
        about = changed(cfg, mode=mode, checkpoint=None, prompt="a")
        done = ran(about, mode, content=NOTHING_READ, corpus="none")
        assert decide(about, JOB, SWEEP).directory == (done if mode == "describe" else JOB)


def test_runs_of_a_sweep_outside_outputs_are_found(cfg: DictConfig, here: Path) -> None:
    folder = here / "custom"
    done = ran(cfg, "../custom/0_job")
    assert is_run(done)
    assert decide(cfg, folder / "0_job", folder).directory.resolve() == done.resolve()
    again = decide(changed(cfg, rerun=True), folder / "0_job", folder)
    assert again.directory == folder / "0_job_2"  # the first run stays
    assert free_directory(folder / "1_job") == folder / "1_job"


def test_the_settings_that_go_with_resume() -> None:
    accepted = ["--config-dir=/custom", "hardware=cpu", "trainer.limit_val_batches=3", "tags=[a]"]
    refused = ["task=wikitext2", "stride=2", "mode=train", "~logger", "retry=true", "task.data.num_workers=${seed}"]
    assert resume_settings([*accepted, *refused, "task.train.max_steps=5"]) == accepted


# --- its note and its process -------------------------------------------------------------------------------------


def test_a_job_is_noted_run_continued_and_skipped(
    cfg: DictConfig, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def process(arguments: list[str], directory: Path, modules: list[str]) -> None:
        """Interrupted at first, then finished."""
        commands.append((arguments, directory))
        status = "interrupted" if len(commands) == 1 else "finished"
        path = os.path.relpath(directory, "outputs")
        ran(cfg, path, status, len(commands) == 1, training={"steps": 1, "best_val_loss": 1.5})

    monkeypatch.setattr(sweep, "run_process", process)
    settings = ["--config-dir=/custom", *WORDS]
    first = Path("outputs/multirun/first/0_wikitext2_mtla")
    values = []
    for name in ("first", "second", "third"):
        folder = Path("outputs/multirun") / name
        job_dir = (folder / first.name).absolute()
        job_dir.mkdir(parents=True)  # Hydra makes it
        values.append(run_job(cfg, 0, settings, job_dir, folder))
        (job,) = listed(folder)
        assert (job.number, job.name, job.directory, list(job.settings)) == (0, first.name, first, WORDS)
        assert job_dir.exists() == (name == "first")
        assert summarize(folder, 1) == (name == "first")
    assert [str(value) for value in values] == ["nan", "1.5", "1.5"]
    resume = ["--config-dir=/custom", "hardware=cpu", f"resume='{first.absolute()}'"]
    assert commands[0] == (settings, first.absolute()) and len(commands) == 2
    assert [text.replace("='outputs", f"='{here}/outputs") for text in commands[1][0]] == resume
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("job 0: ")]
    assert [word in line for word, line in zip(("starts", "continues", "skipped"), printed, strict=True)] == [True] * 3


def note(sweep: Path, number: int, name: str, place: str = "", settings: Sequence[str] = ()) -> Path:
    """Write what a multirun notes of a job; return its directory."""
    about = {"name": name, "directory": place or name, "what": "start", "settings": settings}
    write_text(sweep / "jobs" / f"{number}.json", json.dumps(about))
    return sweep / name


def test_the_notes_of_a_sweep(here: Path) -> None:
    for number in (10, 2):
        note(here, number, f"{number}_b").mkdir()
    assert [job.name for job in listed(here)] == ["2_b", "10_b"]
    (here / "jobs" / "0.json").write_text("{")
    with pytest.raises(DataError, match=r"jobs/0.json"):
        listed(here)
    with begun(here):
        assert listed(here) == [] and (here / "2_b").is_dir()
        with pytest.raises(LockedError, match=str(here)), begun(here):
            pass
    (here / "file").touch()
    with pytest.raises(WriteError), begun(here / "file"):
        pass


def test_the_value_of_a_job() -> None:
    without: list[Any] = [None, [], {}, {"best_x": None}, {"best_x": "nan"}]
    for training in without:
        assert math.isnan(best({"status": "finished", "training": training}))
    assert math.isnan(best({"status": "failed", "training": {"best_x": 2}}))
    assert best({"status": "finished", "training": {"steps": 1, "best_x": 2}}) == 2.0


def test_the_exit_code_of_a_sweep(here: Path) -> None:
    for number, name in enumerate(("0_a", "1_b")):
        directory = note(here, number, name)
        directory.mkdir()
        records.write({"status": "finished"}, directory)
    assert (summarize(here, 2), summarize(here, None)) == (0, 0)
    assert summarize(here, 3) == 1  # a job without a record has not finished
    for content in ("{", "[]", "{}"):
        (here / "1_b" / "record.json").write_text(content)
        assert summarize(here, 2) == 1


def start(cwd: Path, *arguments: str, mode: str = "describe") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "attnlab", "-m", f"mode={mode}", "hydra.sweep.dir=sweep", *arguments]
    return subprocess.Popen(command, cwd=cwd, env=environment(), stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[Any], printed: Callable[[], str]) -> Any:
    """The first true result of a condition while a process runs."""
    deadline = time.monotonic() + 900
    while not (result := condition()):
        assert process.poll() is None and time.monotonic() < deadline, printed()[-3000:]
        time.sleep(0.02)
    return result


def status(directory: Path) -> Any:
    return records.recorded(directory).get("status")


@pytest.mark.slow
def test_a_failed_job_and_a_killed_one_take_no_other_with_them(here: Path) -> None:
    """The mechanism lies in the user's --config-dir, which every job must get."""
    (here / "custom" / "attention").mkdir(parents=True)
    text = (CONF / "attention" / "mha.yaml").read_text()
    (here / "custom" / "attention" / "custom.yaml").write_text(text)
    process = start(here, "attention=custom", "--config-dir=custom", "attention.head_dim=36,35,38")
    finished, failed, killed = (here / "sweep" / f"{number}_mustc_custom" for number in range(3))
    wait_for(lambda: status(killed) == "running", process, lambda: process.communicate()[1])
    job = psutil.Process(process.pid).children(recursive=True)[-1]  # after the server of jobs
    job.kill()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert [status(path) for path in (finished, failed, killed)] == ["finished", "failed", "failed"]
    command = "python -m attnlab --config-dir=custom mode=describe attention=custom attention.head_dim=36"
    assert records.read(finished)["command"] == command
    assert "\n1 of 3 jobs finished: sweep\n" in errors
    files = [f"comparison{name}" for name in (".md", ".csv", "_unfinished.csv")]
    assert errors.splitlines()[-3:] == [f"sweep/{name}" for name in files]
    tables = [list(csv.DictReader((here / "sweep" / name).read_text().splitlines())) for name in files[1:]]
    assert [(row["Job"], row["attention.head_dim"]) for row in tables[0]] == [("0_mustc_custom", "36")]
    assert [(row["Job"], row["Settings"].split()[-1], row["Status"]) for row in tables[1]] == [
        ("1_mustc_custom", "attention.head_dim=35", "failed"),
        ("2_mustc_custom", "attention.head_dim=38", "failed"),
    ]
    assert ["head_dim" in tables[1][0]["Error"], "SIGKILL" in tables[1][1]["Error"]] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_job_and_those_after_it(number: int, code: int, here: Path) -> None:
    process = start(here, "attention=mha,mla", mode="bench")
    first = here / "sweep" / "0_mustc_mha"
    wait_for(lambda: status(first) == "running", process, lambda: process.communicate()[1])
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert status(first) == "interrupted"
    assert [path.name for path in (here / "sweep").glob("[0-9]*_*")] == ["0_mustc_mha"]
    assert code < 0 or "0 of 2 jobs finished, 1 not started: sweep" in errors
