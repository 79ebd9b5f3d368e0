"""SIGTERM during training goes to whoever handled it before."""

import signal
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning.pytorch.callbacks import Callback


class KeepSignals(Callback):
    """Puts the handler of SIGTERM back that Lightning has wrapped when training starts.

    Lightning's own answers SIGTERM with a collective operation inside the signal handler. With several processes that
    meets whatever other collective the rest is in, and all of them wait for ever. The handler from before raises
    KeyboardInterrupt, which Lightning answers by saving, ending its other processes, and leaving.
    """

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, *args: Any) -> None:
        if self.handler is not None:
            signal.signal(signal.SIGTERM, self.handler)
