"""The loss of sequence-to-text models: smoothing, CTC, the first token's weight."""

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

    ctc = None

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.decoder = Table(logits)

    def encoder(self, features: Any, lengths: Any) -> tuple[Any, Any]:
        return features, lengths


class Pieces:
    size, labels = 7, {"a": 4}


@pytest.mark.parametrize("weight", [1.0, 5.0])
def test_the_first_token_counts_so_often(weight: float) -> None:
    targets = torch.tensor([[4, 5, 2], [4, 2, 1]])
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    module = SequenceToText(
        Fixed(logits),  # type: ignore[arg-type]
        Pieces(),  # type: ignore[arg-type]
        BeamSearch(beam=1),
        optimizer=torch.optim.SGD,
        schedule=torch.optim.lr_scheduler.ConstantLR,
        identity={},
        seed=1,
        label_smoothing=0.1,
        first_token_weight=weight,
    )
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
