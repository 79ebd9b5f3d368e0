"""A run directory belongs to its live process: other runs are refused, and what a dead one has left is free."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from attnlab.config.check import compose
from attnlab.errors import LockedError, WriteError
from attnlab.run import job
from attnlab.run import lock as locks
from attnlab.run.lock import NAME, alive, held, locked

HOLD = """
import sys, time
from pathlib import Path
from attnlab.run.lock import locked
with locked(Path(sys.argv[1])) as lock:
    if sys.argv[2:] == ["ending"]:
        lock.end()
        print("held", flush=True)
        time.sleep(1)
    else:
        print("held", flush=True)
        sys.stdin.read()
"""


@contextmanager
def another_process(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(directory), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_directory_belongs_to_its_process_until_that_ends(tmp_path: Path) -> None:
    assert held(tmp_path) is None and held(tmp_path / "missing") is None
    with another_process(tmp_path) as process:
        holder = held(tmp_path)
        assert holder is not None
        assert (holder.pid, holder.host, holder.ending) == (process.pid, socket.gethostname(), False)
        assert alive({"status": "running"}, tmp_path) and not alive({"status": "finished"}, tmp_path)
        with pytest.raises(LockedError) as refused, locked(tmp_path):
            pass
        assert f"in progress there: process {process.pid} on {socket.gethostname()} since 2" in str(refused.value)
        assert "\n" not in str(refused.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / NAME).is_file()  # it could not remove it
        assert held(tmp_path) is None and not alive({"status": "running"}, tmp_path)
        with locked(tmp_path):
            found = held(tmp_path)
            assert found is not None and found.pid == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flock", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_of_many_that_come_at_the_same_moment(flock: bool, tmp_path: Path) -> None:
    without = "from attnlab.run import lock; lock._flock = lambda *_: None\n"
    code = (
        f"{'' if flock else without}"
        + """
import sys
from pathlib import Path
from attnlab.errors import LockedError
from attnlab.run.lock import locked
print("ready", flush=True)
sys.stdin.readline()
try:
    with locked(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.readline()
except LockedError:
    print("refused", flush=True)
"""
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(5)]

    def lines() -> list[str]:
        return sorted(process.stdout.readline().strip() for process in started if process.stdout)

    assert lines() == ["ready"] * 5
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert lines() == ["held"] + ["refused"] * 4
    for process in started:
        process.communicate()


def test_a_copy_is_free(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with another_process(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copy2)
        assert (tmp_path / "copy" / NAME).is_file()
        assert held(tmp_path / "copy") is None
        content = json.loads((tmp_path / "copy" / NAME).read_text())
        (tmp_path / "copy" / NAME).write_text(json.dumps(content | {"host": "another"}))  # copied to another host
        assert held(tmp_path / "copy") is None
        with locked(tmp_path / "copy"):
            pass


def test_a_holder_on_another_host_is_dead_after_five_silent_minutes(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.touch()
    content = {"pid": 1, "started": 1.0, "host": "another", "since": "yesterday", "flock": True, "parent": None}
    path.write_text(json.dumps(content | {"ending": False, "inode": path.stat().st_ino}))
    holder = held(tmp_path)
    assert holder is not None and str(holder) == "process 1 on another since yesterday"
    with pytest.raises(LockedError, match="dead after 5 minutes without a sign of life"), locked(tmp_path):
        pass
    for away in (-301, 301):  # a clock that was wrong
        os.utime(path, (time.time(), time.time() + away))
        assert held(tmp_path) is None
    with locked(tmp_path):
        pass


def test_a_lock_that_is_a_link_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "text").write_text("mine")
    (tmp_path / "run" / NAME).symlink_to(tmp_path / "text")
    with pytest.raises(WriteError), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "text").read_text() == "mine"


def test_a_holder_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "EVERY", 0.05)
    with locked(tmp_path):
        os.utime(tmp_path / NAME, (0, 0))
        deadline = time.monotonic() + 10
        while (tmp_path / NAME).stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert time.time() - (tmp_path / NAME).stat().st_mtime < 10


def test_without_locks_of_the_file_system_the_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_flock", lambda *_: None)
    with locked(tmp_path):
        assert held(tmp_path) is not None
        with pytest.raises(LockedError), locked(tmp_path):
            pass
        path = tmp_path / NAME
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"started": 1.0}))  # the number is another process' now
        assert held(tmp_path) is None


def test_a_forked_process_does_not_hold_it(tmp_path: Path) -> None:
    child = 0
    try:
        with locked(tmp_path):
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
        (tmp_path / NAME).touch()
        assert held(tmp_path) is None
        with locked(tmp_path, wait=0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_who_wants_it_waits_for_a_run_that_is_about_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with another_process(tmp_path, "ending") as process, locked(tmp_path):
        process.wait(timeout=5)
        holder = held(tmp_path)
        assert holder is not None and holder.pid == os.getpid()
    assert "waiting for the end of process" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["same directory", "resume"])
def test_a_live_run_stays_as_it_is(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live, own = tmp_path / "live", tmp_path / "own"
    live.mkdir()
    own.mkdir()
    for name in ("record.json", "config.yaml", "run.log"):
        (live / name).write_text(f"{name} of the live run")

    def contents(directory: Path) -> dict[str, str]:
        return {path.name: path.read_text() for path in directory.iterdir()}

    cfg = compose("mode=describe").copy()
    OmegaConf.set_readonly(cfg, False)
    cfg.resume = str(live) if kind == "resume" else None
    with another_process(live) as process:
        before = contents(live)
        assert job.run(cfg, "", own if kind == "resume" else live) == 1
        assert contents(live) == before and contents(own) == {}
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(f"error: {live}: a run is in progress there: process {process.pid} on ")
