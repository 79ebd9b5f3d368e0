"""What a run computes in on this machine: decided here, once, before a configuration is fixed.

A run's config.yaml, its record and its identity hold the precision itself, never `auto`, and no setting of
`hardware.tf32` that changes nothing there.
"""

import ctypes
import sys
from pathlib import Path

from omegaconf import DictConfig, ListConfig

BFLOAT16 = (8, 0)  # the compute capability from which NVIDIA's devices have bfloat16 and TF32 (Ampere)
LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"  # of NVIDIA's driver
AMD = Path("/dev/kfd")  # of AMD's


def settle(cfg: DictConfig) -> None:
    """Replace `hardware.precision=auto` by the precision that it stands for, and `hardware.tf32` by its default where
    the run has no device with TF32.

    The precision is bf16-mixed on CUDA devices with bfloat16, and where a GPU is asked for and there is none, as on a
    login node. Elsewhere it is 32-true.
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
    there = range(torch.cuda.device_count())
    if isinstance(devices, int):
        there = there[:devices]
    return [torch.cuda.get_device_capability(i) for i in there if isinstance(devices, int | str) or i in devices]


def has_driver() -> bool:
    """Whether the driver of a CUDA device is installed; without it torch finds none."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return AMD.exists()
    return True
