"""Callbacks of training: the line in the log, the meter of memory, and the checkpoints that are saved."""

import logging
import threading
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import pytest
import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader

from attnlab.callbacks.cost import Memory, MemoryMeter
from attnlab.callbacks.progress import ValidationLog
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


def fit(directory: Path, module: LightningModule, *callbacks: Any) -> None:
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=directory, callbacks=list(callbacks),
    )  # fmt: skip
    loader = DataLoader[Any](range(2), batch_size=1)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader)


def test_a_validation_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="attnlab")
    fit(tmp_path, Constant(), ValidationLog())
    assert [r.getMessage() for r in caplog.records if r.name.startswith("attnlab")] == [
        "epoch 1, update 2: validation loss 1.500"
    ]


def test_a_failed_training_stops_the_meter(tmp_path: Path) -> None:
    before, memory = threading.active_count(), Memory()
    with pytest.raises(ValueError, match="training fails"):
        fit(tmp_path, Constant(fails=True), memory)
    assert memory.sections == {} and threading.active_count() == before


def test_the_meter_sees_what_is_allocated() -> None:
    with MemoryMeter(torch.device("cpu"), interval=0.01) as meter:
        allocated = torch.ones(2**24)  # 64 MiB
        threading.Event().wait(0.1)
    assert meter.peak >= meter.mean > allocated.nbytes / 2**20


def test_of_equal_checkpoints_the_newest_are_kept(tmp_path: Path) -> None:
    best = BestAndLast(tmp_path, filename="{step}", monitor="val_loss", mode="min", save_top_k=2)
    trainer = Trainer(
        accelerator="cpu", max_steps=8, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, default_root_dir=tmp_path, callbacks=[best], val_check_interval=2,
    )  # fmt: skip
    loader = DataLoader[Any](range(8), batch_size=1)  # type: ignore[arg-type]
    trainer.fit(Constant(), loader, loader)
    assert sorted(path.name for path in tmp_path.glob("step*.ckpt")) == ["step=6.ckpt", "step=8.ckpt"]
