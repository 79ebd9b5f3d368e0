"""Continues the data of an epoch where a checkpoint left it."""

from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from attnlab.data.base import Data


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
