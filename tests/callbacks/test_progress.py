"""What people read while a run trains: lines that stay whole, how long it takes, how far it is."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import pytest

from attnlab.callbacks import progress
from attnlab.callbacks.progress import TrainingTime
from attnlab.callbacks.summary import LONGEST, show
from attnlab.config.check import compose
from attnlab.report.figure import plot_curves
from attnlab.run.record import new


def train(callback: TrainingTime, clock: Any, updates: int, seconds: float, total: float, accumulate: int = 2) -> None:
    """Updates of two batches each; the first takes ten times as long."""
    trainer: Any = SimpleNamespace(
        global_step=7, accumulate_grad_batches=accumulate, is_global_zero=True, current_epoch=1,
        estimated_stepping_batches=total,
    )  # fmt: skip
    module: Any = SimpleNamespace(mean_loss=2.5)
    callback.on_train_start(trainer, module)
    for update in range(updates):
        for batch in range(accumulate):
            clock.now += seconds * (10 if update == 0 else 1) / accumulate
            trainer.global_step += batch == accumulate - 1
            callback.on_train_batch_end(trainer, module, None, None, update * accumulate + batch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    state = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: state.now))
    return state


@pytest.mark.parametrize(("total", "lines"), [(7 + 6021, 1), (200, 0), (float("inf"), 0)])
def test_a_long_training_says_how_long(total: float, lines: int, clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(TrainingTime(None), clock, updates=30, seconds=2, total=total)
    assert len(caplog.messages) == lines
    assert all("about 3 h 20 min for 6000 updates" in line and "max_minutes" in line for line in caplog.messages)


def test_without_a_terminal_a_line_every_thirty_seconds(clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(TrainingTime(30.0), clock, updates=40, seconds=2, total=107)
    assert caplog.messages[0] == "epoch 2, update 13 of 107, training loss 2.500, about 3 min left"
    assert len(caplog.messages) == 3  # 98 seconds of updates, the first of 20


def test_the_learning_rate_of_every_optimizer_has_a_panel(tmp_path: Path) -> None:
    (tmp_path / "curves").mkdir()
    sizes = []
    for rows in ("step,epoch,loss\n1,0,3.0\n2,0,2.0\n", "step,epoch,loss,lr-AdamW\n1,0,3.0,0.1\n2,0,2.0,0.2\n"):
        (tmp_path / "curves" / "metrics.csv").write_text(rows)
        picture = plot_curves(tmp_path)
        assert picture is not None
        sizes.append(len(picture.read_bytes()))
    assert sizes[0] < sizes[1]


def test_a_long_document_is_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = ["source", "reference", "hypothesis"], ["word " * 1000, "short", "also short"]
    (tmp_path / "predictions.tsv").write_text("\n".join("\t".join(cells) for cells in row) + "\n")
    record = new(compose("mode=describe"), "test")
    record["parameters"] = {"total": 3, "attention": 1, "trainable": 3}
    show(record, tmp_path)
    text = capsys.readouterr().out
    assert "word …" in text and text.count("word") < LONGEST / 5 + 1 and "also short" in text
