"""What a run computes in on this machine: decided here, once, before a configuration is fixed.

A run's config.yaml, its record and its identity hold the precision itself, never `auto`, and no setting of
`hardware.tf32` that changes nothing there.
"""

import ctypes
import sys
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from attnlab.errors import ConfigError

BFLOAT16 = (8, 0)  # the compute capability from which NVIDIA's devices have bfloat16 and TF32 (Ampere)
LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"  # of NVIDIA's driver
AMD = Path("/dev/kfd")  # of AMD's
NO_GPU = "torch finds no GPU here; take hardware=cpu or hardware=auto"
NO_APPLE_GPU = "torch finds no Apple GPU here; take hardware=cpu or hardware=auto"
NO_FLOAT16 = "hardware.precision=16-mixed: float16 needs a CUDA device; take hardware.precision=32-true or bf16-mixed"


def settle(cfg: DictConfig) -> None:
    """Replace `hardware.precision=auto` by the precision that it stands for, and `hardware.tf32` by its default where
    the run has no device with TF32.

    On the CPU and on Apple's devices that is 32-true. On a CUDA device it is bf16-mixed, or 32-true where one of the
    run's devices has no bfloat16. Where a GPU is asked for and there is none (a login node, or a machine on which the
    command is only checked), bf16-mixed.
    """
    hardware = cfg.hardware
    if hardware.precision != "auto" and hardware.tf32:
        return
    ampere = _ampere(str(hardware.accelerator), hardware.devices)
    if hardware.precision == "auto":
        hardware.precision = "bf16-mixed" if ampere else "32-true"
    if not ampere:
        hardware.tf32 = True


def _ampere(accelerator: str, devices: int | str | ListConfig | list[int]) -> bool:
    """Whether all devices of a run are CUDA devices with bfloat16 and TF32, or a GPU is asked for and none is here."""
    if accelerator not in ("auto", "gpu", "cuda"):
        return False
    if versions := capabilities(devices):
        return min(versions) >= BFLOAT16
    return accelerator == "cuda" or (accelerator == "gpu" and sys.platform != "darwin")


def capabilities(devices: int | str | ListConfig | list[int]) -> list[tuple[int, int]]:
    """The compute capability of each CUDA device of a run on this machine; torch is imported only with a driver."""
    if not has_driver():
        return []
    import torch

    if not torch.cuda.is_available():  # torch for CPUs, or no device
        return []
    every = range(torch.cuda.device_count())
    if isinstance(devices, int):
        chosen = [*every][:devices]
    else:
        chosen = [*every] if isinstance(devices, str) else [i for i in every if i in devices]
    return [torch.cuda.get_device_capability(i) for i in chosen]


def check_device(cfg: DictConfig) -> None:
    """Refuse a device that this machine cannot have, as far as that is known without torch.

    Raises:
        ConfigError: names the key, and what to take instead.
    """
    accelerator, apple = str(cfg.hardware.accelerator), sys.platform == "darwin"
    if cfg.mode in ("describe", "export"):
        return
    cuda = accelerator not in ("cpu", "mps") and has_driver()
    if accelerator in ("gpu", "cuda") and not cuda and not (accelerator == "gpu" and apple):
        raise ConfigError(f"hardware.accelerator={accelerator}: {NO_GPU}")
    if accelerator == "mps" and not apple:
        raise ConfigError(f"hardware.accelerator=mps: {NO_APPLE_GPU}")
    if accelerator in ("cpu", "auto") and isinstance(cfg.hardware.devices, ListConfig) and not cuda and not apple:
        raise ConfigError(f"hardware.devices={cfg.hardware.devices}: expected the number of processes on a CPU")
    if cfg.hardware.precision == "16-mixed" and not cuda:
        raise ConfigError(NO_FLOAT16)


def has_driver() -> bool:
    """Whether the driver of a CUDA device is installed; without it torch finds none."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return AMD.exists()
    return True
