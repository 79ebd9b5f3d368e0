"""SIGTERM during training and scoring is handled as before."""

import signal
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import Trainer
from lightning.pytorch.callbacks import Callback


class KeepSignals(Callback):
    """Restores the handler of SIGTERM that Lightning replaces when training or scoring starts.

    Lightning's own handler runs a collective operation. With several processes, that meets whatever other collective
    the others are in, and all of them wait for ever. The handler from before raises KeyboardInterrupt; Lightning then
    saves, ends its other processes and stops.
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
