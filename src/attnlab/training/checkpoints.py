"""Checkpoints: written at once or not at all, read without running code, averaged, and saved before a job is ended."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, distributed

from attnlab.data.base import Data
from attnlab.run.files import remove_checksum, replacing_summed, writing

log = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the file and renames: the old checkpoint stays until the new one is complete. With checksums.

    The class of Lightning writes to the system's temporary directory; from another file system it then copies.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        with replacing_summed(path) as part, writing(path):
            try:
                with part.open("wb") as file:
                    torch.save(checkpoint, file)
            except RuntimeError as error:  # torch hides the file system's error, such as a full disk
                raise error.__context__ if isinstance(error.__context__, OSError) else error from error

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(path)
        remove_checksum(Path(path))


class BestAndLast(ModelCheckpoint):
    """Keeps the best checkpoints by `monitor`, and last.ckpt of every epoch and validation, whether best or not.

    Every training has a validation after its last update.

    Args: those of Lightning's `ModelCheckpoint`.

    Attributes:
        last_step: the number of updates in the last.ckpt that this process has written. None: it has written none.
    """

    last_step: int | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the best checkpoints from this run's directory, wherever it lay when they were saved.

        One that is missing was removed for a better one after last.ckpt was written: the same happens again.
        """
        moved = {path: str(Path(self.dirpath or "") / Path(path).name) for path in state_dict["best_k_models"]}
        names = ("best_model_path", "kth_best_model_path", "last_model_path")
        state_dict = state_dict | {name: moved.get(state_dict[name], "") for name in names}
        scores = {moved[path]: score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict(state_dict | {"best_k_models": scores, "dirpath": self.dirpath})

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Whether a checkpoint is among the best: of equal ones the newest, which has trained for longer."""
        worst = self.best_k_models.get(self.kth_best_model_path)
        tied = current is not None and worst is not None and bool(current == worst) and self.save_top_k > 0
        return tied or super().check_monitor_top_k(trainer, current)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        if trainer.fit_loop._should_accumulate():
            if trainer.fit_loop._can_stop_early:  # only a limit of time asks inside an update, and it asks again
                trainer.should_stop = False
            return
        updated = 0 <= trainer.max_steps <= trainer.global_step
        ended = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        stopped = trainer.should_stop and trainer.fit_loop._can_stop_early
        regular = trainer.is_last_batch and trainer.check_val_every_n_epoch == 1
        if (updated or ended or stopped) and not regular:
            trainer.val_check_batch, trainer.check_val_every_n_epoch = 1, None  # validate after this batch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self.write_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.check_val_every_n_epoch is None and not trainer.is_last_batch:  # else the epoch's end follows
            self.write_last(trainer)

    def write_last(self, trainer: Trainer) -> None:
        """Write last.ckpt. All processes of the run do this together."""
        if self.dirpath is not None:
            for logger in trainer.loggers:
                logger.save()  # a killed process has the curves up to its checkpoint
            trainer.save_checkpoint(Path(self.dirpath) / "last.ckpt")
            self.last_step = trainer.global_step


class Resume(Callback):
    """Continues a training from a checkpoint at the batch after the last one that it has trained.

    Lightning restores its loops differently for checkpoints of an epoch's end, of a validation and of a place between
    two batches, and then trains a batch twice or leaves a validation out. Here all of them become a place between two
    batches: after the last batch of an epoch, the beginning of the next one. `data.resume_at` is the same place.

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
        log.info("continues after update %d", self.begun)
        loop = checkpoint["loops"]["fit_loop"]
        progress, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
        now = trainer.accumulate_grad_batches
        before = checkpoint.get("batches_per_update", now)  # an older one lacks it
        total, done = (progress[name]["completed"] // before * now for name in ("total", "current"))
        epoch = checkpoint["epoch"]
        if progress["is_last_batch"]:
            epoch, done = epoch + 1, 0
        progress["is_last_batch"] = False
        self.data.resume_at = epoch, done
        for counts, value in ((progress["total"], total), (progress["current"], done)):
            counts.update(dict.fromkeys(counts, value))
        for counts in (epochs["total"], epochs["current"]):
            begun = epoch + (done > 0)
            counts.update(ready=begun, started=begun, processed=epoch, completed=epoch)
        trainer.fit_loop._last_train_dl_reload_epoch = float("-inf")  # fsdp loads a checkpoint after the data

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        """End a training at once that early stopping had ended; Lightning's Timer does the same for its limit."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # of a mixin
        reasons = [callback.stopping_reason for callback in callbacks if isinstance(callback, EarlyStopping)]
        trainer.should_stop |= any(reason != EarlyStoppingReason.NOT_STOPPED for reason in reasons)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.begun:  # Lightning may have counted the last update twice or not at all
            trainer.fit_loop.epoch_loop._batches_that_stepped = self.begun


EVERY = 5.0  # seconds between two times that the processes agree whether one of them has got the signal
PATIENCE = 120.0  # seconds after which the run is ended where it is


class KeepSignals(Callback):
    """Restores the handler of SIGTERM that Lightning replaces when training or scoring starts.

    Lightning's handler runs a collective operation. The other processes may be inside another one, and then all wait
    for ever. The earlier handler raises KeyboardInterrupt, on which Lightning ends its other processes and stops.
    """

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        # Lightning's share of the same work: a broadcast before each batch, for which the host waits.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self._restore()

    def on_test_start(self, *args: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        if self.handler is not None:
            signal.signal(signal.SIGTERM, self.handler)


class EndAfterUpdate(Callback):
    """On SIGUSR2, which a cluster sends before its time limit, saves last.ckpt after an update and ends the run.

    The run ends through the handler of SIGUSR2 that was set before the training. Without one nothing is changed. After
    120 s without the end of an update, as in a long validation, the run ends where it is. Several processes agree about
    every five seconds: one that has got the signal is enough.

    Args:
        best: writes last.ckpt.
    """

    def __init__(self, best: BestAndLast) -> None:
        self.best = best
        self.asked: float | None = None  # when the signal came, by the monotonic clock
        self.handler: Any = None
        self.timer: threading.Timer | None = None  # repeats the signal; it must not outlive the training
        self.following = 0  # the number of updates after which the processes agree again
        self.before = (0, 0.0)  # updates and time when they last did

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        handler = signal.getsignal(signal.SIGUSR2)
        if not callable(handler) or threading.current_thread() is not threading.main_thread():
            return
        self.handler, self.process = handler, os.getpid()
        self.following, self.before = trainer.global_step + 1, (trainer.global_step, time.monotonic())
        loop = trainer.fit_loop.epoch_loop
        advance = loop.advance

        def advance_or_end(fetcher: Any) -> None:
            # here an update, its counters and its validation are complete: what is saved continues exactly
            if trainer.global_step >= self.following and self._agreed(trainer):
                if self.best.last_step != trainer.global_step:
                    self.best.write_last(trainer)
                self._end()
            advance(fetcher)

        loop.advance = advance_or_end  # type: ignore[method-assign, assignment]
        signal.signal(signal.SIGUSR2, self._ask)

    def on_train_end(self, *args: Any) -> None:
        self._restore()
        if self.handler and self.asked is not None:
            self._end()

    def on_exception(self, *args: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.handler:
            signal.signal(signal.SIGUSR2, self.handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # a forked process, which reads data
            return
        if self.asked is None:
            self.asked = time.monotonic()
            self.timer = threading.Timer(PATIENCE, os.kill, (self.process, signal.SIGUSR2))
            self.timer.daemon = True
            self.timer.start()
        elif time.monotonic() - self.asked >= PATIENCE:
            self._end()

    def _end(self) -> None:
        """Give the signal to the earlier handler, which raises Interrupted."""
        self._restore()
        signal.raise_signal(signal.SIGUSR2)

    def _agreed(self, trainer: Trainer) -> bool:
        """Whether a process has got the signal. Also sets when to agree again, the same for all."""
        step, now, ahead, asked = trainer.global_step, time.monotonic(), 1, self.asked is not None
        if trainer.world_size > 1:
            ahead = max(1, int(EVERY * (step - self.before[0]) / max(now - self.before[1], 1e-3)))
            both = torch.tensor([asked, ahead], device=trainer.strategy.root_device)
            distributed.all_reduce(both, distributed.ReduceOp.MAX)
            asked, ahead = bool(both[0]), int(both[1])
        self.following, self.before = step + ahead, (step, now)
        return asked
