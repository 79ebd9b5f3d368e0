"""What people read while a run trains: lines that stay whole, how long it takes, how far it is."""

import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import pytest
from rich.console import Console
from rich.progress import Progress

from attnlab.callbacks import progress
from attnlab.callbacks.progress import Bar, TrainingTime, ValidationLog, duration, scoring
from attnlab.callbacks.quality import Quality
from attnlab.callbacks.summary import LONGEST, show
from attnlab.config.check import compose
from attnlab.metrics.numbers import Perplexity
from attnlab.report import figure
from attnlab.report.figure import plot_curves, read_curves
from attnlab.run.record import new


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
    state = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: state.now))
    return state


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
    assert caplog.messages[0] == "epoch 2, update 13 of 107, training loss 2.500, about 3 min left"
    assert len(caplog.messages) == 3  # 98 seconds of updates, the first of 20


def test_the_bar_shows_no_epoch_that_does_not_exist() -> None:
    bar = Bar()
    for most, text in ((-1, "epoch 3"), (None, "epoch 3"), (14, "epoch 3 of 14")):
        bar._trainer = SimpleNamespace(max_epochs=most)  # type: ignore[assignment]
        assert bar._get_train_description(2) == text


@pytest.mark.parametrize(("width", "parts"), [(80, 1), (200, 2)])
def test_the_bar_stays_on_one_line(width: int, parts: int) -> None:
    file = io.StringIO()
    bar, trainer = Bar(), SimpleNamespace(state=SimpleNamespace(fn="fit"), sanity_checking=False, training=True)
    trainer.progress_bar_callback, trainer.progress_bar_metrics, trainer.loggers = bar, {}, []
    trainer.progress_bar_metrics |= {"val_loss": 6.751, "val_accuracy": 0.25, "v_num": "curves"}
    bar._trainer = trainer  # type: ignore[assignment]
    bar._init_progress(trainer)  # type: ignore[arg-type]
    assert bar.progress is not None and bar._metric_component is not None
    bar.progress.stop()
    bar._console = Console(file=file, width=width, force_terminal=False)
    columns = [*bar.configure_columns(trainer), bar._metric_component]  # type: ignore[arg-type]
    shown = Progress(*columns, console=bar._console)
    bar.train_progress_bar_id = shown.add_task("epoch 10 of 14", total=2000, completed=1000)
    bar._metric_component.update(bar.get_metrics(trainer, SimpleNamespace(mean_loss=5.5)))  # type: ignore[arg-type]
    bar._console.print(shown.make_tasks_table(shown.tasks))
    (line,) = file.getvalue().splitlines()
    for text in ("epoch 10 of 14", "1000/2000", "loss: 5.500", "val_loss: 6.751"):
        assert text in line
    assert ("it/s" in line) == ("val_accuracy: 0.250" in line) == (parts == 2)


def test_each_pass_over_the_test_set_has_a_name() -> None:
    quality = Quality({"": Perplexity(1), "sliding_": Perplexity(1)})
    trainer: Any = SimpleNamespace(callbacks=[ValidationLog(), quality])
    assert [scoring(trainer, loader) for loader in range(2)] == ["scoring", "scoring, sliding windows"]
    assert scoring(SimpleNamespace(callbacks=[]), 0) == "scoring"  # type: ignore[arg-type]


def test_one_point_of_a_curve_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures: list[Any] = []

    def png(picture: Any) -> bytes:
        pictures.append(picture)
        return b""

    monkeypatch.setattr(figure, "png", png)
    (tmp_path / "curves").mkdir()
    rows = "".join(f"{i},0,3.0,{'0.5' if i == 9 else ''}\n" for i in range(20))
    (tmp_path / "curves" / "metrics.csv").write_text(f"step,epoch,loss,val_accuracy\n{rows}")
    plot_curves(tmp_path)
    assert [axis.lines[0].get_marker() for axis in pictures[0].axes] == ["None", "."]


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
    text = capsys.readouterr().out
    assert "word …" in text and text.count("word") < LONGEST / 5 + 1 and "also short" in text
