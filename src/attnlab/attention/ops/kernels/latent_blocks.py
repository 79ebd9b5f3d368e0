"""Sizes of one program of the latent kernel, and which of them fit a device."""

from itertools import product
from typing import NamedTuple

import torch

from .split import device_of

try:  # in a try, so that loaders of an exported folder do not ask for it where no kernel is used
    import triton
except ImportError as error:
    raise ImportError("this kernel needs triton: pip install 'attnlab[gpu]'") from error


class Blocks(NamedTuple):
    """Sizes of one program.

    Args:
        lines: queries, at least 16 for a matrix product.
        slots: slots of one step of its loop, at least 16.
        warps: of 32 threads.
        stages: of the pipeline: so many blocks of slots, or one less, are in flight.
    """

    lines: int
    slots: int
    warps: int
    stages: int


CHOICES = tuple(Blocks(*sizes) for sizes in product((16, 32, 64), (16, 32, 64, 128), (4, 8), (2, 3, 4)))


class Widths(NamedTuple):
    """Columns of a key, [content | rest], and of a value.

    Args:
        content: columns of a key that are its value too, or all of them.
        rest: columns of a key after these.
        value: columns of a value.
        shared: whether the value is the key's content.
    """

    content: int
    rest: int
    value: int
    shared: bool

    @property
    def padded(self) -> tuple[int, int, int]:
        """The powers of two that hold content, rest and value."""
        content, rest, value = (max(16, triton.next_power_of_2(width)) for width in self[:3])
        return content, rest if self.rest else 0, value


def fits(blocks: Blocks, padded: tuple[int, int, int], shared: bool, itemsize: int, memory: int) -> bool:
    """Whether the accumulator fits the registers, and the blocks in flight shared memory.

    Args:
        padded: columns of a key's content, of the rest of it, and of a value, as padded.
        shared: whether the value is the key's content.
    """
    return shared_memory(blocks, padded, shared, itemsize) <= memory and blocks.lines * padded[2] <= 128 * (
        32 * blocks.warps
    )


def shared_memory(blocks: Blocks, padded: tuple[int, int, int], shared: bool, itemsize: int) -> int:
    """Bytes that one program is expected to take."""
    content, rest, value = padded
    slot = content + rest + (0 if shared else value)
    held = blocks.stages if blocks.lines >= 64 else max(1, blocks.stages - 1)  # the former for Hopper's products
    return 1024 + itemsize * (held * blocks.slots * slot + blocks.lines * (content + rest + blocks.slots))


def choose_blocks(
    lines: int, padded: tuple[int, int, int], shared: bool, dtype: torch.dtype, device: torch.device
) -> Blocks:
    """Block sizes without a search: as many lines as there are and registers hold, then as many slots as fit.

    The bounds are where Triton 3.9 compiles for compute capability 8.0 and 9.0 without spilling registers.
    """
    most = (8192 if dtype == torch.float32 else 16384) // padded[2]
    lines = min(64, max(16, min(most, triton.next_power_of_2(lines))))
    warps = 4 if lines * padded[2] * dtype.itemsize <= 16384 else 8
    memory = device_of(device).shared_memory
    for slots, stages in ((64, 3), (32, 4), (32, 3), (16, 3), (16, 2)):
        blocks = Blocks(lines, slots, warps, stages)
        if fits(blocks, padded, shared, dtype.itemsize, memory):
            return blocks
    return Blocks(16, 16, 8, 1)
