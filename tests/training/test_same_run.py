"""Several processes train as one: the same updates, the same loss curve, the same weights."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import environment
from tests.training.same_run import LINES, UPDATES, write_corpora


def start(corpora: Path, directory: Path, processes: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    common |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    directory.mkdir()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.same_run", str(corpora), str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=common | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        )  # fmt: skip
        for rank in range(processes)
    ]
    ended = [(process, process.communicate(timeout=400)[0]) for process in started]
    assert all(process.returncode == 0 for process, _ in ended), ended[0][1][-4000:]
    return json.loads((directory / "results.json").read_text())


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    write_corpora(folder)
    return folder


@pytest.fixture(scope="module")
def alone(corpora: Path) -> dict[str, Any]:
    return start(corpora, corpora / "1", 1)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_train_as_one(processes: int, alone: dict[str, Any], corpora: Path) -> None:
    results = start(corpora, corpora / str(processes), processes)
    for name in LINES:
        single, several = alone[name], results[name]
        assert len(single["items"]) == UPDATES and several["items"] == single["items"], name
        assert several["loss"] == pytest.approx(single["loss"], rel=1e-9, abs=0), name
        assert several["final_loss"] == pytest.approx(single["final_loss"], abs=2e-4), name  # rounded
        assert several["weights"] == pytest.approx(single["weights"], rel=1e-7, abs=1e-12), name
        assert (several["wer"], several["chosen"]) == (single["wer"], single["chosen"]) or name != "translation", name
        assert single["loss"][-1] != single["loss"][0] and len(single["loss"]) == UPDATES
        divided = ("translation", "one bucket")  # each batch: elsewhere the processes take batches from each other
        assert single["batches"] > several["batches"] or name in divided, name
    assert len(set(alone["translation"]["wer"])) > 1
    assert len(set(alone["translation"]["items"])) > 1 and len(set(alone["images"]["items"])) == 1
