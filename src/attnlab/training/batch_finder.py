"""The largest batch whose training step fits in memory, by steps that are really done."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from attnlab.training.memory import GIB, LiveTensors, one_step

log = logging.getLogger(__name__)

STEPS = 2  # in the second one gradients and optimizer state exist in the forward pass
EXACT = 16  # the search ends when the answer is known to one part in so many


def largest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """The largest size that fits: doubled until one does not, then bisected to about 6 %.

    Args:
        fits: whether a size does; where one does not, no larger one does.
        least: the first size that is tried.
        most: the largest that is wanted.

    Returns:
        The size; None: not even `least` fits.
    """
    good, bad, size = least - 1, most + 1, min(least, most)
    while bad - good > max(1, good // EXACT if good >= least else 0):
        if fits(size):
            good = size
        else:
            bad = size
        size = min(2 * good, most) if bad > most else (good + bad) // 2
    return good if good >= least else None


@contextlib.contextmanager
def limited(device: torch.device, limit: int | None) -> Iterator[None]:
    """Inside, torch.OutOfMemoryError is raised where more than `limit` bytes would be in use.

    Args:
        device: of the run. On CUDA the allocator enforces the limit; on the CPU the bytes of tensors are counted.
        limit: None: what the device has.
    """
    if limit is None:
        yield
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        with LiveTensors(limit):
            yield


def step_fits(
    build: Callable[[], nn.Module],
    rehearse: Callable[[nn.Module], Callable[[], Tensor]],
    optimizer: Callable[[nn.Module], Optimizer],
    device: torch.device,
    *,
    precision: str,
    extra: int = 0,
    limit: int | None = None,
) -> bool:
    """Whether the training step of a batch fits.

    Args:
        build: makes the model, on the CPU.
        rehearse: gives a function that computes the loss of the batch.
        optimizer: makes the optimizer of a model.
        device: of the run.
        precision: `hardware.precision`.
        extra: copies of the weights that the trainer will hold: averages, gradients that are being sent.
        limit: bytes; None: what the device has.
    """
    held: list[Tensor] = []
    try:
        with limited(device, limit):
            model = build().train()
            model = model.to(device, torch.bfloat16 if precision == "bf16-true" else None)
            held += [torch.empty_like(p) for _ in range(extra) for p in model.parameters()]
            made = optimizer(model)
            with torch.device(device):
                loss = rehearse(model)
            for _ in range(STEPS):
                one_step(loss, made, device, precision)
        return True
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):  # of cuBLAS and cuDNN
            raise
        return False
    finally:
        held.clear()
        model = made = loss = None  # type: ignore[assignment]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def describe(size: int, good: bool, limit: int) -> str:
    """A line about one try.

    Args:
        size: of the batch.
        good: whether it fits.
        limit: bytes.
    """
    return f"a batch of {size} {'fits' if good else 'does not fit'} in {limit / GIB:.3f} GiB"
