"""Which utterances form which batch: pure functions of lengths, seed, epoch, rank and world size."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

# Training sorts by length times a random factor up to this: batches differ from epoch to epoch, padding stays small.
LENGTH_JITTER = 1.1

Lengths = npt.NDArray[np.int64]


class FrameBatches(Sampler[list[int]]):
    """Batches of indices with at most `max_frames` frames each, padding included (longest length times batch size).

    Training (`shuffle`): bucketed by length, batches in random order; every rank gets equally many (the first few
    batches of the epoch repeat where they do not divide), so that no rank waits for another's gradients.
    Evaluation: longest first, every utterance exactly once over all ranks; counts per rank may differ by one, and a
    rank has none only where there are fewer utterances than ranks.
    An utterance longer than `max_frames` is a batch of its own.  `start` leaves out the first batches of this rank; the
    length stays that of the whole epoch, for the trainer counts the batches from before, too.
    """

    def __init__(
        self,
        lengths: Lengths,
        max_frames: int,
        max_sentences: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 1,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
    ) -> None:
        sizes = lengths
        if shuffle:
            random = np.random.default_rng([seed, epoch])
            order = np.argsort(-sizes * random.uniform(1.0, LENGTH_JITTER, len(sizes)), kind="stable")
            batches = _cut(sizes, order, max_frames, max_sentences)
            batches = [batches[i] for i in random.permutation(len(batches))]
            short = -len(batches) % world_size
            batches += [batches[i % len(batches)] for i in range(short)] if batches else []
        else:
            if world_size > 1:  # enough batches that no rank goes without
                share = max(1, len(sizes) // world_size)
                max_sentences = min(max_sentences or share, share)
            batches = _cut(sizes, np.argsort(-sizes, kind="stable"), max_frames, max_sentences)
        self._batches, self._start = batches[rank::world_size], start

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches[self._start :])

    def __len__(self) -> int:
        return len(self._batches)


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
