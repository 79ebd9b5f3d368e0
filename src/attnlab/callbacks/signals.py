"""Signals during training and scoring: SIGTERM has its earlier handler, SIGUSR2 saves first."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from torch import distributed

from attnlab.callbacks.checkpoints import BestAndLast

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
