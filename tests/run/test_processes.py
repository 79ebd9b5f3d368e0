"""Runs of several processes, as a user types them, at a tiny size: what they give, and how they end."""

import os
import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from attnlab.run.record import read
from tests.command import run_command, weights
from tests.conversion.test_runs import SIZES, written
from tests.conversion.test_runs import TINY as TINY_CONVERTED
from tests.data.conftest import write_corpus
from tests.tasks.conftest import TINY
from tests.tasks.language_modelling.test_task import TINY as TINY_TEXT

CHILD = """
import os, signal, sys, time
from attnlab.run.processes import end_with_parent
signal.signal(signal.SIGTERM, lambda *_: sys.exit(os.write(1, b"last words")))
end_with_parent()
os.write(1, f"{os.getpid()} ".encode())
time.sleep(60)
"""
PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, *sys.argv[1:]]); time.sleep(60)"


def test_a_child_ends_with_its_killed_parent() -> None:
    command = [sys.executable, "-c", PARENT, "-c", CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        first = os.read(parent.stdout.fileno(), 100)
        child = psutil.Process(int(first))
        parent.kill()
        assert parent.stdout.read() == b"last words"  # until the child has ended, too
    assert not psutil.wait_procs([child], timeout=5)[1]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("job"))


def speech(root: Path, directory: Path, *overrides: str) -> list[str]:
    """The words of a command that trains a tiny speech translation."""
    where = [f"data_root='{root}'", f"cache_dir='{root}/cache'", f"hydra.run.dir='{directory}'"]
    return ["task=mustc", *TINY, *where, *overrides]


def run(*words: str) -> None:
    done = run_command(*words)
    assert done.returncode == 0, done.stderr[-3000:]


def assert_close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    torch.testing.assert_close(second, first, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_two_processes_train_and_give_one_record_that_one_process_scores_alike(root: Path, tmp_path: Path) -> None:
    words = ("hardware.accelerator=cpu", "task.train.max_epochs=2")
    run(*speech(root, tmp_path / "run", "hardware=ddp", *words))
    result = read(tmp_path / "run")
    assert (result["status"], result["quality"]["sentences"], result["training"]["epochs"]) == ("finished", 5, 2)
    assert len(list(tmp_path.rglob("record.json"))) == len(list(tmp_path.rglob("predictions.tsv"))) == 1
    assert "shared by 2 processes" in result["inference"]["protocol"]
    again = ("hardware=cpu", "mode=test", f"checkpoint='{tmp_path / 'run'}'")
    run(*speech(root, tmp_path / "alone", *words, *again))
    assert (tmp_path / "alone/predictions.tsv").read_bytes() == (tmp_path / "run/predictions.tsv").read_bytes()
    assert read(tmp_path / "alone")["quality"] == result["quality"]


def write_texts(root: Path) -> Path:
    words = random.Random(1)
    for part, lines in (("train", 90), ("valid", 9), ("test", 9)):
        texts = (" ".join(words.choices("abcdefgh", k=20)) for _ in range(lines))
        (root / f"wiki.{part}.tokens").write_text("".join(f" {text} \n" for text in texts))
    return root


@pytest.mark.slow
def test_sharded_training_is_distributed_training(root: Path, tmp_path: Path) -> None:
    """hardware=fsdp, a speech translation: parameters in parts, the same numbers."""
    words = ("hardware.accelerator=cpu", "task.train.max_epochs=1", "+task.optimizer.eps=1")
    for hardware in ("ddp", "fsdp"):
        run(*speech(root, tmp_path / hardware, f"hardware={hardware}", *words))
    assert_close(weights(tmp_path / "ddp"), weights(tmp_path / "fsdp"))
    assert read(tmp_path / "fsdp")["quality"] == read(tmp_path / "ddp")["quality"]
    assert "on rank zero alone" in read(tmp_path / "fsdp")["inference"]["protocol"]


@pytest.mark.slow
def test_a_sharded_language_model_continues(tmp_path: Path) -> None:
    root, directory = write_texts(tmp_path), tmp_path / "run"
    words = ["task=wikitext2", "attention=mtla", f"data_root='{root}'", f"cache_dir='{root}/cache'", *TINY_TEXT]
    words += ["hardware=fsdp", "hardware.accelerator=cpu", "task.train.max_steps=8"]
    run(*words, f"hydra.run.dir='{directory}'")
    run(f"resume='{directory}'", "task.train.max_steps=12", f"hydra.run.dir='{tmp_path / 'more'}'")
    result = read(tmp_path / "more")
    assert (result["training"]["steps"], result["training"]["resumed"]) == (12, True)
    assert result["parent"] == {"path": str(directory), "run": read(directory)["identity"]["run"]}
    assert result["quality"]["perplexity"] < 12  # of nine words
    assert result["quality"]["signature"].endswith(", on rank zero alone")


@pytest.mark.slow
def test_sharded_healing_is_that_of_one_process(tmp_path: Path) -> None:
    """hardware=fsdp, a converted decoder: both objectives, of which one calls attention alone."""
    root, model = write_texts(tmp_path), written(tmp_path / "model", SIZES)
    healing = ["convert.healing.steps=4", "convert.healing.tokens=64", "convert.healing.warmup=1"]
    words = [*TINY_CONVERTED, f"model='{model}'", "convert=mla", "convert.keep=0.5", *healing, f"data_root='{root}'"]
    words += ["convert.calibration.tokens=256", "convert.calibration.window=32", f"cache_dir='{root}/cache'"]
    run(*words, f"hydra.run.dir='{tmp_path / 'alone'}'")
    sharded = ["hardware=fsdp", "hardware.accelerator=cpu", "hardware.devices=2"]
    run(*words, *sharded, f"hydra.run.dir='{tmp_path / 'fsdp'}'")
    assert_close(weights(tmp_path / "alone"), weights(tmp_path / "fsdp"))
    single, other = (read(tmp_path / place)["conversion"] for place in ("alone", "fsdp"))
    assert single["layers"] == other["layers"]
    for point in ("original", "converted", "healed"):
        assert single["points"][point]["perplexity"] == pytest.approx(other["points"][point]["perplexity"], rel=1e-5)
    assert single["points"]["healed"]["perplexity"] != single["points"]["converted"]["perplexity"]
