"""Whether a training fits the memory of its device: known from the configuration, before the corpus is read."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnlab.config.batch import configured_processes
from attnlab.errors import ConfigError
from attnlab.models.build import without_memory
from attnlab.run.device import device_of, scoring_dtype
from attnlab.run.record import first_process

if TYPE_CHECKING:
    from attnlab.tasks.base import Task
    from attnlab.training.memory import Estimate

log = logging.getLogger(__name__)


def needed(task: Task, size: int | None = None) -> Estimate | None:
    """What one process of a run needs for training and for decoding; None: the task trains nothing, or it is not known.

    Where a GPU is configured and there is none here, kernels are those of the CPU, which keep as much.

    Args:
        task: with its configuration.
        size: of a batch, in the unit of `task.batch_key`; None: as configured.
    """
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    from attnlab.training.memory import estimate

    cfg = task.cfg
    if not task.batch_key:
        return None
    hardware = cfg.hardware
    device = torch.device("cuda" if torch.cuda.is_available() and hardware.accelerator != "cpu" else "cpu")
    batch = size or largest_batch(task)
    models: list[nn.Module] = []

    def build() -> nn.Module:
        models.append(task.build())
        return models[0]

    try:
        found = estimate(
            build,
            lambda model: task.rehearsal(model, batch, device),
            task.optimizer_of,
            device,
            precision=hardware.precision,
            checkpointing=hardware.gradient_checkpointing,
            copies=task.copies(),
            processes=configured_processes(cfg) or max(1, torch.cuda.device_count()),
        )
    except DynamicOutputShapeException:
        log.warning("memory: not estimated: sizes in the training step of this model depend on the values in a batch")
        return None
    return replace(found, cache=task.decoding_cache(models[0], scoring_dtype(hardware.precision) or torch.float32))


def largest_batch(task: Task) -> int:
    """What a batch of one process has at most, in the unit of `task.batch_key`: its limit, or a whole update.

    Args:
        task: with its configuration.
    """
    data, update = task.cfg.task.data, task.cfg.task.train.batch
    limit, processes = int(data[task.batch_key]), configured_processes(task.cfg) or 1
    if "tokens" in update:
        return max(1, min(limit, update.tokens // data.window // processes))
    for unit in ("images", "sequences"):
        if unit in update:
            return max(1, min(limit, update[unit] // processes))
    return min(limit, int(update.bucket))


def needed_for_test(task: Task) -> Estimate | None:
    """What one process needs for scoring, without the activations; None: the task trains nothing, and tells no sizes.

    Args:
        task: with its configuration.
    """
    from attnlab.training.memory import Estimate, size_of

    if not task.batch_key:
        return None
    with without_memory():
        model = task.build()
    dtype = scoring_dtype(task.cfg.hardware.precision) or torch.float32
    return Estimate(size_of([*model.parameters(), *model.buffers()]), cache=task.decoding_cache(model, dtype))


def check_memory(task: Task, record: dict[str, Any], training: bool = True) -> None:
    """Say how much memory a run needs, and refuse a training that cannot fit what its CUDA device has free.

    On the CPU nothing is said: memory is shared with other programs, and the estimate would cost seconds of the one
    processor that trains; mode=describe hardware=gpu gives it on any machine. Weights, gradients and optimizer state
    are exact. Activations are those of the uncompiled step, so that a compiled or sharded run is not refused.

    Args:
        task: with its configuration.
        record: gets `memory`, in MiB.
        training: False: weights and caches of scoring alone.

    Raises:
        ConfigError: it cannot fit; names what may be lowered.
    """
    from attnlab.training.memory import refusal

    found = needed(task) if training else needed_for_test(task)
    if found is None:
        return
    record["memory"] = found.describe()
    device, hardware = device_of(task.cfg), task.cfg.hardware
    free, total = torch.cuda.mem_get_info(device)
    if first_process():
        log.info("memory: about %s; free: %.2f of %.2f GiB", found, free / 2**30, total / 2**30)
    if not training:
        return
    wrong = refusal(found, free, torch.cuda.get_device_name(device), advice(task))
    if wrong and (hardware.compile or hardware.strategy == "fsdp"):
        log.warning("%s (hardware.compile and hardware=fsdp need less than this)", wrong)
    elif wrong:
        raise ConfigError(wrong)


def advice(task: Task) -> dict[str, str]:
    """The keys that lower the memory of a training, as far as they are not set yet -> what they do.

    Args:
        task: with its configuration.
    """
    hardware, key = task.cfg.hardware, task.batch_key
    found = {f"task.data.{key}": f"below {task.cfg.task.data[key]}; an update stays as it is"}
    if not hardware.gradient_checkpointing:
        found["hardware.gradient_checkpointing=true"] = "slower"
    if hardware.precision == "32-true":
        found["hardware.precision=bf16-mixed"] = "half the activations"
    return found
