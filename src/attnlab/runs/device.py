"""The device of this process, and how busy the machine is."""

import logging

import psutil
import torch
from omegaconf import DictConfig, OmegaConf

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


def check_devices(cfg: DictConfig) -> None:
    """Refuse an accelerator or a number of devices that this machine does not have.

    Args:
        cfg: the fixed configuration.

    Raises:
        ConfigError: names the key, and what there is.
    """
    wanted, devices = cfg.hardware.accelerator, cfg.hardware.devices
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted in ("gpu", "cuda") and not cuda and not (wanted == "gpu" and torch.backends.mps.is_available()):
        raise ConfigError(f"hardware.accelerator={wanted}: torch finds no GPU here; take hardware=cpu or hardware=auto")
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("hardware.accelerator=mps: torch finds no Apple GPU here; take hardware=cpu or hardware=auto")
    if wanted not in ("gpu", "cuda") and not (wanted == "auto" and cuda):
        return
    most = max(devices) + 1 if OmegaConf.is_list(devices) else devices if isinstance(devices, int) else 0
    if cuda and most > cuda:
        raise ConfigError(f"hardware.devices={devices}: this machine has {cuda} GPU{'s' * (cuda > 1)}")


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
