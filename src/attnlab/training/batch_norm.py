"""BatchNorm on several processes: the running statistics that one process would have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

from attnlab.errors import ConfigError
from attnlab.models.conformer import MaskedBatchNorm

if TYPE_CHECKING:
    from attnlab.data.base import Data


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers of a model that keep running statistics, by name."""
    norms = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    return {name: m for name, m in norms.items() if m.track_running_stats and m.momentum is not None}


def share_statistics(model: nn.Module, data: Data, processes: int) -> None:
    """Share the statistics of a model if each process has a part of every batch.

    ConfigError: they would depend on the number of processes.
    """
    norms = batch_norms(model)
    if norms and not data.same_batches(processes):
        raise ConfigError(
            f"the model has BatchNorm ({next(iter(norms))}), whose statistics would depend on the number of processes: "
            "set task.train.batch.split=false where the task has it, or take hardware.devices=1 and a task.data limit "
            "that holds a whole update"
        )
    for name, norm in norms.items() if data.divides_batches(processes) else ():
        if not isinstance(norm, MaskedBatchNorm):
            raise ConfigError(
                f"task.train.batch: the update is one bucket, which several processes divide, and {name} is a "
                f"{type(norm).__name__}, which has statistics of one process alone: set task.train.batch.bucket so "
                "that each process has a bucket of its own, or use attnlab.models.conformer.MaskedBatchNorm"
            )
        norm.shared = True


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Inside, a forward pass changes no running statistics; shared ones follow the other processes' parts."""
    shared, norms = _by_sharing(model)
    for masked in shared:
        masked.idle = True
    momenta = [norm.momentum for norm in norms]
    counts = [None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone() for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for masked in shared:
            masked.idle = False
        for norm, momentum, count in zip(norms, momenta, counts, strict=True):
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)


class RunningStatistics:
    """Makes the running statistics of an update those of one process that reads the batches of all ranks in order.

    A batch with statistics s changes a running value r to (1 - m) r + m s, with the layer's momentum m.  From r_0, the
    value before an update, and its own n batches, rank k gets (1 - m)^n r_0 + c_k.  The value after all N batches is
    then (1 - m)^N r_0 + the sum over k of (1 - m)^(batches of later ranks) c_k.

    Shared statistics are the same on every rank already. A model without BatchNorm stays as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms = _by_sharing(model)[1]
        self._before: list[Tensor] = []
        self._count = 0

    def begin_update(self) -> None:
        """Before the first batch of an update."""
        self._before = [value.clone() for norm in self._norms for value in _running(norm)]
        self._count = 0

    def add_batch(self) -> None:
        """After each batch that counts."""
        self._count += 1

    @torch.no_grad()
    def end_update(self) -> None:
        """After the last batch of an update.  All ranks must call it."""
        if not self._norms:
            return
        rank, world = distributed.get_rank(), distributed.get_world_size()
        counts = torch.zeros(world, dtype=torch.int64, device=self._before[0].device)
        counts[rank] = self._count
        distributed.all_reduce(counts)
        total, later = int(counts.sum()), int(counts[rank + 1 :].sum())
        values = [value for norm in self._norms for value in _running(norm)]
        factors = [1.0 - float(norm.momentum or 0.0) for norm in self._norms for _ in range(2)]
        sums = torch.cat(
            [
                (value - keep**self._count * before) * keep**later
                for value, before, keep in zip(values, self._before, factors, strict=True)
            ]
        )
        distributed.all_reduce(sums)
        pieces = sums.split([len(value) for value in values])
        for value, before, keep, piece in zip(values, self._before, factors, pieces, strict=True):
            value.copy_(keep**total * before + piece)
        for norm in self._norms:
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked += total - self._count


def _by_sharing(model: nn.Module) -> tuple[list[MaskedBatchNorm], list[_BatchNorm]]:
    """The BatchNorm layers whose batches the processes share, and the others."""
    norms = batch_norms(model).values()
    shared = [norm for norm in norms if isinstance(norm, MaskedBatchNorm) and norm.shared]
    return shared, [norm for norm in norms if norm not in shared]


def _running(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None and norm.running_var is not None
    return norm.running_mean, norm.running_var
