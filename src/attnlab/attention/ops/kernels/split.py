"""Shared code of kernels that are split along the context: number of splits, span of a split, reduction.

Stage 1 computes a softmax per split: for each line (a query head of a row), the normalised output in float32 and the
base-2 logarithm of the sum of exponentials, -inf if the split has no key. Stage 2 is `reduce`, which weights the splits
by their sums (Flash-Decoding, Dao et al. 2023).
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import interpreted

try:  # in a try, so that loaders of exported folders do not list it as a requirement
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("this kernel needs triton: pip install 'attnlab[gpu]'") from error

__all__ = ["tl", "triton"]  # triton is imported only here
LOG2_E = math.log2(math.e)
MOST = 128  # splits of one segment, at most
BUSY = 0.9  # fewer splits are preferred if they keep this share of the best occupancy


class Blocks(NamedTuple):
    """Block sizes of one program.

    Args:
        lines: pairs of a row and a head that read the same slots, at least 16 for a matrix product.
        slots: slots (positions) per iteration of its loop, at least 16.
        stages: pipeline stages: blocks of slots in flight, including the current one.
    """

    lines: int
    slots: int
    warps: int
    stages: int


class Device:
    """Properties of a device that determine block sizes and splits. The interpreter's CPU counts as a small device."""

    def __init__(self, device: torch.device) -> None:
        self.processors, self.shared_memory = 3, 100 * 1024
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            result = triton.runtime.driver.active.utils.get_device_properties(index)
            self.processors, self.shared_memory = result["multiprocessor_count"], result["max_shared_mem"]


@cache
def device_of(device: torch.device) -> Device:
    """Properties of a device, memoized."""
    return Device(device)


@cache
def num_splits(programs: int, blocks: int, processors: int) -> int:
    """Number of splits of a context. It depends only on shapes, because a captured graph has a fixed grid.

    The smallest number whose occupancy of the multiprocessors, over all waves, is at least `BUSY` times the best.

    Args:
        blocks: capacity of the context in blocks of slots, an upper bound of the result.
    """
    programs, limit = max(1, programs), max(1, min(MOST, blocks))

    def busy(splits: int) -> float:
        waves = programs * splits / processors
        return waves / math.ceil(waves)

    best = max(map(busy, range(1, limit + 1)))
    return next(splits for splits in range(1, limit + 1) if busy(splits) >= BUSY * best)


@triton.jit
def span(high, split, splits, BLOCK: tl.constexpr):
    """First and end of the slots that a split reads. Existing slots are divided evenly, in full blocks.

    `high`: number of slots that exist; `split`: index of the split; `BLOCK`: slots per block.
    """
    size = tl.cdiv(tl.cdiv(tl.maximum(high, 0), splits), BLOCK) * BLOCK
    first = split * size
    return first, tl.minimum(first + size, high)


def numbers(value: int | Tensor | None, rows: int, otherwise: int, name: str, like: Tensor) -> tuple[Tensor, int, int]:
    """Kernel arguments for a number per row: a tensor, its step from row to row, and the number if it is on the host.

    A step of -1 means that the tensor is not read.

    Args:
        value: an int; int32 or int64 on the device of `like`, (rows,) or one element; None: `otherwise`.

    ValueError: a tensor of another shape, dtype or device.
    """
    if not isinstance(value, Tensor):
        return like, -1, otherwise if value is None else value
    if value.dtype not in (torch.int32, torch.int64) or value.numel() not in (1, rows) or value.dim() > 1:
        raise ValueError(
            f"{name}: {value.dtype} of shape {tuple(value.shape)}; expected int32 or int64, one element or {rows}"
        )
    if value.device != like.device:
        raise ValueError(f"{name} on {value.device}, expected {like.device}, where the cache is")
    return value, value.stride(0) if value.numel() > 1 else 0, 0


@triton.jit
def number(pointer, row, step, otherwise, READ: tl.constexpr):
    """The int32 number of a `row`, from the results of `numbers`: `pointer`, `step`, and `otherwise` if not `READ`."""
    return tl.load(pointer + row * step).to(tl.int32) if READ else otherwise


def reduce(partial: Tensor, sums: Tensor, out: Tensor) -> Tensor:
    """Stage 2: merge S splits, (..., S, Dv) -> (..., Dv), which is zero if no split has a key.

    Args:
        partial: outputs of the splits, (..., S, Dv) float32, contiguous; not read where the sum is -inf.
        sums: base-2 logarithms of their sums of exponentials, (..., S) float32, contiguous.
        out: (..., Dv), contiguous; written and returned.
    """
    splits, width = partial.shape[-2:]
    lines, block = sums.numel() // splits, 64
    reduce_kernel[(lines, triton.cdiv(width, block))](
        partial, sums, out, splits, width,
        SPLITS=triton.next_power_of_2(splits), PART=min(32, triton.next_power_of_2(splits)), BLOCK=block, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def reduce_kernel(partial, sums, out, splits, width, SPLITS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Kernel of `reduce`: `partial`, `sums`, `out`; SPLITS, PART: powers of two, all splits and splits at a time."""
    line = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    every = tl.arange(0, SPLITS)
    lse = tl.load(sums + line * splits + every, mask=every < splits, other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top), 0)
    read = tl.zeros([BLOCK], tl.float32)
    for first in range(0, splits, PART):
        split = first + tl.arange(0, PART)
        some = tl.load(sums + line * splits + split, mask=split < splits, other=float("-inf"))
        there = (some > float("-inf"))[:, None] & (column < width)[None, :]
        place = (line * splits + split)[:, None] * width + column[None, :]
        read += tl.sum(tl.exp2(some - top)[:, None] * tl.load(partial + place, mask=there, other=0.0), 0)
    read = read / tl.where(total == 0.0, 1.0, total)
    tl.store(out + line * width + column, read.to(out.dtype.element_ty), mask=column < width)


def precision(dtype: torch.dtype) -> str:
    """Precision of tl.dot: ieee, unless torch allows TensorFloat-32 for float32."""
    relaxed = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" and not interpreted()
    return "tf32" if relaxed else "ieee"


def widened(dtype: torch.dtype) -> bool:
    """Whether to convert operands of tl.dot to float32: the interpreter multiplies bits of bfloat16 as integers."""
    return interpreted() and dtype == torch.bfloat16
