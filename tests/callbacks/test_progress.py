"""What people read while a run trains: lines that stay whole, how long it takes, how far it is."""

import io
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import pytest

from attnlab.callbacks import progress
from attnlab.callbacks.progress import Bar, TrainingTime, duration
from attnlab.callbacks.summary import LONGEST, show
from attnlab.config.check import compose
from attnlab.report.curves import plot_curves, read_curves
from attnlab.runs.console import StderrHandler
from attnlab.runs.record import new


def test_log_lines_go_through_the_stream_of_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, bar = StderrHandler(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", bar)  # as rich does while a bar is shown
    handler.handle(logging.LogRecord("a", logging.INFO, "", 0, "one line", None, None))
    assert bar.getvalue() == "one line\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(44.6, "45 s"), (89, "89 s"), (700, "12 min"), (5400, "1 h 30 min"), (12000, "3 h 20 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


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
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def test_a_long_training_says_how_long(clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(TrainingTime(None), clock, updates=30, seconds=2, total=7 + 6021)
    (line,) = caplog.messages
    assert line.startswith("about 3 h 20 min for 6000 updates; scale down with task.train.max_minutes")


@pytest.mark.parametrize("total", [200, float("inf")])
def test_a_short_or_unlimited_training_does_not(total: float, clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(TrainingTime(None), clock, updates=30, seconds=2, total=total)
    assert caplog.messages == []


def test_without_a_terminal_a_line_every_thirty_seconds(clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(TrainingTime(30.0), clock, updates=40, seconds=2, total=107)
    assert caplog.messages[0] == "epoch 1, update 13 of 107, training loss 2.500, about 3 min left"
    assert len(caplog.messages) == 3  # 98 seconds of updates, the first of 20


def test_the_bar_shows_no_epoch_that_does_not_exist() -> None:
    bar = Bar()
    for most, text in ((-1, "epoch 3"), (None, "epoch 3"), (14, "epoch 3 of 14")):
        bar._trainer = SimpleNamespace(max_epochs=most)  # type: ignore[assignment]
        assert bar._get_train_description(2) == text


def test_the_learning_rate_of_every_optimizer_has_a_panel(tmp_path: Path) -> None:
    (tmp_path / "curves").mkdir()
    (tmp_path / "curves" / "metrics.csv").write_text("step,epoch,loss,lr-AdamW\n1,0,3.0,0.1\n2,0,2.0,0.2\n")
    assert set(read_curves(tmp_path)) == {"loss", "lr-AdamW"}
    picture = plot_curves(tmp_path)
    assert picture is not None
    (tmp_path / "curves" / "metrics.csv").write_text("step,epoch,loss\n1,0,3.0\n2,0,2.0\n")
    with_rate = picture.read_bytes()
    assert plot_curves(tmp_path) == picture and len(picture.read_bytes()) < len(with_rate)


def test_a_long_document_is_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = ["source", "reference", "hypothesis"], ["word " * 1000, "short", "also short"]
    (tmp_path / "predictions.tsv").write_text("\n".join("\t".join(cells) for cells in row) + "\n")
    record = new(compose("mode=describe"), "test")
    record["parameters"] = {"total": 3, "attention": 1, "trainable": 3}
    show(record, tmp_path)
    said = capsys.readouterr().out
    assert "word …" in said and said.count("word") < LONGEST / 5 + 1 and "also short" in said
