"""Which items form which update and batch: pure functions of lengths, seed, epoch, rank and world size."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from attnlab.config.batch import FrameShare

# Training sorts by length times a random factor up to this: buckets differ from epoch to epoch, padding stays small.
LENGTH_JITTER = 1.1

Lengths = npt.NDArray[np.int64]


class EpochBatches(Sampler[list[int]]):
    """A process's batches of a training epoch.

    Args:
        updates: the number of updates.
        accumulate: batches of an update on each process.
        rank, world_size: of the process.
        start: this process's batches to skip.  They count in the length, because the trainer counts them, too.
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


class FrameUpdates(EpochBatches):
    """Batches of sentences of similar length.

    An update's sentences are chosen first, from lengths, seed and epoch alone: sentences of similar length form buckets
    of at most `bucket` frames, the buckets are put into random order, and each `share.buckets` of them are an update.
    Then each bucket is divided into `share.parts` batches, which are dealt out to the processes.

    Every update has `share.accumulate` batches on every process, the last one of an epoch too.  A process without
    enough sentences gets fillers: :func:`filler` of an index, whose loss must not count.

    Args:
        lengths: frames of each sentence, (n,) int64.
        bucket: frames of a bucket, padding included (the longest length times the number of sentences).  A longer
            sentence is a bucket alone.
        share: how an update is shared.
        max_sentences: the largest number of sentences in a bucket; None: no limit.
        seed, epoch: the order is a function of these two.
        place: arguments of :class:`EpochBatches`.
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
        **place: int,
    ) -> None:
        random = np.random.default_rng([seed, epoch])
        order = np.argsort(-lengths * random.uniform(1.0, LENGTH_JITTER, len(lengths)), kind="stable")
        buckets = _cut(lengths, order, bucket, max_sentences)
        buckets = [buckets[i] for i in random.permutation(len(buckets))]
        self._buckets = [buckets[i : i + share.buckets] for i in range(0, len(buckets), share.buckets)]
        self._parts = share.parts
        super().__init__(len(self._buckets), share.accumulate, **place)

    def batch(self, update: int, part: int) -> list[int]:
        """A process has a contiguous run of an update's batches, so that BatchNorm's order is that of the ranks."""
        buckets = self._buckets[update]
        batches = [batch for bucket in buckets for k in range(self._parts) if (batch := bucket[k :: self._parts])]
        count, more = divmod(len(batches), self.world_size)
        first, place = self.rank * count + min(self.rank, more), part // self.world_size
        return batches[first + place] if place < count + (self.rank < more) else [filler(buckets[0][0])]


def filler(index: int) -> int:
    """Mark an index as one that only keeps a process busy, below 0; the same function gives the index back."""
    return -1 - index


def frame_batches(
    lengths: Lengths, max_frames: int, max_sentences: int | None = None, *, rank: int = 0, world_size: int = 1
) -> list[list[int]]:
    """A process's batches of a held-out split: every sentence exactly once over all processes, the longest first.

    Counts of batches may differ by one between processes; a process has none only where there are fewer sentences than
    processes.

    Args:
        lengths: frames of each sentence, (n,) int64.
        max_frames: the largest number of frames in a batch, padding included.  A longer sentence is a batch alone.
        max_sentences: the largest number of sentences in a batch; None: no limit.
        rank, world_size: of the process.
    """
    if world_size > 1:  # enough batches for every process
        share = max(1, len(lengths) // world_size)
        max_sentences = min(max_sentences or share, share)
    order = np.argsort(-lengths, kind="stable")
    return _cut(lengths, order, max_frames, max_sentences)[rank::world_size]


def ordered_batches(counts: Sequence[int], size: int, *, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """A process's batches of a held-out split in order: every item exactly once over all processes.

    Numbers of batches may differ by one between processes; a process has none only where there are fewer items
    than processes.

    Args:
        counts: items of each group; a batch is of one group.
        size: items of a batch; fewer where a process would otherwise have none.
        rank, world_size: of the process.
    """
    size = max(1, min(size, sum(counts) // world_size))
    ends = list(accumulate(counts))
    batches = [
        list(range(i, min(i + size, end)))
        for end, count in zip(ends, counts, strict=True)
        for i in range(end - count, end, size)
    ]
    return batches[rank::world_size]


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
