"""The life of a run: its record and its exit code, however it ends."""

import errno
import json
import logging.config
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from attnlab.config.build import CONF
from attnlab.config.check import compose
from attnlab.errors import ConfigError, DataError
from attnlab.modes import describe
from attnlab.run import job as jobs
from attnlab.run import record as records
from tests.run.test_identity import changed
from tests.run.test_removal import begun

COMMAND = "python -m attnlab mode=describe"
Mode = Callable[[DictConfig, dict[str, Any], Path], None]
Run = Callable[..., int]


@pytest.fixture(scope="module")
def cfg() -> DictConfig:
    return compose("mode=describe")


@pytest.fixture
def run(cfg: DictConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a function as the mode; the run directory is tmp_path or none."""

    def with_mode(mode: Mode, directory: Path | None = tmp_path, name: str = "describe") -> int:
        stub = SimpleNamespace(run=mode, show=describe.show)
        monkeypatch.setitem(sys.modules, f"attnlab.modes.{name}", stub)
        return jobs.run(changed(cfg, mode=name), COMMAND, directory)

    return with_mode


def test_a_finished_run(run: Run, cfg: DictConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def mode(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
        assert records.read(directory)["status"] == "running"
        print("a library speaks")
        record["parameters"] = {"total": 3, "attention": 2, "trainable": 1}

    assert run(mode) == 0
    out, err = capsys.readouterr()
    record = records.read(tmp_path)
    assert json.loads(out) == record
    assert err == "a library speaks\n"
    assert (record["status"], record["command"]) == ("finished", COMMAND)
    assert record["parameters"]["total"] == 3
    assert records.problems(record) == []
    assert OmegaConf.load(tmp_path / "config.yaml") == cfg


class Unlucky(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DataError("wav/a.wav: no such\nfile"), 1, "error: wav/a.wav: no such file"),
        (ConfigError("task.model: wrong"), 2, "error: task.model: wrong"),
        (Unlucky("a\nb"), 1, "error: Unlucky: a b (traceback: {}/run.log, or set HYDRA_FULL_ERROR=1)"),
        (SystemExit(3), 3, "error: the mode ended the process with exit code 3"),
        (OSError(errno.ENOSPC, "No space left on device", "x.ckpt"), 1, "error: disk full: [Errno 28] No space left"),
        (RuntimeError("can't allocate memory: you tried to allocate 4294967296 bytes."), 1, "error: out of memory: a"),
    ],
)
def test_a_failed_run(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    def mode(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
        record["corpus"] = "read before it failed"
        raise error

    assert run(mode) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1 and err.startswith(line.format(tmp_path))
    record = records.read(tmp_path)
    assert record["status"] == "failed" and f"error: {record['error']}\n" == err
    assert record["corpus"] == "read before it failed"
    assert records.problems(record) == []


def test_the_traceback_of_a_failed_run_is_in_its_log(run: Run, tmp_path: Path) -> None:
    """With the handlers of every run: the console has one line."""

    def mode(*_: Any) -> None:
        raise Unlucky("a bug")

    text = (CONF / "hydra/job_logging/attnlab.yaml").read_text()
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        logging.config.dictConfig(yaml.safe_load(re.sub(r"\$\{.*\.log", str(tmp_path / "run.log"), text)))
        assert run(mode) == 1
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    log = (tmp_path / "run.log").read_text()
    assert "Traceback" in log and log.endswith("Unlucky: a bug\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_run(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    def mode(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
        (directory / "checkpoints").mkdir()
        (directory / "checkpoints" / "last.ckpt").touch()
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except KeyboardInterrupt:
            assert records.read(directory)["status"] == "interrupted"  # at once: there may be no later
            record["training"]["steps"] = 7
            raise

    handlers = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert run(mode) == code
    assert [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    record = records.read(tmp_path)
    assert (record["status"], record["error"]) == ("interrupted", f"interrupted by {number.name}")
    assert record["training"]["steps"] == 7
    assert capsys.readouterr().err == f"error: interrupted by {number.name}; resume={tmp_path} continues the run\n"


def test_a_training_that_is_interrupted_before_its_first_checkpoint_says_so(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def mode(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    assert run(mode, name="train") == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: interrupted by SIGINT; no checkpoint yet: the same command starts again")


def test_a_second_signal_ends_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    def mode(*_: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        finally:
            with pytest.raises(Ended, match="143"):  # in place of the end of the process
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)

    monkeypatch.setattr(os, "_exit", end)
    assert run(mode) == 130


def test_signals_that_are_switched_off_stay_so(run: Run, tmp_path: Path) -> None:
    """nohup ignores SIGHUP: a run that it started must survive the terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(lambda *_: os.kill(os.getpid(), signal.SIGHUP)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert records.read(tmp_path)["status"] == "finished"


# --- several processes of one run -------------------------------------------------------------------------------


def test_only_rank_zero_writes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run(lambda *_: None) == 0
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_another_process_that_fails_is_named_in_the_record(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning kills rank zero when another rank fails, so rank zero cannot record the error."""

    def fail(*_: Any) -> None:
        raise DataError("only here")

    records.write({"status": "running", "seed": 1}, tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run(fail) == 1
    assert records.read(tmp_path) == {"status": "failed", "seed": 1, "error": "rank 1: only here"}


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    line = jobs.command_line(["seed=1", "data_root=/with space", "task.optimizer.betas=[0.9,0.98]"])
    assert line == "python -m attnlab seed=1 'data_root=/with space' 'task.optimizer.betas=[0.9,0.98]'"
    monkeypatch.setenv("DATA_ROOT", "/a b")
    assert jobs.command_line(["seed=1"]) == "DATA_ROOT='/a b' python -m attnlab seed=1"


@pytest.mark.parametrize(
    ("names", "content", "word"),
    [
        *(([name], "{}", name.partition("/")[0]) for name in (".git/HEAD", "main.py", "config.yaml", "record.json")),
        (["checkpoints/averaged.safetensors", "record.json"], "trained", "trained"),
        (["record.json"], '{"status": "finished"}', "finished"),
    ],
)
def test_a_directory_that_is_in_use_is_left_as_it_is(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], content: str, word: str
) -> None:
    """It holds files of somebody, weights, or a finished record."""
    if content != "{}":
        begun(tmp_path)
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert run(lambda *_: pytest.fail("the mode was called")) == 2
    error = capsys.readouterr().err
    assert f"hydra.run.dir={tmp_path}: " in error and word in error and error.count("\n") == 1
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_that_cannot_continue_here_stays_as_it_is(cfg: DictConfig, tmp_path: Path) -> None:
    """Its device is missing."""
    files = {"config.yaml": "a: 1", "record.json": '{"status": "interrupted"}'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    resumed = changed(cfg, resume=str(tmp_path), mode="train", hardware__accelerator="mps")
    assert jobs.run(resumed, COMMAND, tmp_path) == 2
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_reader_that_has_gone(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def mode(*_: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert run(mode, None) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == "error: standard output was closed before everything was written\n"
