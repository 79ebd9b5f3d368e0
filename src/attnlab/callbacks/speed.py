"""Speed of training and of scoring."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from lightning import LightningModule, Trainer

from attnlab.callbacks.contribution import Contributor, Scored, ScoringCallback, Sections, over_processes
from attnlab.run.device import busy_cores
from attnlab.run.record import NOT_RUN

WATCHED = 0.2  # seconds for which the machine is watched before the test set is scored
PASSES, LONG_ENOUGH = 5, 2.0  # a pass is repeated until there are so many, or they took so many seconds together

Result = TypeVar("Result")


class TrainingSpeed(Contributor):
    """Seconds of the fit, validation and checkpoints included, and target tokens (or images) per second.

    Contributes to the section `training`. The module's `tokens_seen` counts all processes. The seconds are rank zero's.

    Args:
        unit: what is counted: "tokens" or "images".
    """

    def __init__(self, unit: str = "tokens") -> None:
        self.unit = unit
        self._values: dict[str, Any] = {}

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._began = now(module.device)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        seconds = now(module.device) - self._began
        tokens = float(module.tokens_seen)  # type: ignore[arg-type]
        self._values = {"seconds": round(seconds, 1), f"{self.unit}_per_second": round(tokens / seconds, 1)}

    def contribution(self) -> Sections:
        return {"training": self._values} if self._values else {}


class ScoringSpeed(Contributor, ScoringCallback):
    """Seconds of the model alone while the test set is scored, and tokens (or images) per second.

    Contributes to the section `inference`: `seconds`, `UNIT_per_second`, `batch` (the largest), `about`, and
    `busy_cores_before`, the cores that other processes occupied just before. Over several processes the units are
    summed and the seconds are those of the slowest.

    Args:
        protocol: what is timed.
        unit: what is counted: "tokens" or "images".
        about: further values of the section, for instance `beam` and `dtype`.
    """

    def __init__(self, protocol: str, unit: str = "tokens", **about: Any) -> None:
        self.protocol, self.unit, self.about = protocol, unit, about
        self._values: dict[str, Any] = {}

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.seconds, self.units, self.batch = 0.0, 0, 0
        self.busy = busy_cores(WATCHED, advise=False)

    def on_scored(self, scored: Scored, loader: int) -> None:
        self.seconds += scored.seconds
        self.units += scored.units
        self.batch = max(self.batch, len(scored.index))

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        seconds = over_processes(trainer, self.seconds, "max")
        units = over_processes(trainer, self.units, "sum")
        shared = f", shared by {trainer.world_size} processes; seconds of the slowest" if trainer.world_size > 1 else ""
        self._values = {
            "seconds": round(seconds, 3),
            f"{self.unit}_per_second": round(units / seconds, 1) if seconds else NOT_RUN,
            "batch": int(over_processes(trainer, self.batch, "max")),
            **self.about,
            "busy_cores_before": self.busy,
            "protocol": self.protocol + shared,
        }

    def contribution(self) -> Sections:
        return {"inference": self._values} if self._values else {}


def timed(measure: Callable[[], Result], device: torch.device) -> tuple[Result, list[float]]:
    """The result of a function that gives the same each time, and the seconds of each call: a short one is repeated."""
    seconds: list[float] = []
    while len(seconds) < PASSES and sum(seconds) < LONG_ENOUGH:
        began = now(device)
        result = measure()
        seconds.append(now(device) - began)
    return result, seconds


def now(device: torch.device) -> float:
    """Seconds of a monotonic clock, once everything queued on `device` has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
