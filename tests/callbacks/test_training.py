"""Callbacks of training: the lines in the log, the meter of memory, and the checkpoints that are saved."""

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader

from attnlab.callbacks import progress
from attnlab.callbacks.cost import Memory, MemoryMeter
from attnlab.callbacks.mean_weights import MeanWeightAveraging
from attnlab.training.checkpoints import BestAndLast


class Constant(LightningModule):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.weight, self.fails = torch.nn.Parameter(torch.zeros(())), fails

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails:
            raise ValueError("training fails")
        return self.weight * 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(1.5))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(directory: Path, *callbacks: Any, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, default_root_dir=directory, callbacks=list(callbacks), **options,
    )  # fmt: skip


def fit(directory: Path, module: LightningModule, *callbacks: Any, **options: Any) -> None:
    loader = DataLoader[Any](range(8), batch_size=1)  # type: ignore[arg-type]
    trainer(directory, *callbacks, **options).fit(module, loader, loader)


def test_a_validation_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="attnlab")
    fit(tmp_path, Constant(), progress.ValidationLog(), max_epochs=1, enable_checkpointing=False)
    assert [r.getMessage() for r in caplog.records if r.name.startswith("attnlab")] == [
        "epoch 1, update 8: validation loss 1.500"
    ]


@pytest.mark.parametrize(("start", "mean"), [(1, 4.5), (3, 5.5), (8, 8.0), (9, 8.0)])
def test_mean_weights_are_those_of_all_updates_from_the_first_that_counts(
    tmp_path: Path, start: int, mean: float
) -> None:
    """Update n of eight leaves the weight at -0.1 n."""
    module = Constant()
    fit(tmp_path, module, MeanWeightAveraging(start), max_epochs=1, enable_checkpointing=False)
    assert float(module.weight.detach()) == pytest.approx(-0.1 * mean, rel=1e-6)


def test_without_a_terminal_a_line_every_thirty_seconds(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Of updates of two batches each, the first of which takes ten times as long."""
    caplog.set_level(logging.INFO)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    stub: Any = SimpleNamespace(
        global_step=7, accumulate_grad_batches=2, is_global_zero=True, current_epoch=1, estimated_stepping_batches=107
    )
    callback, module = progress.TrainingLines(), SimpleNamespace(mean_loss=2.5)
    callback.on_train_start(stub, module)  # type: ignore[arg-type]
    for batch in range(80):
        clock.now += 10 if batch < 2 else 1
        stub.global_step += batch % 2
        callback.on_train_batch_end(stub, module, None, None, batch)  # type: ignore[arg-type]
    assert caplog.messages[0] == "epoch 2, update 13 of 107, training loss 2.500, about 3 min left"
    assert len(caplog.messages) == 3  # 98 seconds of updates, the first of 20


def test_a_failed_training_stops_the_meter(tmp_path: Path) -> None:
    before, memory = threading.active_count(), Memory()
    with pytest.raises(ValueError, match="training fails"):
        fit(tmp_path, Constant(fails=True), memory, max_epochs=1, enable_checkpointing=False)
    assert memory.sections == {} and threading.active_count() == before


def test_the_meter_sees_what_is_allocated() -> None:
    with MemoryMeter(torch.device("cpu"), interval=0.01) as meter:
        allocated = torch.ones(2**24)  # 64 MiB
        threading.Event().wait(0.1)
    assert meter.peak >= meter.mean > allocated.nbytes / 2**20


def test_of_equal_checkpoints_the_newest_are_kept(tmp_path: Path) -> None:
    best = BestAndLast(tmp_path, filename="{step}", monitor="val_loss", mode="min", save_top_k=2)
    fit(tmp_path, Constant(), best, max_steps=8, val_check_interval=2)
    assert sorted(path.name for path in tmp_path.glob("step*.ckpt")) == ["step=6.ckpt", "step=8.ckpt"]
