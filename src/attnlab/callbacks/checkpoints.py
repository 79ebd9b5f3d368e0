"""Checkpoints that survive a crash, a full disk or an interruption, and a training that continues exactly."""

from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from attnlab.data.base import Data
from attnlab.errors import WriteError
from attnlab.run.files import remove_checksum, replacing_summed


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
                cause: BaseException | None = error  # torch hides the file system's error, such as a full disk
                while cause is not None and not isinstance(cause, OSError):
                    cause = cause.__cause__ or cause.__context__
                if cause is None:
                    raise
                raise WriteError(cause.errno, cause.strerror or str(cause), str(path)) from error

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(path)
        remove_checksum(Path(path))


class BestAndLast(ModelCheckpoint):
    """Keeps the best checkpoints by `monitor`, and last.ckpt of every epoch and validation, whether best or not.

    Args: those of Lightning's `ModelCheckpoint`.

    Attributes:
        last_step: the number of updates in the last.ckpt that this process has written. None: it has written none.
    """

    last_step: int | None = None

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
        self.write_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.check_val_every_n_epoch is None:  # validation inside an epoch
            self.write_last(trainer)

    def write_last(self, trainer: Trainer) -> None:
        """Write last.ckpt. All processes of the run do this together."""
        if self.dirpath is not None:
            trainer.save_checkpoint(Path(self.dirpath) / "last.ckpt")
            self.last_step = trainer.global_step


class Resume(Callback):
    """Sets `data.resume_at` from the trainer's progress in the checkpoint that is loaded.

    A checkpoint counts batches of a process.  With another number of processes, the same updates have more or fewer
    batches: the counts are converted.

    Attributes:
        begun: the updates of the checkpoint; 0: none was loaded.
    """

    begun: int = 0

    def __init__(self, data: Data) -> None:
        self.data = data

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.begun = int(checkpoint.get("global_step", 0))
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        now = trainer.accumulate_grad_batches
        before = checkpoint.get("batches_per_update", now)
        for counts in (progress["total"], progress["current"]):
            counts.update({name: count * now // before for name, count in counts.items()})
        if not progress["is_last_batch"]:
            self.data.resume_at = checkpoint["epoch"], progress["current"]["completed"]
