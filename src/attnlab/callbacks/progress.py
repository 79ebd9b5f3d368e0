"""What is shown while a run trains."""

import logging
import sys
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar

log = logging.getLogger(__name__)

WORDS = {"loss": "training loss", "val_loss": "validation loss", "val_accuracy": "accuracy"}


class ValidationLog(Callback):
    """One line in the log after each validation: epoch, update, and every logged metric but the learning rate."""

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            seen = {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("lr-")}
            found = ", ".join(f"{WORDS.get(name, name)} {value:.3f}" for name, value in seen.items())
            log.info("epoch %d, update %d: %s", trainer.current_epoch, trainer.global_step, found)


class Bar(RichProgressBar):
    """Lightning's bar with the last point of the loss curve: the loss of each batch would make the host wait for it."""

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        mean_loss: Any = getattr(pl_module, "mean_loss", None)
        shown = {} if mean_loss is None else {"loss": round(mean_loss, 3)}
        return super().get_metrics(trainer, pl_module) | shown


def progress() -> list[Callback]:
    """`ValidationLog`, and on a terminal a progress bar."""
    return [ValidationLog(), *bar()]


def bar() -> list[Callback]:
    """A progress bar on a terminal; nothing elsewhere."""
    return [Bar(leave=False)] if sys.stdout.isatty() else []
