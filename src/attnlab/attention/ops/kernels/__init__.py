"""Triton kernels. This file needs only torch; the others import triton and are imported when a kernel runs.

Kernels run on CUDA devices of compute capability 8.0 or later, which have tensor cores for bfloat16. With
TRITON_INTERPRET=1 set before triton is imported, they run in Triton's slow interpreter on the CPU, for tests.
"""

import os
from functools import cache

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FACTOR_RANKS, FACTOR_WIDTH = 8, 256  # limits of `factor`: ranks of keys and values, which it unrolls, and head width


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def usable(device: torch.device) -> bool:
    """Whether kernels run on a device: CUDA, or the CPU in the interpreter."""
    if device.type == "cuda":
        return _importable() and not interpreted() and _capable(device.index)
    return device.type == "cpu" and interpreted() and _importable()


@cache
def _importable() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return True


@cache
def _capable(index: int | None) -> bool:
    major: int = torch.cuda.get_device_properties(index).major  # torch.compile treats this as a constant
    return major >= 8
