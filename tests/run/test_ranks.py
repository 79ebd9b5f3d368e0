"""A rank that ends takes the run with it, and the record says which one it was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from attnlab.run.lock import held
from attnlab.run.ranks import ending
from tests.data.conftest import write_corpus
from tests.tasks.conftest import TINY


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exit code 1"),
        (-9, "SIGKILL (out of memory?)"),
        (-11, "SIGSEGV"),
        (143, "SIGTERM"),
        (255, "exit code 255"),
    ],
)
def test_how_a_process_has_ended(code: int, words: str) -> None:
    assert ending(code) == words


def test_rank_zero_does_not_wait_for_ever() -> None:
    code = """
import subprocess, sys, time
from attnlab.run import ranks
ranks.PATIENCE = 0.3
others = {rank: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for rank in (1, 2)}
ranks.watch(others)
assert ranks.failure() is None
others[2].kill()
assert ranks.failure(wait=10) == "rank 2 ended with SIGKILL (out of memory?)"
with ranks.losing(lambda how: print(how, flush=True)):
    time.sleep(60)  # a collective operation
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (1, "rank 2 ended with SIGKILL (out of memory?)\n"), done.stderr


RUN = """
import os, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from attnlab.config.check import compose
from attnlab.run import job, parents, ranks
parents.watch_given_parent()
ranks.PATIENCE = 0.3
def mode(cfg, record, directory):
    if "LOCAL_RANK" not in os.environ:
        rank = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=parents.environment() | {"LOCAL_RANK": "1"})
        ranks.watch({1: rank})
    else:
        os.write(1, f"{os.getppid()} {os.getpid()}\\n".encode())
    if sys.argv[2] == "noticed":
        try:
            while os.getppid() == parents.parent().pid if parents.parent() else not ranks.failure():
                time.sleep(0.02)
        except KeyboardInterrupt:
            pass
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    time.sleep(60)  # in a collective operation
sys.modules["attnlab.modes.describe"] = SimpleNamespace(run=mode)
sys.exit(job.run(compose("mode=describe"), "", Path(sys.argv[1])))
"""


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "noticed"), (0, "waiting"), (1, "waiting"))]


@pytest.mark.parametrize(("victim", "kind"), SLOW)
def test_the_record_names_the_rank_that_was_killed(victim: int, kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path), kind]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        numbers = [int(word) for word in process.stdout.readline().split()]
        assert numbers[0] == process.pid
        assert json.loads((tmp_path / "record.json").read_text())["status"] == "running"
        os.kill(numbers[victim], signal.SIGKILL)
        errors = process.stderr.read()  # until both have ended
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["status"], held(tmp_path)) == ("failed", None)
    if victim:
        assert record["error"] == "rank 1 ended with SIGKILL (out of memory?)"
        assert errors == f"error: {record['error']}\n" and process.returncode == 1
    else:
        assert record["error"] == "its process was killed (out of memory?)"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_none_is_left(victim: int, tmp_path: Path) -> None:
    root, directory = write_corpus(tmp_path), tmp_path / "run"
    words = [f"data_root='{root}'", f"cache_dir='{root}/cache'", f"hydra.run.dir='{directory}'"]
    words += ["hardware=ddp", "hardware.accelerator=cpu", "task.train.max_epochs=100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "attnlab", "task=mustc", *TINY, *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 900
        while not (directory / "checkpoints" / "last.ckpt").is_file() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (rank,) = psutil.Process(process.pid).children()
        os.kill((process.pid, rank.pid)[victim], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        assert not psutil.wait_procs([rank], timeout=30)[1]
    finally:
        process.kill()
    record: dict[str, Any] = json.loads((directory / "record.json").read_text())
    assert held(directory) is None
    assert record["status"] == "failed"
    if victim:
        assert record["error"] == "rank 1 ended with SIGKILL (out of memory?)"
        assert errors.count("error: rank 1 ended with SIGKILL (out of memory?)") == 1
    else:
        assert record["error"] == "its process was killed (out of memory?)"
