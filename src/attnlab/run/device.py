"""The device of this process, and how busy the machine is."""

import logging
import os
import shutil
import sys
from typing import Any

import psutil
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from attnlab.config.build import BFLOAT16, capabilities, require_device
from attnlab.errors import ConfigError
from attnlab.run.record import BUSY, first_process

log = logging.getLogger(__name__)

CXX = ("clang++",) if sys.platform == "darwin" else ("g++",)  # where torch looks if CXX is not set


def device_of(cfg: DictConfig) -> torch.device:
    """The device that `hardware.accelerator` names. ConfigError: a GPU is asked for, and torch finds none."""
    accelerator, cuda = cfg.hardware.accelerator, torch.cuda.is_available()
    if accelerator in ("gpu", "cuda") and not cuda:
        raise ConfigError(f"hardware.accelerator={accelerator}: torch finds no GPU here; give hardware=cpu")
    on_cuda = cuda and accelerator in ("auto", "gpu", "cuda")
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def check_devices(cfg: DictConfig) -> None:
    """Refuse a number of devices or a precision that this machine does not have (ConfigError)."""
    wanted, devices, precision = cfg.hardware.accelerator, cfg.hardware.devices, cfg.hardware.precision
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (weights := cfg.hardware.weights) != "float32" and device_of(cfg).type != "cpu":
        raise ConfigError(f"hardware.weights={weights}: only a CPU computes with rounded weights; give hardware=cpu")
    require_device(wanted, cuda > 0, torch.backends.mps.is_available())
    if cuda and wanted in ("auto", "gpu", "cuda"):
        _check_cuda(devices, precision, cuda)
    elif precision == "16-mixed":
        raise ConfigError("hardware.precision=16-mixed: float16 needs a CUDA device; take 32-true or bf16-mixed")
    elif OmegaConf.is_list(devices) and wanted != "mps":
        raise ConfigError(f"hardware.devices={devices}: expected the number of processes on a CPU")


def _check_cuda(devices: int | str | ListConfig, precision: str, count: int) -> None:
    most = max(devices) + 1 if isinstance(devices, ListConfig) else devices if isinstance(devices, int) else 0
    if count < most:
        raise ConfigError(f"hardware.devices={devices}: this machine has {count} GPU{'s' * (count > 1)}")
    compute = min(capabilities(devices))
    if precision.startswith("bf16") and compute < BFLOAT16:
        raise ConfigError(
            f"hardware.precision={precision}: a GPU of compute capability {compute[0]}.{compute[1]} has no bfloat16 "
            "(8.0 or later has); take hardware.precision=32-true or 16-mixed"
        )


def missing_compiler(cfg: DictConfig) -> str | None:
    """Why torch.compile cannot be used here: on the CPU it needs a C++ compiler, on CUDA one of C. None: it can."""
    cuda = device_of(cfg).type == "cuda"
    language, variable, usual = ("C", "CC", ("gcc", "clang")) if cuda else ("C++", "CXX", CXX)
    names = (os.environ[variable],) if os.environ.get(variable) else usual
    if any(map(shutil.which, names)):
        return None
    return f"torch.compile needs a {language} compiler, and there is no {' or '.join(names)} here (variable {variable})"


def compiles(cfg: DictConfig) -> bool:
    """Whether this run uses torch.compile: `hardware.compile`, and a compiler is installed."""
    return bool(cfg.hardware.compile) and missing_compiler(cfg) is None


def record_compiled(cfg: DictConfig, part: str, environment: dict[str, Any]) -> None:
    """Log and record as `compiled` the part that `hardware.compile` compiles, or "no". Empty: nothing in this mode."""
    if not cfg.hardware.compile:
        environment["compiled"] = "no"
    elif missing := missing_compiler(cfg):
        environment["compiled"] = f"no: {missing}"
        if first_process():
            log.warning("hardware.compile=true: %s: nothing is compiled, and the record says so", missing)
    else:
        environment["compiled"] = part or "no: nothing of this mode is"
        if part and first_process():
            log.info("compiled: %s (the first batches take longer)", part)


def prepare_cuda(cfg: DictConfig, environment: dict[str, Any]) -> None:
    """Set, log and record as `float32_products` how a CUDA device multiplies float32 matrices."""
    tf32 = bool(cfg.hardware.tf32)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    environment["float32_products"] = "TF32" if tf32 else "float32"
    if first_process():
        rounding = "round their factors to TF32, 10 bits (hardware.tf32=false: exact)" if tf32 else "are exact"
        words = "%s, precision %s; products of float32 matrices %s"
        log.info(words, environment["device"], cfg.hardware.precision, rounding)


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """A context in which torch computes in `dtype` where that is exact enough; None: as it is."""
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def scoring_dtype(precision: str) -> torch.dtype | None:
    """The type in which a run with this `hardware.precision` scores and caches: bfloat16, or None for float32."""
    return torch.bfloat16 if precision.startswith("bf16") else None


def busy_cores(interval: float = 0.5, advise: bool = True) -> float:
    """The number of cores that other processes keep busy; with `advise` a warning if wall times are unreliable.

    This process waits `interval` seconds meanwhile.
    """
    busy = psutil.cpu_percent(interval=interval) / 100 * (psutil.cpu_count() or 1)
    if advise and busy > BUSY:
        log.warning("other processes keep %.1f cores busy: trust ratios of cpu_seconds more than wall times", busy)
    return round(busy, 2)
