"""Which items form which update and batch: pure functions of lengths, seed, epoch, rank and world size."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from attnlab.config.batch import FrameShare

# Training sorts by length times a random factor up to this: buckets differ from epoch to epoch, padding stays small.
LENGTH_JITTER = 1.1

Lengths = npt.NDArray[np.int64]


class FrameUpdates(Sampler[list[int]]):
    """A process's batches of a training epoch.

    An update's sentences are chosen first, from lengths, seed and epoch alone: sentences of similar length form buckets
    of at most `bucket` frames, the buckets are put into random order, and each `share.buckets` of them are an update.
    Then each bucket is divided into `share.parts` batches, which are dealt out to the processes.

    Every update has `share.accumulate` batches on every process, the last one of an epoch too.  A process without
    enough sentences gets fillers: :func:`filler` of an index, whose loss must not count.

    Args:
        lengths: frames of each sentence, (n,) int64.
        bucket: frames of a bucket, padding included (the longest length times the number of sentences).  A longer
            sentence is a bucket of its own.
        share: how an update is shared.
        max_sentences: the largest number of sentences in a bucket; None: no limit.
        seed, epoch: the order is a function of these two.
        rank, world_size: of the process.
        start: the number of this process's batches to leave out at the beginning.  The length remains that of the whole
            epoch, because the trainer counts the batches left out, too.
    """

    def __init__(
        self,
        lengths: Lengths,
        bucket: int,
        share: FrameShare,
        max_sentences: int | None = None,
        *,
        seed: int = 1,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
    ) -> None:
        random = np.random.default_rng([seed, epoch])
        order = np.argsort(-lengths * random.uniform(1.0, LENGTH_JITTER, len(lengths)), kind="stable")
        buckets = _cut(lengths, order, bucket, max_sentences)
        buckets = [buckets[i] for i in random.permutation(len(buckets))]
        self._updates = [buckets[i : i + share.buckets] for i in range(0, len(buckets), share.buckets)]
        self._share, self._rank, self._world, self._start = share, rank, world_size, start

    def __iter__(self) -> Iterator[list[int]]:
        first, skipped = divmod(self._start, self._share.accumulate)
        for update in self._updates[first:]:
            yield from self._mine(update)[skipped:]
            skipped = 0

    def __len__(self) -> int:
        return len(self._updates) * self._share.accumulate

    def _mine(self, update: list[list[int]]) -> list[list[int]]:
        """This process's batches of an update: a contiguous run, so that BatchNorm's order is that of the ranks."""
        parts = [
            part for bucket in update for k in range(self._share.parts) if (part := bucket[k :: self._share.parts])
        ]
        each, more = divmod(len(parts), self._world)
        first = self._rank * each + min(self._rank, more)
        mine = parts[first : first + each + (self._rank < more)]
        return mine + [[filler(update[0][0])]] * (self._share.accumulate - len(mine))


def filler(index: int) -> int:
    """Mark an index as one that only keeps a process busy; the same function gives the index back.

    Args:
        index: of an example, from 0; or a marked one, below 0.
    """
    return -1 - index


class FrameBatches(Sampler[list[int]]):
    """A process's batches of a held-out split: every sentence exactly once over all processes, the longest first.

    Counts of batches may differ by one between processes; a process has none only where there are fewer sentences than
    processes.

    Args:
        lengths: frames of each sentence, (n,) int64.
        max_frames: the largest number of frames in a batch, padding included.  A longer sentence is a batch of its own.
        max_sentences: the largest number of sentences in a batch; None: no limit.
        rank, world_size: of the process.

    Attributes:
        batches: the indices of each batch.
    """

    def __init__(
        self,
        lengths: Lengths,
        max_frames: int,
        max_sentences: int | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if world_size > 1:  # enough batches for every process
            share = max(1, len(lengths) // world_size)
            max_sentences = min(max_sentences or share, share)
        order = np.argsort(-lengths, kind="stable")
        self.batches = _cut(lengths, order, max_frames, max_sentences)[rank::world_size]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class OrderedBatches(Sampler[list[int]]):
    """A process's batches of a held-out split in order: every item exactly once over all processes.

    Numbers of batches may differ by one between processes; a process has none only where there are fewer items
    than processes.

    Args:
        items: the number of windows or images.
        batch_size: items of a batch; fewer where a process would otherwise have none.
        rank, world_size: of the process.

    Attributes:
        batches: the indices of each batch.
    """

    def __init__(self, items: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        batch_size = max(1, min(batch_size, items // world_size))
        batches = [list(range(i, min(i + batch_size, items))) for i in range(0, items, batch_size)]
        self.batches = batches[rank::world_size]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _cut(sizes: Lengths, order: Lengths, max_frames: int, max_sentences: int | None) -> list[list[int]]:
    batches: list[list[int]] = []
    current: list[int] = []
    longest = 0
    for i in order.tolist():
        grown = max(longest, int(sizes[i]))
        if current and (grown * (len(current) + 1) > max_frames or len(current) == max_sentences):
            batches.append(current)
            current, grown = [], int(sizes[i])
        current.append(i)
        longest = grown
    if current:
        batches.append(current)
    return batches
