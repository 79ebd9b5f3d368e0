"""What the trainer and the record ask of every task's data."""

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import LightningDataModule


class TaskData(LightningDataModule):
    """A task's data: Lightning's loaders, and what a record says of them."""

    corpus: str  # what was read, with sizes; "sample" for an embedded corpus
    filtered: dict[str, int]  # what training leaves out, by reason
    resume_at: tuple[int, int] = (0, 0)  # an epoch, and the batch that it begins with: where a resumed run goes on

    def first_batch(self, epoch: int) -> int:
        """Asked again and again: the trainer makes a loader to count batches before it knows its epoch."""
        return self.resume_at[1] if epoch == self.resume_at[0] else 0
