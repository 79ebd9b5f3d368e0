"""The command from outside, and the life of a run from inside."""

import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from attnlab import cli as entry
from attnlab.config.check import compose
from attnlab.errors import ConfigError, DataError
from attnlab.runs import job as jobs
from attnlab.runs import record as records

ROOT = Path(__file__).parents[1]
COMMAND = "python -m attnlab mode=describe"


def shell(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a directory of its own."""
    environment = {k: v for k, v in os.environ.items() if k not in ("DATA_ROOT", "HYDRA_FULL_ERROR")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "attnlab", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


# --- the command ------------------------------------------------------------------------------------------------


def test_a_typo_costs_seconds_and_leaves_nothing(tmp_path: Path) -> None:
    def seconds() -> float:  # of computing: a busy machine is no reason to fail
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    began = seconds()
    done = shell("attention=mtlla", "stride=2", cwd=tmp_path)
    assert seconds() - began < 3
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: attention=mtlla: no such attention; nearest: mtla, mla\n"
    assert list(tmp_path.iterdir()) == []


def test_a_full_traceback_on_demand(tmp_path: Path) -> None:
    done = shell("attention=mtlla", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert done.returncode == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: attention=mtlla")


def test_describe_prints_its_record_and_nothing_else(tmp_path: Path) -> None:
    done = shell("mode=describe", "attention=mtla", "stride=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["status"], record["mode"], record["attention"], record["stride"]) == (
        "finished",
        "describe",
        "mtla",
        2,
    )
    assert record["command"] == "python -m attnlab mode=describe attention=mtla stride=2"
    assert records.problems(record) == []
    assert isinstance(record["parameters"]["total"], int)
    assert record["training"]["steps"] == records.NOT_RUN
    (directory,) = (tmp_path / "outputs" / "mustc" / "mtla").iterdir()
    assert records.read(directory) == record
    assert OmegaConf.load(directory / "config.yaml").attention.stride == 2
    assert {path.name for path in directory.iterdir()} <= {"config.yaml", "record.json", "run.log"}


@pytest.mark.slow
def test_a_multirun_gives_each_job_its_own_record(tmp_path: Path) -> None:
    done = shell("mode=describe", "-m", "attention=mha,mqa", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "outputs" / "multirun").iterdir()
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(sweep.glob("*/record.json"))}
    assert list(found) == ["0_mustc_mha", "1_mustc_mqa"]
    assert [record["attention"] for record in found.values()] == ["mha", "mqa"]
    assert {record["status"] for record in found.values()} == {"finished"}
    assert found["0_mustc_mha"]["command"] == "python -m attnlab mode=describe attention=mha"


def test_help_names_the_groups(tmp_path: Path) -> None:
    done = shell("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "python -m src.run task=mustc attention=mtla stride=2" in done.stdout
    assert "attention: gqa, mha, mla, " in done.stdout


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file stands in the way")
    done = shell("mode=describe", cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "outputs" in done.stderr


# --- the life of a run ------------------------------------------------------------------------------------------

Mode = Callable[[DictConfig, dict[str, Any], Path], None]
Run = Callable[[Mode], int]


@pytest.fixture(scope="module")
def cfg() -> DictConfig:
    return compose("mode=describe")


@pytest.fixture
def run(cfg: DictConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a function as the mode; the run directory is tmp_path."""

    def with_mode(mode: Mode) -> int:
        monkeypatch.setitem(sys.modules, "attnlab.modes.describe", SimpleNamespace(run=mode))
        return jobs.run(cfg, COMMAND, tmp_path)

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
        (
            Unlucky("first\nsecond"),
            1,
            "error: Unlucky: first second (traceback: {}/run.log, or set HYDRA_FULL_ERROR=1)",
        ),
        (SystemExit(3), 3, "error: the run ended itself with exit code 3"),
        (OSError(errno.ENOSPC, "No space left on device", "x.ckpt"), 1, "error: disk full: [Errno 28] No space left"),
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


def test_the_traceback_goes_to_the_log_and_not_to_the_console(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def mode(*_: Any) -> None:
        raise Unlucky

    with caplog.at_level(logging.DEBUG, logger="attnlab.run"):
        run(mode)
    (entry,) = [entry for entry in caplog.records if entry.name == "attnlab.run"]
    assert entry.levelno == logging.DEBUG  # the console's handler begins at INFO
    assert entry.exc_info is not None and entry.exc_info[0] is Unlucky


def test_a_disk_that_is_full_hides_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def mode(*_: Any) -> None:
        monkeypatch.setattr(records, "write", full)
        raise DataError("the first error")

    assert run(mode) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: the first error"
    assert second == "error: the record could not be written: [Errno 28] No space left on device"


SIGNALS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)


@SIGNALS
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

    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert run(mode) == code
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    record = records.read(tmp_path)
    assert (record["status"], record["error"]) == ("interrupted", f"interrupted by {number.name}")
    assert record["training"]["steps"] == 7
    assert capsys.readouterr().err == f"error: interrupted by {number.name}; resume={tmp_path} goes on from here\n"


@SIGNALS
def test_an_interrupted_training(run: Run, tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Lightning turns KeyboardInterrupt into sys.exit(1), and puts a handler of its own before ours."""
    import lightning as L
    from torch import Tensor, nn
    from torch.optim import SGD
    from torch.utils.data import DataLoader

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            if index == 2:
                os.kill(os.getpid(), number)
            return self.layer(batch.float().view(-1, 1)).mean()

        def configure_optimizers(self) -> SGD:
            return SGD(self.parameters(), lr=0.1)

    reached = []

    def mode(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
        trainer = L.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
        try:
            trainer.fit(Module(), DataLoader(list(range(100))))  # type: ignore[arg-type]
        finally:
            reached.append(trainer.global_step)

    assert run(mode) == code
    assert reached == [2]
    assert records.read(tmp_path)["status"] == "interrupted"


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
            with pytest.raises(Ended, match="143"):  # stands for the end of the process
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


def test_only_the_first_process_writes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run(lambda *_: None) == 0
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_another_process_that_fails_says_so_in_the_record(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning kills the first process when another dies: it cannot say what happened."""

    def fail(*_: Any) -> None:
        raise DataError("only here")

    records.write({"status": "running", "seed": 1}, tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run(fail) == 1
    assert records.read(tmp_path) == {"status": "failed", "seed": 1, "error": "rank 1: only here"}


def test_processes_of_one_run_agree_on_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(entry.STAMP, "earlier")
    assert entry.stamp([]) != entry.stamp([]) != "earlier"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert entry.stamp([]) == "earlier"
    monkeypatch.delenv(entry.STAMP)
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir="):
        entry.stamp([])
    assert entry.stamp(["hydra.run.dir=outputs/x"])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        entry.stamp([])
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert entry.stamp([]) == "slurm-12-0"


# --- multirun ---------------------------------------------------------------------------------------------------


class FakeProcess:
    """Stands for `python -m attnlab <job>`: leaves the record that its attention's name asks for."""

    ends = {"mha": ("finished", 0), "mla": ("failed", 1), "mqa": ("running", -9), "gqa": ("", 1)}
    started: list[list[str]] = []

    def __init__(self, command: list[str], **_: Any) -> None:
        self.started.append(command)
        self.directory = Path(command[-1].removeprefix("hydra.run.dir=").strip("'"))
        attention = next(text for text in command if text.startswith("attention=")).removeprefix("attention=")
        self.status, self.code = self.ends[attention]

    def wait(self) -> int:
        if self.status:
            error = {"error": "bad data"} if self.status == "failed" else {}
            records.write({"status": self.status} | error, self.directory)
        return self.code


def multirun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str, process: type[FakeProcess] = FakeProcess
) -> int:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    monkeypatch.setattr(subprocess, "Popen", process)
    monkeypatch.setattr(FakeProcess, "started", [])
    monkeypatch.setattr(logging.root, "handlers", [])  # Hydra puts its own there
    monkeypatch.setattr(logging, "_handlerList", [])  # and closes all others: absl's has pytest's stderr
    return entry.main()


def test_one_failing_job_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert multirun(monkeypatch, tmp_path, "seed=5", "-m", "attention=gqa,mla,mqa,mha") == 1
    assert len(FakeProcess.started) == 4
    assert FakeProcess.started[0][1:-1] == ["-m", "attnlab", "seed=5", "attention=gqa"]
    summary = capsys.readouterr().err
    assert "1 of 4 jobs finished: outputs/multirun/" in summary
    assert "1_mustc_mla: failed  bad data" in summary
    assert "2_mustc_mqa: failed  killed by SIGKILL (out of memory?)" in summary
    assert "3_mustc_mha: finished" in summary


def test_all_jobs_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert multirun(monkeypatch, tmp_path, "-m", "attention=mha", "seed=1,2", f"--config-dir={tmp_path}") == 0
    assert FakeProcess.started[1][3:-1] == [f"--config-dir={tmp_path}", "attention=mha", "seed=2"]


def test_an_interrupt_ends_the_waiting_jobs_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(FakeProcess):
        received: list[int] = []

        def wait(self) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            records.write({"status": "interrupted"}, self.directory)
            return 143

        def send_signal(self, number: int) -> None:
            self.received.append(number)

    assert multirun(monkeypatch, tmp_path, "-m", "attention=mha,mla", process=Interrupted) == 143
    assert Interrupted.received == [signal.SIGTERM]
    assert "0 of 2 jobs finished" in capsys.readouterr().err


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    line = jobs.command_line(["seed=1", "data_root=/with space", "task.optimizer.betas=[0.9,0.98]"])
    assert line == "python -m attnlab seed=1 'data_root=/with space' 'task.optimizer.betas=[0.9,0.98]'"
    monkeypatch.setenv("DATA_ROOT", "/a b")
    assert jobs.command_line(["seed=1"]) == "DATA_ROOT='/a b' python -m attnlab seed=1"


# --- the project ------------------------------------------------------------------------------------------------


def test_torchvision_imports_beside_this_torch() -> None:
    script = "import attnlab.torchvision_schemas, torchvision, torchmetrics, torch;"
    script += "print(torch.ops.torchvision.nms.default._schema)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def make(*arguments: str) -> str:
    alone = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=alone, capture_output=True, text=True, check=True)
    return done.stdout  # as if `make check` had not started these tests


def test_make_explains_itself_and_runs_what_it_says() -> None:
    lines = make().splitlines()
    targets = ["help", "install", "demo", "test", "check", "table-irratt-1", "table-irratt-2", "clean"]
    assert [line.split()[1] for line in lines] == targets
    assert "attnlab.report experiments/irratt/table1.yaml" in make("-n", "table-irratt-1")
    assert ".venv/bin/python -m src.run task=mustc attention=mtla stride=2" in make("-n", "demo").splitlines()[-1]
    assert "make check" in (ROOT / ".ci" / "run").read_text()
