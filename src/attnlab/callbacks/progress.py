"""Progress of training and scoring: bars on a terminal, else lines of the log."""

import logging
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar

from attnlab.run.console import Pass

log = logging.getLogger(__name__)

WORDS = {"loss": "training loss", "val_loss": "validation loss", "val_accuracy": "accuracy"}
EVERY = 30.0  # seconds between two lines without a terminal


class ValidationLog(Callback):
    """One line in the log after each validation: epoch, update, and every logged metric but the learning rate."""

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("lr-")}
            words = ", ".join(f"{WORDS.get(name, name)} {value:.3f}" for name, value in metrics.items())
            log.info("epoch %d, update %d: %s", trainer.current_epoch + 1, trainer.global_step, words)


class TrainingLines(Callback):
    """A line every 30 seconds without a terminal: the update, the loss and the remaining time."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._first = self._last = time.monotonic()
        self._begun = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, done = time.monotonic(), trainer.global_step - self._begun
        if done == 1 and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._first = now  # the first update also compiles, allocates and reads caches
        if not trainer.is_global_zero or done <= 1 or now - self._last < EVERY:
            return
        self._last, total = now, float(trainer.estimated_stepping_batches)
        left = (total - trainer.global_step) * (now - self._first) / (done - 1)
        of, rest = (f" of {total:.0f}", f", about {duration(left)} left") if math.isfinite(left) else ("", "")
        loss: Any = getattr(module, "mean_loss", math.nan)
        shown = f", training loss {loss:.3f}" if math.isfinite(loss) else ""
        log.info("epoch %d, update %d%s%s%s", trainer.current_epoch + 1, trainer.global_step, of, shown, rest)


def duration(seconds: float) -> str:
    """Rounded for people: `45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class Bar(RichProgressBar):
    """Lightning's bar with the last point of the loss curve: the loss of each batch would make the host wait for it."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        mean_loss: Any = getattr(pl_module, "mean_loss", math.nan)
        loss = {"loss": round(mean_loss, 3)} if math.isfinite(mean_loss) else {}  # NaN: no point of the curve yet
        metrics = loss | super().get_metrics(trainer, pl_module)
        return {name: value for name, value in metrics.items() if name != "v_num"}  # the folder of the curves

    def _get_train_description(self, current_epoch: int) -> str:
        """Without the last epoch's number where a training has no such limit."""
        last = self.trainer.max_epochs
        return f"epoch {current_epoch + 1}" + (f" of {last}" if last is not None and last > 0 else "")


class ScoringLines(Callback):
    """A line from time to time without a terminal, while a validation or test set is read or decoded."""

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._start("validating, batch", trainer.num_val_batches)

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._start("scoring, batch", trainer.num_test_batches)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            self._advance(1)

    def on_test_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.on_validation_batch_end(trainer)

    def _start(self, what: str, batches: Sequence[float]) -> None:
        total = sum(batches)
        self._advance = Pass(None, what, int(total) if math.isfinite(total) else None)


def progress() -> list[Callback]:
    """The callbacks that show a training: on a terminal a bar, elsewhere lines of the log."""
    return [ValidationLog(), *([] if sys.stderr.isatty() else [TrainingLines()]), *bar()]


def bar() -> list[Callback]:
    """A progress bar on a terminal; lines of the log elsewhere."""
    return [Bar(leave=False, console_kwargs={"stderr": True}) if sys.stderr.isatty() else ScoringLines()]
