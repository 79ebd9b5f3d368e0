"""Answers at some positions of a sequence: the LightningModule of recall."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnlab.callbacks.scoring import Scored
from attnlab.data.text.windows import IGNORE, Window
from attnlab.models import Decoder
from attnlab.models.token_loss import nats
from attnlab.training.compiled import Compiled
from attnlab.training.module import Module


class Recall(Module):
    """Trains a model on the negative log-probability of each answer; other positions have no logits.

    Accuracies are means over sequences of the share of right answers, as in Zoology.

    `training` are arguments of `Module`.
    """

    compiled_part = "the model up to its last norm, in training, validation and scoring; not steps through caches"

    def __init__(self, model: Decoder, *, compile: bool = False, **training: Any) -> None:
        super().__init__(**training)
        self.model: Decoder = model
        self._compiled = Compiled(compile)

    def answers(self, batch: Window) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T) each: nats of the targets, 0 at other places; whether a target is most probable; whether it exists."""
        tokens, targets = batch
        real = targets != IGNORE
        logits = self.model.logits(self._compiled(self.model.hidden)(tokens)[real])
        answers = targets[real]
        lost = nats(logits, answers)
        spread = torch.zeros(targets.shape, dtype=lost.dtype, device=lost.device).masked_scatter(real, lost)
        right = torch.zeros_like(real).masked_scatter(real, logits.argmax(-1) == answers)
        return spread, right, real

    def losses(self, batch: Window) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        lost, right, real = self.answers(batch)
        loss = lost.sum()
        return loss, loss.detach(), right.sum(), real.sum()

    def first_of(self, batch: Window) -> Callable[[], str]:
        tokens = batch[0][0, :8].clone()
        return lambda: " ".join(map(str, tokens.tolist()))

    def validation_step(self, batch: Window, batch_idx: int) -> None:
        self._last_batch = batch
        lost, right, real = self.answers(batch)
        self.tally("val_loss", lost.sum(), real.sum())
        self.tally("val_accuracy", (right.sum(1) / real.sum(1)).sum(), len(real))

    def test_step(self, batch: Window, batch_idx: int, dataloader_idx: int = 0) -> Scored:  # type: ignore[override]
        lost, right, real = self.answers(batch)
        index = torch.tensor(self.indices(batch_idx, dataloader_idx))
        return Scored(index, {"nats": lost.double().sum(1), "right": right.sum(1), "counts": real.sum(1)})
