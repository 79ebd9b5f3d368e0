"""Triton kernels. This file needs torch alone; the others import triton and are imported where a kernel runs.

A kernel runs on CUDA devices from compute capability 8.0 on (tensor cores for bfloat16), and, where the environment has
TRITON_INTERPRET=1 before triton is imported, in Triton's interpreter on the CPU, which tests use: it is slow.
"""

import os
from functools import cache

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FACTOR_RANKS, FACTOR_WIDTH = 8, 256  # of `factor`: most ranks of keys and of values, which it unrolls, and widest head


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def usable(device: torch.device) -> bool:
    """Whether kernels can run on tensors of a device: on CUDA, or on the CPU in the interpreter."""
    if device.type == "cuda":
        return _importable() and not interpreted() and _capable(device.index)
    return device.type == "cpu" and interpreted() and _importable()


@cache
def _importable() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def _capable(index: int | None) -> bool:
    major: int = torch.cuda.get_device_properties(index).major  # torch.compile knows this one as a constant
    return major >= 8
