"""The mean of the weights after each update, from some update on."""

import logging
from typing import Annotated

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from annotated_types import Ge
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

log = logging.getLogger(__name__)


class MeanWeightAveraging(WeightAveraging):
    """Averaged stochastic gradient descent: validated, saved and scored is the mean of the weights of many updates.

    Every update from number `start` on counts alike (Polyak and Juditsky, 1992; AWD-LSTM's second half of a training);
    before, the weights are those of the last update. A checkpoint holds the mean as the model's weights, and beside it
    the trained weights and the number of updates, with which a resumed training continues as if not interrupted.

    Args:
        start: the first update whose weights count, from 1.
        use_buffers: whether the buffers of the model are averaged too.
    """

    def __init__(self, start: Annotated[int, Ge(1)] = 1, use_buffers: bool = True) -> None:
        def mean(average: Tensor, current: Tensor, updates: Tensor | int) -> Tensor:
            """The next mean; `updates`: those before this one."""
            count = (torch.as_tensor(updates, device=current.device) - start + 2).clamp(min=1)
            return average + (current - average) / count

        super().__init__(use_buffers=use_buffers, avg_fn=mean)
        self.start = start

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if trainer.global_step < self.start:
            ended = "the weights are not averaged: training ended after %d updates, before start=%d"
            log.warning(ended, trainer.global_step, self.start)
