"""The interface between a task's data, the trainer and the record; which items form which update and batch.

The order of items is a pure function of lengths, seed, epoch, rank and world size.
"""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, TypeVar

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from annotated_types import Ge, Le
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Sampler

from attnlab.config.batch import FrameShare, Share, counted
from attnlab.data.report import Report
from attnlab.errors import ConfigError, DataError

T = TypeVar("T")
Workers = Annotated[int, Ge(0), Le(1024)] | None  # None: see :meth:`Data.cuda_workers`
MOST_WORKERS = 8
AHEAD = 4  # batches that each worker process prepares ahead


class Loader(DataLoader[T]):
    """A loader that raises a worker's DataError without the worker's traceback."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # batches, where torch declares a class
        try:
            yield from super().__iter__()
        except DataError as error:
            last = str(error).strip().splitlines()[-1]
            raise DataError(last.rpartition("attnlab.errors.DataError: ")[2]) from error


class Data(LightningDataModule):
    """A task's data: Lightning's loaders, and the description of the corpus in the record.

    Attributes:
        corpus: a description with sizes; of a sample corpus its layout.
        location: the directory of the corpus, in the cache for an embedded one; None: the data is generated.
        report: what was read, left out and changed, by split.
        resume_at: (epoch, batch) at which a resumed run continues.
        seed: of the order of training.
        num_workers: worker processes of a loader, 0: none; None: see :meth:`cuda_workers`.
    """

    corpus: str
    location: Path | None
    report: Report
    seed: int
    resume_at: tuple[int, int] = (0, 0)
    num_workers: int | None = None

    @abstractmethod
    def share(self, processes: int) -> Share | FrameShare:
        """The share of each process in an update.  ConfigError: the update cannot be divided."""

    def batches_per_update(self, processes: int) -> int:
        """The number of batches that each process accumulates.  ConfigError: see :meth:`share`."""
        return self.share(processes).accumulate

    @abstractmethod
    def held_out_sizes(self, stage: str | None) -> dict[str, int]:
        """The number of items of each held-out split of a stage, "validate" or "test"; None: of both."""

    def check_held_out(self, processes: int, stage: str | None) -> None:
        """Raise ConfigError where a held-out split has fewer items than there are processes to share it."""
        for split, size in self.held_out_sizes(stage).items():
            if size < processes:
                has = f"{processes} processes cannot share the {split} split, which has {counted(size, 'item')}"
                raise ConfigError(f"hardware.devices: {has}; use at most {size}, or a larger split")

    def same_batches(self, processes: int) -> bool:
        """Whether an update is divided into the same batches on any number of processes, as BatchNorm needs it."""
        return processes * self.batches_per_update(processes) == 1

    def divides_batches(self, processes: int) -> bool:
        """Whether each of several processes gets a part of every batch, so that BatchNorm must see all of them."""
        return False

    def order(self) -> dict[str, int]:
        """The arguments of the samplers of training, from which the order of the present epoch follows."""
        epoch = self.trainer.current_epoch if self.trainer else 0
        start = self.resume_at[1] if epoch == self.resume_at[0] else 0
        return {"seed": self.seed, "epoch": epoch, "start": start, **self.ranks()}

    def ranks(self, shared: bool = True) -> dict[str, int]:
        """`rank` and `world_size` of samplers; those of one process unless the processes of the trainer share data."""
        trainer = self.trainer if shared else None
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        return {"rank": rank, "world_size": world_size}

    @property
    def testing(self) -> bool:
        """Whether `trainer.test` runs, whose processes share the test set."""
        return self.trainer is not None and bool(self.trainer.testing)

    @property
    def on_cuda(self) -> bool:
        """Whether the trainer moves batches to a CUDA device."""
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def cuda_workers(self) -> int:
        """The default of `num_workers` with a CUDA device: the cores of this process, at least 1 and at most 8."""
        assert self.trainer is not None
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        return max(1, min(MOST_WORKERS, cores // max(1, self.trainer.num_devices)))

    def loader(
        self,
        items: Dataset[T],
        batches: Sampler[list[int]] | Sequence[list[int]],
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Loader[T]:
        """The loader of every task: with a CUDA device it reads ahead, into pinned memory.

        Args:
            batches: the indices of each batch.
            collate: makes a batch of items; None: torch's default.
        """
        workers = self.num_workers
        if workers is None:
            workers = self.cuda_workers() if self.on_cuda else 0
        return Loader(
            items,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=workers,
            prefetch_factor=AHEAD if workers else None,
            pin_memory=self.on_cuda,
            generator=torch.Generator(),  # an iterator must not advance the global one
        )


# --- batches ---


class EpochBatches(Sampler[list[int]]):
    """A process's batches of a training epoch of `updates` updates.

    Args:
        accumulate: batches of an update on each process.
        start: this process's batches to skip, which count in the length.
    """

    def __init__(self, updates: int, accumulate: int, *, rank: int = 0, world_size: int = 1, start: int = 0) -> None:
        self.updates, self.accumulate = updates, accumulate
        self.rank, self.world_size, self.start = rank, world_size, start

    def __len__(self) -> int:
        return self.updates * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.start, len(self)):
            update, place = divmod(number, self.accumulate)
            yield self.batch(update, place * self.world_size + self.rank)

    @abstractmethod
    def batch(self, update: int, part: int) -> list[int]:
        """One of the `accumulate` times `world_size` batches of an update."""


def ordered_batches(counts: Sequence[int], size: int, *, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """A process's batches of a held-out split in order: every item exactly once over all processes.

    A batch has `size` items, or fewer, of one group; `counts` are the items of each group.
    """
    size = max(1, min(size, sum(counts) // world_size))
    ends = list(accumulate(counts))
    batches = [
        list(range(i, min(i + size, end)))
        for end, count in zip(ends, counts, strict=True)
        for i in range(end - count, end, size)
    ]
    return batches[rank::world_size]
