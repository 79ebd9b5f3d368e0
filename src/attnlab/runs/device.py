"""The device of this process, and how busy the machine is."""

import logging

import psutil
import torch
from omegaconf import DictConfig

from attnlab.errors import ConfigError

log = logging.getLogger(__name__)


def device_of(cfg: DictConfig) -> torch.device:
    """The device that `hardware.accelerator` names, for work outside Lightning's trainer.

    Args:
        cfg: the fixed configuration.

    Raises:
        ConfigError: a GPU is asked for, and torch finds none.
    """
    accelerator = cfg.hardware.accelerator
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(f"hardware.accelerator={accelerator}: torch finds no GPU here; give hardware=cpu")
    if accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def scoring_dtype(precision: str) -> torch.dtype | None:
    """The type in which a run with this `hardware.precision` scores and caches: bfloat16, or None for float32."""
    return torch.bfloat16 if precision.startswith("bf16") else None


def busy_cores(interval: float = 0.5, advise: bool = True) -> float:
    """The number of cores that other processes keep busy; warns where that makes wall times unreliable.

    Args:
        interval: seconds for which the machine is watched, while this process waits.
        advise: False: without the warning.
    """
    busy = psutil.cpu_percent(interval=interval) / 100 * (psutil.cpu_count() or 1)
    if advise and busy > 0.25:
        log.warning(
            "other processes keep %.1f cores busy: trust ratios of cpu_seconds (in the record) more than wall times",
            busy,
        )
    return round(busy, 2)
