"""Time and memory of training and of scoring, and bytes of the key-value caches."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import psutil
import torch
from lightning import LightningModule, Trainer

from attnlab.callbacks.scoring import Contributor, Scored, ScoringCallback, over_processes
from attnlab.run.device import busy_cores
from attnlab.run.record import NOT_RUN


class MemoryMeter:
    """Memory in MiB between enter and exit: `peak`, `mean`, and `protocol`, which names what was read.

    Args:
        device: CUDA: the allocator's bytes; CPU: the process's resident set.  The state before is included.
        interval: seconds between two readings.
    """

    def __init__(self, device: torch.device, interval: float = 0.05) -> None:
        self.device, self.interval = device, interval
        self.peak = self.mean = 0.0
        where = "CUDA allocator" if device.type == "cuda" else "resident set of the process"
        self.protocol = f"{where}, read every {1000 * interval:.0f} ms"
        self._readings: list[int] = []
        self._stop = threading.Event()

    def _read(self) -> int:
        cuda = self.device.type == "cuda"
        return torch.cuda.memory_allocated(self.device) if cuda else psutil.Process().memory_info().rss

    def _sample(self) -> None:
        while not self._stop.wait(self.interval):
            self._readings.append(self._read())

    def __enter__(self) -> "MemoryMeter":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._readings = [self._read()]
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._readings.append(self._read())
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else max(self._readings)
        self.peak = peak / 2**20
        self.mean = sum(self._readings) / len(self._readings) / 2**20


class Memory(Contributor):
    """Peak and mean memory of training (section `training`) and of scoring (section `inference`), in MiB.

    Over several processes: the highest peak and the highest mean of any.  Give it to the trainer before callbacks that
    gather or write at the end of an epoch, so that their memory is not counted.
    """

    _meter: MemoryMeter | None = None

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._meter = MemoryMeter(module.device).__enter__()

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.on_fit_start(trainer, module)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._end(trainer, "training")

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._end(trainer, "inference")

    def on_exception(self, *args: Any) -> None:
        if self._meter is not None:
            self._meter.__exit__()
            self._meter = None

    def _end(self, trainer: Trainer, section: str) -> None:
        assert self._meter is not None
        self._meter.__exit__()
        self.sections[section] = {
            "peak_memory_mib": round(over_processes(trainer, self._meter.peak, "max"), 1),
            "mean_memory_mib": round(over_processes(trainer, self._meter.mean, "max"), 1),
            "protocol": self._meter.protocol,
        }
        self._meter = None


class CacheBytes(Contributor, ScoringCallback):
    """Bytes of the caches of the largest batch, as measured and as predicted, over all processes.

    Contributes `bytes_measured` and `bytes_predicted` to the section `kv_cache`.
    """

    largest = (0, 0)  # bytes, as measured and as predicted

    def on_scored(self, scored: Scored, loader: int) -> None:
        self.largest = max(self.largest, scored.cache_bytes)

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        measured, predicted = (int(over_processes(trainer, size, "max")) for size in self.largest)
        self.sections["kv_cache"] = {"bytes_measured": measured, "bytes_predicted": predicted}


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
        super().__init__()
        self.unit = unit

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._began = now(module.device)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        seconds = now(module.device) - self._began
        speed = round(float(module.tokens_seen) / seconds, 1)  # type: ignore[arg-type]
        self.sections["training"] = {"seconds": round(seconds, 1), f"{self.unit}_per_second": speed}


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
        super().__init__()
        self.protocol, self.unit, self.about = protocol, unit, about

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
        self.sections["inference"] = {
            "seconds": round(seconds, 3),
            f"{self.unit}_per_second": round(units / seconds, 1) if seconds else NOT_RUN,
            "batch": int(over_processes(trainer, self.batch, "max")),
            **self.about,
            "busy_cores_before": self.busy,
            "protocol": self.protocol + shared,
        }


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
