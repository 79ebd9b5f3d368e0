"""Checkpoints that survive a crash, a full disk or an interruption."""

import os
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from attnlab.errors import DataError, WriteError
from attnlab.run.checksums import forget, replacing_summed, verify


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the file and renames: the old checkpoint stays until the new one is complete. With checksums.

    Lightning's own class writes to the system's temporary directory; if that is another file system, it then copies.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        with replacing_summed(path) as part:
            try:
                with part.open("wb") as file:  # an open file: torch's own writer hides why it cannot write
                    torch.save(checkpoint, file)
            except (OSError, RuntimeError) as error:
                cause = _why(error)
                if cause is None:
                    raise
                raise WriteError(cause.errno, cause.strerror or str(cause), str(path)) from error

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(path)
        forget(Path(path))


def _why(error: BaseException) -> OSError | None:
    """The error of the file system behind an exception, such as a full disk; None: there is none."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return seen


def _is_sound(path: Path) -> bool:
    """Whether a file fits its checksum, or has none."""
    try:
        verify(path)
    except DataError:
        return False
    return True


class BestAndLast(ModelCheckpoint):
    """Keeps the best checkpoints by `monitor`, and last.ckpt of every epoch and validation, whether best or not.

    Where a full disk leaves no room for the first last.ckpt, the best checkpoint, which was written just before, gets
    this name too, so that there is something to resume.

    Args: those of Lightning's `ModelCheckpoint`.

    Attributes:
        kept: the number of updates in the last.ckpt that this process has written last; None: it has written none.
    """

    kept: int | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the best checkpoints from this run's directory, wherever it lay when they were saved."""
        moved = {path: str(Path(self.dirpath or "") / Path(path).name) for path in state_dict["best_k_models"]}
        if all(Path(path).is_file() for path in moved.values()):
            names = ("best_model_path", "kth_best_model_path", "last_model_path")
            state_dict = state_dict | {name: moved.get(state_dict[name], "") for name in names}
            scores = {moved[path]: score for path, score in state_dict["best_k_models"].items()}
            state_dict |= {"best_k_models": scores, "dirpath": self.dirpath}
        super().load_state_dict(state_dict)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Whether a checkpoint is among the best: of equal ones the newest, which has trained for longer."""
        worst = self.best_k_models.get(self.kth_best_model_path)
        tied = current is not None and worst is not None and bool(current == worst) and self.save_top_k > 0
        return tied or super().check_monitor_top_k(trainer, current)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self.keep_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.check_val_every_n_epoch is None:  # validation inside an epoch
            self.keep_last(trainer)

    def keep_last(self, trainer: Trainer) -> None:
        """Write last.ckpt.

        Args:
            trainer: whose state is saved; all processes of the run do this together.
        """
        if self.dirpath is None:
            return
        last = Path(self.dirpath) / "last.ckpt"
        try:
            trainer.save_checkpoint(last)
        except OSError:
            best = Path(self.best_model_path)
            if trainer.is_global_zero and best.is_file() and not last.exists():
                os.link(best, last)  # without a checksum, for which there may be no room either
                if not _is_sound(last):
                    last.unlink()  # a checksum of what could not be written is there
            raise
        self.kept = trainer.global_step
