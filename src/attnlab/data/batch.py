"""One padded batch of inputs with their texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnlab.data.speech.features import Array

Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class Example:
    """One utterance or text pair.

    Args:
        features: features (T, F) or of several layers (T, L, F), float32, or source ids (T,), int64.
        target: ids of the target text, (N,), ending in </s>.
        ctc_target: ids for CTC, (M,), without </s>; None: CTC is not used.
        source: the transcript or source text.
        reference: the target text as the corpus has it.
        label: the class, or empty.
        others: further references.
        filler: it only keeps a process busy and must not count.
    """

    id: str
    features: Array | Ids
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
        ids: names in the corpus, B.
        features: (B, S, F) or (B, S, L, F) float32, zeros after the end of a row; or source ids (B, S) int64, then
            <pad>.
        feature_lengths: (B,) int64, in frames or ids.
        targets: pieces, </s>, then <pad>, (B, N) int64.
        target_lengths: (B,) int64; </s> counts.
        ctc_targets: ids without </s> and without the blank 0, (B, M) int64; None where no CTC labels are made.
        ctc_target_lengths: (B,) int64; None as well.
        sources: the transcripts or source texts, B.
        references: the target texts as the corpus has them, B.
        labels: the classes, B; empty where there are none.
        others: further references of each, B.
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
        features=_pad_inputs([torch.from_numpy(x.features) for x in examples], pad),
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


def _pad_inputs(inputs: list[Tensor], pad: int) -> Tensor:
    return pad_sequence(inputs, batch_first=True, padding_value=0.0 if inputs[0].is_floating_point() else pad)


def _pad(sequences: Sequence[Ids], pad: int) -> Tensor:
    tensors = [torch.from_numpy(x) for x in sequences]
    return pad_sequence(tensors, batch_first=True, padding_value=pad)
