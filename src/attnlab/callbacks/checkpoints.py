"""Checkpoints that survive a crash, a full disk or an interruption."""

from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from attnlab.runs.files import replacing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the file and renames: the old checkpoint stays until the new one is complete.

    Lightning's own class writes to the system's temporary directory; if that is another file system, it then copies.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with replacing(Path(path)) as part:
            torch.save(checkpoint, part)


class BestAndLast(ModelCheckpoint):
    """Keeps the best checkpoints by `monitor`, and last.ckpt of every epoch and validation, whether best or not.

    Args: those of Lightning's `ModelCheckpoint`.
    """

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
