"""A resumed run is the run: the same batches, losses, curves, checkpoints and weights, wherever it was killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.command import environment, run_command, weights
from tests.training import resumed

EVERY = {"updates": 12, "stopped by epochs": 8, "stopped": 4}  # updates of the whole training; of the others 9 to 12


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpora")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("updates", "stopped by epochs") else pytest.mark.slow)
             for name in resumed.RUNS]
)  # fmt: skip
def test_a_run_killed_after_any_update_continues_exactly(name: str, corpora: Path, tmp_path: Path) -> None:
    resumed.write(name, corpora)
    trained = resumed.run(name, corpora, tmp_path)
    assert {0, 1, 2} <= set(trained)  # it was killed before its last updates, and when only scoring was left
    assert set(trained) >= set(range(1, EVERY.get(name, 9)))  # and after every update


@pytest.mark.slow
@pytest.mark.parametrize("name", ["updates", "epochs", "stopped", "translation", "conformer", "one bucket", "images"])
def test_two_processes_continue_exactly(name: str, corpora: Path, tmp_path: Path) -> None:
    resumed.write(name, corpora)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.resumed", name, str(corpora), str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(**common, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2"),
        )
        for rank in "01"
    ]  # fmt: skip
    ended = [(process, process.communicate(timeout=800)[0]) for process in started]
    assert all(process.returncode == 0 for process, _ in ended), ended[0][1][-4000:]
    assert set(json.loads((tmp_path / "trained.json").read_text())) >= set(range(1, EVERY.get(name, 9)))


@pytest.mark.slow
def test_a_process_that_is_killed_again_and_again_ends_with_the_same_weights(corpora: Path, tmp_path: Path) -> None:
    resumed.write("updates", corpora)
    words = [*resumed.RUNS["updates"], "hardware=cpu", f"data_root='{corpora / 'language'}'"]
    words = [
        *(word for word in words if word != "task.train.max_epochs=3"),
        "task.train.max_epochs=40",
        f"cache_dir='{corpora / 'cache'}'",
    ]
    assert run_command(*words, f"hydra.run.dir='{tmp_path / 'alone'}'").returncode == 0
    run, last, kills = tmp_path / "killed", tmp_path / "killed" / "checkpoints" / "last.ckpt", 0
    arguments = [*words, f"hydra.run.dir='{run}'"]
    for updates in (3, 30, 70):  # early stopping ends it after 102
        command = [sys.executable, "-m", "attnlab", *arguments]
        process = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL, start_new_session=True)
        while process.poll() is None:
            time.sleep(0.02)
            with contextlib.suppress(FileNotFoundError, RuntimeError, EOFError):
                if torch.load(last, weights_only=True)["global_step"] >= updates:
                    os.killpg(process.pid, signal.SIGKILL)
                    break
        kills += process.wait() == -signal.SIGKILL
        arguments = [f"resume='{run}'"]
    assert kills >= 2
    assert run_command(*arguments).returncode == 0
    for key, value in weights(tmp_path / "alone").items():
        assert torch.equal(weights(run)[key], value), key
