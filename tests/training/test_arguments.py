"""Settings of a command line for Lightning: arguments of its Trainer, callbacks, averages of the weights."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.modes import train
from tests.command import weights
from tests.tasks.conftest import Start


def run(start: Start, directory: Path, *overrides: str) -> dict[str, Any]:
    cfg, record = start("task.train.max_epochs=2", *overrides)
    directory.mkdir(exist_ok=True)
    train.run(cfg, record, directory)
    return record


def test_arguments_of_the_trainer_and_a_callback_that_watches_the_task_s_metric(start: Start, tmp_path: Path) -> None:
    stop = ("callbacks=early_stopping", "callbacks.early_stopping.patience=1", "task.optimizer.lr=0")
    trainer = ("++trainer.limit_train_batches=1", "++trainer.profiler=simple", "task.train.max_epochs=9")
    training = run(start, tmp_path, *stop, *trainer)["training"]
    assert training["steps"] == training["epochs"] == 2
    assert training["stopped_by"] == "early stopping (patience exhausted)"
    assert "run_training_batch" in (tmp_path / "fit-profile.txt").read_text()


def test_a_limit_of_minutes_says_that_it_ended_the_training(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    record = run(start, tmp_path, "task.train.max_minutes=1e-6")
    training = record["training"]
    assert training["steps"] == 1 and 0 < training["epochs"] < 1
    assert training["stopped_by"] == "task.train.max_minutes=1e-06"
    assert f"stopped: task.train.max_minutes=1e-06 (1 update, {training['epochs']} epochs)" in caplog.messages


@pytest.mark.slow
def test_an_average_of_the_weights(start: Start, tmp_path: Path) -> None:
    """With a decay of zero the average is the last weights; otherwise the averaged weights are scored."""
    common = ("task.train.keep_best=1",)
    plain, zero, slow = (run(start, tmp_path / name, *common, *more) for name, more in AVERAGES.items())
    assert plain["training"]["final_loss"] == zero["training"]["final_loss"] == slow["training"]["final_loss"]
    last, averages = weights(tmp_path / "plain"), [weights(tmp_path / name) for name in ("zero", "slow")]
    same = [all(torch.equal(value, mean[name]) for name, value in last.items()) for mean in averages]
    assert same == [True, False]


AVERAGES = {
    "plain": (),
    "zero": ("callbacks=ema", "callbacks.ema.decay=0.0"),
    "slow": ("callbacks=ema", "callbacks.ema.decay=0.9"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fast", "overfit", "profile"])
def test_debugging(start: Start, tmp_path: Path, kind: str) -> None:
    cfg, record = start(f"debug={kind}", *(["task.train.max_epochs=2"] if kind == "overfit" else []))
    train.run(cfg, record, tmp_path)
    assert 0 < record["training"]["steps"] <= 30
