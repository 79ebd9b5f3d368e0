"""Which items form which update and batch, and one padded batch of inputs with their texts.

The order is a pure function of lengths, seed, epoch, rank and world size.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

from attnlab.config.batch import FrameShare

# Training sorts by length times a random factor up to this: buckets differ from epoch to epoch, padding stays small.
LENGTH_JITTER = 1.1

Ids = npt.NDArray[np.int64]


class EpochBatches(Sampler[list[int]]):
    """A process's batches of a training epoch of so many `updates`.

    Args:
        accumulate: batches of an update on each process.
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
        lengths: Ids,
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
    lengths: Ids, max_frames: int, max_sentences: int | None = None, *, rank: int = 0, world_size: int = 1
) -> list[list[int]]:
    """A process's batches of a held-out split: every sentence exactly once over all processes, the longest first.

    Counts of batches may differ by one between processes; a process has none only where there are fewer sentences than
    processes.

    Args:
        lengths: frames of each sentence, (n,) int64.
        max_frames: the largest number of frames in a batch, padding included.  A longer sentence is a batch alone.
        max_sentences: the largest number of sentences in a batch; None: no limit.
    """
    if world_size > 1:  # enough batches for every process
        share = max(1, len(lengths) // world_size)
        max_sentences = min(max_sentences or share, share)
    order = np.argsort(-lengths, kind="stable")
    return _cut(lengths, order, max_frames, max_sentences)[rank::world_size]


def ordered_batches(counts: Sequence[int], size: int, *, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """A process's batches of a held-out split in order: every item exactly once over all processes.

    Args:
        counts: items of each group; a batch is of one group.
        size: items of a batch; fewer where a process would otherwise have none.
    """
    size = max(1, min(size, sum(counts) // world_size))
    ends = list(accumulate(counts))
    batches = [
        list(range(i, min(i + size, end)))
        for end, count in zip(ends, counts, strict=True)
        for i in range(end - count, end, size)
    ]
    return batches[rank::world_size]


def _cut(sizes: Ids, order: Ids, max_frames: int, max_sentences: int | None) -> list[list[int]]:
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


# --- a padded batch ---


@dataclass(slots=True)
class Example:
    """One utterance or text pair, see :class:`Batch`.

    Args:
        features: features (T, F) or of several layers (T, L, F), float32, or source ids (T,), int64.
        target: ids of the target text, (N,), ending in </s>.
        ctc_target: ids for CTC, (M,), without </s>; None: CTC is not used.
        filler: it only keeps a process busy and must not count.
    """

    id: str
    features: npt.NDArray[np.float32] | Ids
    target: Ids
    ctc_target: Ids | None
    source: str
    reference: str
    label: str = ""
    others: tuple[str, ...] = ()
    filler: bool = False


@dataclass(slots=True)
class Batch:
    """B utterances, padded right.

    Args:
        features: (B, S, F) or (B, S, L, F) float32, zeros after the end of a row; or source ids (B, S) int64, then
            <pad>.
        feature_lengths: (B,) int64, in frames or ids.
        targets: pieces, </s>, then <pad>, (B, N) int64.
        target_lengths: (B,) int64; </s> counts.
        ctc_targets: ids without </s> and without the blank 0, (B, M) int64; None where no CTC labels are made.
        ctc_target_lengths: (B,) int64; None as well.
        sources, references: the transcripts or source texts, and the target texts as the corpus has them.
        labels: the classes; empty where there are none.
        others: further references of each.
        filler: True: the batch only keeps a process busy and must not count.
    """

    ids: list[str]
    features: Tensor
    feature_lengths: Tensor
    targets: Tensor
    target_lengths: Tensor
    ctc_targets: Tensor | None
    ctc_target_lengths: Tensor | None
    sources: list[str]
    references: list[str]
    labels: list[str]
    others: list[tuple[str, ...]]
    filler: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str, non_blocking: bool | None = None) -> "Batch":
        """On another device; by default the host does not wait for a copy to a CUDA device."""
        if non_blocking is None:  # Lightning says so for tensors alone
            non_blocking = torch.device(device).type == "cuda"
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def select(self, rows: list[int]) -> "Batch":
        """These rows alone, padded as before."""
        index = torch.tensor(rows, device=self.features.device)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        lists: dict[str, Any] = {name: [x[i] for i in rows] for name, x in values.items() if isinstance(x, list)}
        return replace(self._map(lambda x: x[index]), **lists)

    def pin_memory(self) -> "Batch":
        return self._map(lambda x: x.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        tensors: dict[str, Any] = {
            field.name: function(x) for field in fields(self) if isinstance(x := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)


def collate(examples: Sequence[Example], pad: int = 1) -> Batch:
    """Pads `examples` to one Batch; `pad` is the id after the end of targets."""
    ctc = [x.ctc_target for x in examples if x.ctc_target is not None]
    return Batch(
        ids=[x.id for x in examples],
        features=_pad([x.features for x in examples], pad),
        feature_lengths=torch.tensor([len(x.features) for x in examples]),
        targets=_pad([x.target for x in examples], pad),
        target_lengths=torch.tensor([len(x.target) for x in examples]),
        ctc_targets=_pad(ctc, pad) if ctc else None,
        ctc_target_lengths=torch.tensor([len(x) for x in ctc]) if ctc else None,
        sources=[x.source for x in examples],
        references=[x.reference for x in examples],
        labels=[x.label for x in examples],
        others=[x.others for x in examples],
        filler=any(x.filler for x in examples),
    )


def _pad(sequences: Sequence[npt.NDArray[Any]], pad: int) -> Tensor:
    tensors = [torch.from_numpy(x) for x in sequences]
    return pad_sequence(tensors, batch_first=True, padding_value=0.0 if tensors[0].is_floating_point() else pad)
