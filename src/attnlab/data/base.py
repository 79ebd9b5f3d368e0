"""The interface between a task's data, the trainer and the record."""

from abc import abstractmethod
from pathlib import Path

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import LightningDataModule

from attnlab.errors import ConfigError


class Data(LightningDataModule):
    """A task's data: Lightning's loaders, and the description of the corpus in the record.

    Attributes:
        corpus: what was read, with sizes; "sample" for an embedded corpus.
        location: the directory that was read; of an embedded corpus, its place in the cache.
        filtered: the number of training examples left out, by reason.
        resume_at: (epoch, batch) at which a resumed run continues.
    """

    corpus: str
    location: Path
    filtered: dict[str, int]
    resume_at: tuple[int, int] = (0, 0)

    @abstractmethod
    def batches_per_update(self, processes: int) -> int:
        """The number of batches that each process accumulates.

        Args:
            processes: the number of processes that share an update.

        Raises:
            ConfigError: they cannot share it.
        """

    @abstractmethod
    def held_out_sizes(self, stage: str | None) -> dict[str, int]:
        """The number of items of each held-out split, by name.

        Args:
            stage: "validate": the validation split alone; "test": the test split alone; None: both.
        """

    def check_held_out(self, processes: int, stage: str | None) -> None:
        """Refuse a held-out split that has fewer items than there are processes to share it.

        Args:
            processes: the number of processes.
            stage: which splits; see :meth:`held_out_sizes`.

        Raises:
            ConfigError: names the split and its size.
        """
        for split, size in self.held_out_sizes(stage).items():
            if size < processes:
                raise ConfigError(
                    f"hardware.devices: {processes} processes cannot share the {split} split, which has {size} "
                    f"{'item' if size == 1 else 'items'}; use at most {size} {'process' if size == 1 else 'processes'} "
                    "or a larger split"
                )

    def same_batches(self, processes: int) -> bool:
        """Whether an update is divided into the same batches on any number of processes, as BatchNorm needs it."""
        return processes * self.batches_per_update(processes) == 1

    def first_batch(self, epoch: int) -> int:
        """The first batch of an epoch.  Called repeatedly: the trainer counts batches before its epoch is set."""
        return self.resume_at[1] if epoch == self.resume_at[0] else 0

    def _ranks(self) -> tuple[int, int]:
        """Rank and number of processes."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
