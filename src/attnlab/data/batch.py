"""Utterances as padded batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnlab.data.corpus import Utterance
from attnlab.data.text.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class Example:
    """One utterance, see :class:`Batch`.

    Args:
        features: features (T, F) or of several layers (T, L, F), float32, or source ids (T,), int64.
        target: ids of the target text, (N,), ending in </s>.
        ctc_target: ids for CTC, (M,), without </s>; None: CTC is not used.
        filler: it only keeps a process busy and must not count.
    """

    utterance: Utterance
    features: npt.NDArray[np.float32] | Ids
    target: Ids
    ctc_target: Ids | None = None
    filler: bool = False


@dataclass(slots=True)
class Batch:
    """B utterances, padded right.

    Args:
        utterances: (B,), in an array because Lightning's conversions of precision enter lists.
        features: (B, S, F) or (B, S, L, F) float32, zeros after the end of a row; or source ids (B, S) int64, then
            <pad>.
        feature_lengths: (B,) int64, in frames or ids.
        targets: pieces, </s>, then <pad>, (B, N) int64.
        ctc_targets: ids without </s> and without the blank 0, (B, M) int64; None: CTC is not used.
        ctc_target_lengths: (B,) int64; None as well.
        filler: the batch only keeps a process busy and must not count.
    """

    utterances: npt.NDArray[np.object_]
    features: Tensor
    feature_lengths: Tensor
    targets: Tensor
    ctc_targets: Tensor | None = None
    ctc_target_lengths: Tensor | None = None
    filler: bool = False

    def to(self, device: torch.device | str, non_blocking: bool | None = None) -> "Batch":
        """On another device; by default the host does not wait for a copy to a CUDA device."""
        if non_blocking is None:  # Lightning sets it for tensors alone
            non_blocking = torch.device(device).type == "cuda"
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def select(self, rows: list[int]) -> "Batch":
        """These rows alone, padded as before."""
        index = torch.tensor(rows, device=self.features.device)
        return replace(self._map(lambda x: x[index]), utterances=self.utterances[rows])

    def pin_memory(self) -> "Batch":
        return self._map(lambda x: x.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        changed: dict[str, Any] = {name: function(x) for name, x in values if isinstance(x, Tensor)}
        return replace(self, **changed)


def collate(examples: Sequence[Example]) -> Batch:
    """The batch of some examples."""
    ctc = [x.ctc_target for x in examples if x.ctc_target is not None]
    ctc_targets, ctc_lengths = _padded(ctc) if ctc else (None, None)
    features, (targets, _) = _padded([x.features for x in examples]), _padded([x.target for x in examples])
    utterances, filler = np.array([x.utterance for x in examples], object), any(x.filler for x in examples)
    return Batch(utterances, *features, targets, ctc_targets, ctc_lengths, filler)


def _padded(rows: Sequence[npt.NDArray[Any]]) -> tuple[Tensor, Tensor]:
    """Rows of any lengths as one tensor, and their lengths."""
    tensors = [torch.from_numpy(x) for x in rows]
    value = 0.0 if tensors[0].is_floating_point() else Tokenizer.pad
    return pad_sequence(tensors, True, value), torch.tensor([len(x) for x in rows])
