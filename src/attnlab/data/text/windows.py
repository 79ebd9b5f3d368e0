"""Windows of tokens and batches of windows, as pure functions of seed, epoch, rank and index."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from attnlab.config.batch import Share
from attnlab.data.base import EpochBatches
from attnlab.data.text.facts import with_facts
from attnlab.data.text.tokens import Ids, TokenFile
from attnlab.data.text.vocabulary import Vocabulary

IGNORE = -1  # the target of tokens that are not scored

Window = tuple[Tensor, Tensor]


class Permutation:
    """A pseudo-random permutation of range(size) that is computed by index, in constant memory.

    It is a Feistel network on the next power of four, applied again to results outside the range (cycle walking).

    Args:
        key: ints; the permutation is a function of `size` and these.
    """

    ROUNDS = 4

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self._half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)  # bits of each side
        self._keys = np.random.default_rng(key).integers(1, 2**63, self.ROUNDS, dtype=np.uint64)

    def __getitem__(self, places: Ids) -> Ids:
        """(n,) indices below `size` to (n,) permuted indices."""
        x = places.astype(np.uint64)
        outside = np.ones(len(x), dtype=bool)
        while outside.any():  # at most four steps on average
            x[outside] = self._network(x[outside])
            outside = x >= self.size
        return x.astype(np.int64)

    def _network(self, x: np.ndarray) -> np.ndarray:
        bits = np.uint64(self._half)
        mask = np.uint64((1 << self._half) - 1)
        left, right = x >> bits, x & mask
        for key in self._keys:
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)  # wraps; a multiplicative hash
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << bits) | right


class TrainingWindows(Dataset[Window]):
    """Adjacent training windows of tokens and of the next tokens, from an offset that changes with the epoch.

    A window does not extend over several files.  The offsets are a function of `seed` and `epoch`.
    """

    def __init__(self, files: Sequence[TokenFile], length: int, seed: int, epoch: int) -> None:
        self.files, self.length = files, length
        offsets = np.random.default_rng([seed, epoch, 1]).integers(0, length, len(files))
        room = np.asarray([len(file) - 1 for file in files])  # the last token is a target only
        self._offsets = np.where(room - offsets >= length, offsets, 0)
        self._ends = np.cumsum((room - self._offsets) // length)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Window:
        which = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[which - 1]) if which else 0
        start = int(self._offsets[which]) + (index - before) * self.length
        ids = torch.from_numpy(self.files[which].read(start, start + self.length + 1))
        return ids[:-1], ids[1:]


class WindowsWithFacts(Dataset[Window]):
    """Training windows, a `share` of them with facts, as a function of `seed`, epoch and index."""

    def __init__(self, windows: TrainingWindows, share: float, vocabulary: Vocabulary, seed: int, epoch: int) -> None:
        self.windows, self.share, self.vocabulary, self.key = windows, share, vocabulary, (seed, epoch, 2)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Window:
        ids, targets = self.windows[index]
        draw = np.random.default_rng([*self.key, index])
        if draw.random() >= self.share:
            return ids, targets
        row = torch.tensor(with_facts([*ids.tolist(), int(targets[-1])], self.vocabulary, draw))
        return row[:-1], row[1:]


class BegunWindows(Dataset[Window]):
    """Windows as a pretrained model is given texts: each begins with what its tokenizer puts before a text.

    These ids take the place of the first ones of a window, which are no targets in it, so that the first target is
    predicted from them alone. They are no targets anywhere, unless they are the mark between texts.
    """

    def __init__(self, windows: Dataset[Window], vocabulary: Vocabulary) -> None:
        self.windows, self.vocabulary = windows, vocabulary

    def __len__(self) -> int:
        return len(self.windows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Window:
        tokens, targets = self.windows[index]
        targets = targets.masked_fill(torch.isin(targets, torch.tensor(unscored(self.vocabulary))), IGNORE)
        targets[: len(self.vocabulary.before) - 1] = IGNORE
        return begun(tokens, self.vocabulary), targets


def begun(rows: Tensor, vocabulary: Vocabulary) -> Tensor:
    """rows (..., T), whose first ids are replaced by those that a pretrained model's tokenizer puts before a text."""
    rows = rows.clone()
    rows[..., : len(vocabulary.before)] = torch.tensor(vocabulary.before, dtype=rows.dtype)
    return rows


def unscored(vocabulary: Vocabulary) -> list[int]:
    """Ids before a text that are never predicted."""
    return [i for i in vocabulary.before if i != vocabulary.end]


class EvaluationWindows(Dataset[Window]):
    """Held-out windows that begin every `stride` tokens; each token but the first is a target exactly once.

    With stride = length, windows are disjoint.  With a smaller stride, the first length - stride targets of a window
    are those of the window before; they are ignored, and the others have that much context.  The last window is padded.

    `limit` is the largest number of windows, evenly spread; None: all.
    """

    def __init__(self, file: TokenFile, length: int, stride: int, limit: int | None = None) -> None:
        self.file, self.length, self.stride = file, length, stride
        targets = len(file) - 1
        count = max(1, -(-(targets - length) // stride) + 1)
        self._chosen = np.arange(count) if limit is None or limit >= count else np.arange(limit) * count // limit

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Window:
        window = int(self._chosen[index])
        start = window * self.stride
        ids = self.file.read(start, min(start + self.length + 1, len(self.file)))
        tokens, targets = torch.zeros(self.length, dtype=torch.long), torch.full((self.length,), IGNORE)
        tokens[: len(ids) - 1] = torch.from_numpy(ids[:-1])
        targets[: len(ids) - 1] = torch.from_numpy(ids[1:])
        if window:
            targets[: self.length - self.stride] = IGNORE
        return tokens, targets


class ShuffledBatches(EpochBatches):
    """An update takes the next of `windows` windows in a random order.  The rest of an epoch is left out."""

    def __init__(self, windows: int, share: Share, *, seed: int, epoch: int, world_size: int = 1, **place: int) -> None:
        self._order, self._size = Permutation(windows, seed, epoch), share.size
        updates = windows // (share.size * share.accumulate * world_size)
        super().__init__(updates, share.accumulate, world_size=world_size, **place)

    def batch(self, update: int, part: int) -> list[int]:
        first = (update * self.accumulate * self.world_size + part) * self._size
        return self._order[np.arange(first, first + self._size)].tolist()
