"""The loss of sequence-to-text models: smoothing, CTC, the first token's weight."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnlab.data.batch import Batch
from attnlab.data.corpus import Utterance
from attnlab.decoding import BeamSearch
from attnlab.models.sequence import SequenceModel
from attnlab.tasks.sequence_to_text.module import SequenceToText


class Table(nn.Module):
    """Logits that are parameters."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(logits)

    def hidden(self, tokens: torch.Tensor, prefix: Any, lengths: Any) -> torch.Tensor:
        assert tokens[:, 0].eq(2).all()
        return self.table

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Fixed(SequenceModel):
    """A decoder of fixed logits after an encoder that changes nothing."""

    def __init__(self, logits: torch.Tensor, ctc: nn.Linear | None = None) -> None:
        super().__init__()
        self.decoder, self.ctc = Table(logits), ctc

    def encoder(self, features: Any, lengths: Any) -> tuple[Any, Any]:
        return features, lengths


class Pieces:
    size, labels = 7, {"a": 4}


def made(model: SequenceModel, **settings: Any) -> SequenceToText:
    return SequenceToText(
        model,  # type: ignore[arg-type]
        Pieces(),  # type: ignore[arg-type]
        BeamSearch(beam=1),
        optimizer=torch.optim.SGD,
        schedule=torch.optim.lr_scheduler.ConstantLR,
        identity={},
        seed=1,
        **settings,
    )


@pytest.mark.parametrize("weight", [1.0, 2.0, 5.0])
def test_the_first_token_counts_so_often(weight: float) -> None:
    targets = torch.tensor([[4, 5, 2], [4, 2, 1]])
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    module = made(Fixed(logits), label_smoothing=0.1, first_token_weight=weight)
    batch = Batch(
        np.array([Utterance(id=id, source="", target="", label="a") for id in "xy"]),
        torch.zeros(2, 4, 3), torch.tensor([4, 4]), targets,
    )  # fmt: skip
    loss, plain, _, count = module.train().losses(batch)
    logp = logits.log_softmax(-1)
    want = torch.tensor(0.0)
    for row, tokens in enumerate([[4, 5, 2], [4, 2]]):
        for place, token in enumerate(tokens):
            others = [i for i in range(7) if i != token]
            term = -0.9 * logp[row, place, token] - 0.1 / 6 * logp[row, place, others].sum()
            want = want + (weight if place == 0 else 1.0) * term
    assert float(loss.detach()) == pytest.approx(float(want), rel=1e-5)
    assert int(count) == 5
    assert float(plain) == pytest.approx(float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=1, reduction="sum")), rel=1e-5)  # fmt: skip  # noqa: E501
    assert float(module.eval().losses(batch)[0].detach()) == pytest.approx(float(plain), rel=1e-5)
    assert int(module.first_right) == int((logits[:, 0].argmax(-1) == 4).sum())


def alignments(frames: np.ndarray, labels: list[int]) -> float:
    """The negative log of the sum over all ways to write `labels` in the frames, with 0 as the blank."""
    total = 0.0
    for path in itertools.product(range(frames.shape[1]), repeat=len(frames)):
        merged = [label for label, _ in itertools.groupby(path)]
        if [label for label in merged if label] == labels:
            total += math.prod(float(frames[place, label]) for place, label in enumerate(path))
    return -math.log(total)


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_ctc_adds_its_weight_times_the_loss_of_all_alignments(weight: float) -> None:
    """Summed over utterances; nothing where the labels do not fit into the frames, and nothing in validation."""
    generator = torch.Generator().manual_seed(0)
    logits, features = torch.randn(3, 3, 7, generator=generator), torch.randn(3, 4, 3, generator=generator)
    targets, lengths = torch.tensor([[4, 5, 2], [4, 2, 1], [5, 4, 2]]), torch.tensor([4, 3, 2])
    labels, counts = torch.tensor([[4, 4, 0], [5, 0, 0], [4, 5, 4]]), torch.tensor([2, 1, 3])
    batch = Batch(
        np.array([Utterance(id=id, source="", target="", label="a") for id in "xyz"]),
        features, lengths, targets, labels, counts,
    )  # fmt: skip
    head = nn.Linear(3, 7)
    model = Fixed(logits, head)
    module = made(model, ctc_weight=weight)
    added = module.train().losses(batch)[0] - made(model).train().losses(batch)[0]
    with torch.no_grad():
        frames = F.softmax(head(features).double(), -1).numpy()
    expected = alignments(frames[0], [4, 4]) + alignments(frames[1, :3], [5])  # three labels do not fit into two frames
    assert float(added.detach()) == pytest.approx(weight * expected, rel=1e-5)
    _, plain, right, count = module.losses(batch)
    assert int(count) == 8 and int(right) == int(((logits.argmax(-1) == targets) & (targets != 1)).sum())
    assert float(module.eval().losses(batch)[0].detach()) == pytest.approx(float(plain), rel=1e-6)
