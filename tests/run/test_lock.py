"""A run directory is locked by its live process. The directory of a killed process is free."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from attnlab.config.check import compose
from attnlab.errors import LockedError
from attnlab.run import job
from attnlab.run.directory import LOCK, holder_of, locked

HOLD = """
import sys
from pathlib import Path
from attnlab.run.directory import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def holding(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has locked a directory."""
    command, pipe = [sys.executable, "-c", HOLD, str(directory)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_directory_belongs_to_its_process_until_that_is_killed(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None and holder_of(tmp_path / "missing") is None
    with holding(tmp_path) as process:
        holder = f"process {process.pid} on {socket.gethostname()} since 2"
        assert str(holder_of(tmp_path)).startswith(holder)
        with pytest.raises(LockedError) as refused, locked(tmp_path):
            pass
        assert str(tmp_path) in str(refused.value) and holder in str(refused.value)
        shutil.copytree(tmp_path, tmp_path.parent / "copy")
        assert holder_of(tmp_path.parent / "copy") is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / LOCK).is_file()  # it could not remove it
        assert holder_of(tmp_path) is None
        with locked(tmp_path):
            assert str(os.getpid()) in str(holder_of(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_who_wants_it_waits_for_a_run_that_is_about_to_end(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        (tmp_path / "record.json").write_text('{"status": "running"}')
        with pytest.raises(LockedError), locked(tmp_path):
            pass
        (tmp_path / "record.json").write_text('{"status": "interrupted"}')
        with pytest.raises(LockedError), locked(tmp_path, wait=0):
            pass
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {process.pid}"])
        with locked(tmp_path):
            assert str(os.getpid()) in str(holder_of(tmp_path))


@pytest.mark.parametrize("kind", ["same directory", "resume"])
def test_a_live_run_stays_as_it_is(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live, other = tmp_path / "live", tmp_path / "other"
    live.mkdir()
    other.mkdir()
    for name in ("record.json", "config.yaml", "run.log"):
        (live / name).write_text(f"{name} of the live run")

    def contents(directory: Path) -> dict[str, str]:
        return {path.name: path.read_text() for path in directory.iterdir()}

    cfg = compose("mode=describe").copy()
    OmegaConf.set_readonly(cfg, False)
    cfg.resume = str(live) if kind == "resume" else None
    with holding(live) as process:
        before = contents(live)
        assert job.run(cfg, "", other if kind == "resume" else live) == 1
        assert contents(live) == before and contents(other) == {}
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(f"error: {live}: ") and f"process {process.pid} on " in err
