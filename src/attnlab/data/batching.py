"""Which items form which update and batch: pure functions of lengths, seed, epoch, rank and world size."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

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
        start: this process's batches to skip.  They count in the length, because the trainer counts them, too.
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
            yield from self._batches(update)[skipped:]
            skipped = 0

    def __len__(self) -> int:
        return len(self._updates) * self._share.accumulate

    def _batches(self, update: list[list[int]]) -> list[list[int]]:
        """This process's batches of an update: a contiguous run, so that BatchNorm's order is that of the ranks."""
        parts = [
            part for bucket in update for k in range(self._share.parts) if (part := bucket[k :: self._share.parts])
        ]
        count, more = divmod(len(parts), self._world)
        first = self._rank * count + min(self._rank, more)
        batches = parts[first : first + count + (self._rank < more)]
        return batches + [[filler(update[0][0])]] * (self._share.accumulate - len(batches))


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
        max_frames: the largest number of frames in a batch, padding included.  A longer sentence is a batch of its own.
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
