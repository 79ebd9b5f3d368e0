"""What kernels share that are split along the context: how many splits there are, the span of each, the reduction.

Stage 1 computes a softmax of each part of the context by itself: for each line (a row's query head) and split, the
normalised output in float32 and the base-2 logarithm of the sum of exponentials, -inf where no key exists. Stage 2 is
`reduce`, which weighs the splits by their sums (Flash-Decoding, Dao et al. 2023).
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import interpreted

try:  # in a try, so that loaders of an exported folder do not ask for it where no kernel is used
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("this kernel needs triton: pip install 'attnlab[gpu]'") from error

__all__ = ["tl", "triton"]  # the one import of triton
LOG2_E = math.log2(math.e)
MOST = 128  # splits of one segment
BUSY = 0.9  # share of the best choice's busy multiprocessors with which fewer splits are taken


class Blocks(NamedTuple):
    """Sizes of one program.

    Args:
        lines: pairs of a row and a head that read the same slots, at least 16 for a matrix product.
        slots: slots (positions) of one step of its loop, at least 16.
        stages: of the pipeline: blocks of slots in flight, the one that is used included.
    """

    lines: int
    slots: int
    warps: int
    stages: int


class Device:
    """What the choice of block sizes and splits needs to know of a device.

    Args:
        device: CUDA, or the CPU for the interpreter, which is taken for a small device.
    """

    def __init__(self, device: torch.device) -> None:
        self.processors, self.shared_memory = 3, 100 * 1024
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            result = triton.runtime.driver.active.utils.get_device_properties(index)
            self.processors, self.shared_memory = result["multiprocessor_count"], result["max_shared_mem"]


@cache
def device_of(device: torch.device) -> Device:
    """The device's properties, read once."""
    return Device(device)


def num_splits(programs: int, blocks: int, processors: int) -> int:
    """Splits of a context, from shapes alone: a captured graph keeps its grid while counts change.

    With few programs, as many splits as fill the multiprocessors; with many, those that leave few of them idle in the
    last wave. The fewest are taken that keep `BUSY` of what the best number does.

    Args:
        blocks: blocks of slots that the context has room for: no more splits than these.
    """
    return _num_splits(max(1, programs), max(1, min(MOST, blocks)), processors)


@cache
def _num_splits(programs: int, limit: int, processors: int) -> int:
    def busy(splits: int) -> float:
        waves = programs * splits / processors
        return waves / math.ceil(waves)

    best = max(map(busy, range(1, limit + 1)))
    return next(splits for splits in range(1, limit + 1) if busy(splits) >= BUSY * best)


@triton.jit
def span(high, split, splits, BLOCK: tl.constexpr):
    """First and end of the slots that a split reads; all splits share what exists, in full blocks.

    `high`: slots that exist; `split`: of `splits`; `BLOCK`: slots of one block.
    """
    size = tl.cdiv(tl.cdiv(tl.maximum(high, 0), splits), BLOCK) * BLOCK
    first = split * size
    return first, tl.minimum(first + size, high)


def numbers(value: int | Tensor | None, rows: int, otherwise: int, name: str, like: Tensor) -> tuple[Tensor, int, int]:
    """A number of each row, as kernels take it: a tensor to read, the step from row to row, and the number otherwise.

    The step is -1 where the number is the same for all rows and known on the host: nothing is read then.

    Args:
        value: an int; int32 or int64 on the device, (rows,) or of one element; None: `otherwise`.
        like: a tensor on the device.

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
    """The number of a `row`, as `numbers` prepares it; int32.

    `pointer`: to read from; `step`: from row to row; `otherwise`: the number if not `READ`.
    """
    return tl.load(pointer + row * step).to(tl.int32) if READ else otherwise


def reduce(partial: Tensor, sums: Tensor, out: Tensor) -> Tensor:
    """Stage 2: (..., S, Dv) of S splits -> (..., Dv), zeros where no key exists in any split.

    Args:
        partial: outputs of the splits, (..., S, Dv) float32, contiguous; not read where the sum is -inf.
        sums: base-2 logarithms of their sums of exponentials, (..., S) float32, contiguous.
        out: (..., Dv), contiguous; written, and returned.
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
    """The arguments of `reduce`: `partial`, `sums`, `out`; SPLITS, PART: powers of two, splits at a time."""
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
    """How tl.dot multiplies: exactly, unless torch may take TensorFloat-32 for float32."""
    relaxed = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" and not interpreted()
    return "tf32" if relaxed else "ieee"


def widened(dtype: torch.dtype) -> bool:
    """Whether operands of tl.dot become float32 first: the interpreter multiplies bits of bfloat16 as integers."""
    return interpreted() and dtype == torch.bfloat16
