"""What the trainer and the record ask of every task's data."""

import src.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import LightningDataModule


class TaskData(LightningDataModule):
    """A task's data: Lightning's loaders, and what a record says of them."""

    corpus: str  # what was read, with sizes; "sample" for an embedded corpus
    start_batch: int  # where the next training epoch begins; used once
    filtered: dict[str, int]  # what training leaves out, by reason
