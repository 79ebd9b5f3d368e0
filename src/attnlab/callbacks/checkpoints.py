"""Checkpoints that a crash, a full disk or an interruption cannot take away."""

import os
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the file and renames: the old one stays whole until the new one is.

    Lightning's own goes through the system's temporary directory, which on another file system means a copy.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            torch.save(checkpoint, part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


class BestAndLast(ModelCheckpoint):
    """The best by `monitor`, and last.ckpt after every epoch and validation, also one that was not among the best."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self._keep_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.check_val_every_n_epoch is None:  # validation inside an epoch
            self._keep_last(trainer)

    def _keep_last(self, trainer: Trainer) -> None:
        if self.dirpath is not None:
            trainer.save_checkpoint(Path(self.dirpath) / "last.ckpt")
