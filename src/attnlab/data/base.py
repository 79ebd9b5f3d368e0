"""The interface between a task's data, the trainer and the record."""

from pathlib import Path

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import LightningDataModule


class Data(LightningDataModule):
    """A task's data: Lightning's loaders, and what the record says of the corpus.

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

    def first_batch(self, epoch: int) -> int:
        """The first batch of an epoch.  Called repeatedly: the trainer counts batches before it knows its epoch."""
        return self.resume_at[1] if epoch == self.resume_at[0] else 0
