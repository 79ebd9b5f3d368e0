"""The published layer reads the future, ours does not: shown on tokens that no past can predict."""

import math

import pytest
import torch
from torch import Tensor

from attnlab.attention import AbsoluteMultiLinear
from attnlab.models import TensorizedTransformer

VOCAB, WINDOW, STEPS = 8, 8, 1200


class Published(AbsoluteMultiLinear):
    """Without the mask, which the release builds and never reads: y_i = sum_jm W[:,j,m] A_ijm over the window."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None, size: int | Tensor) -> Tensor:
        return self.out(torch.einsum("bir,bjr,bmr->bijm", q[:, :, 0], k, v).flatten(2))


def train(form: type[AbsoluteMultiLinear]) -> Tensor:
    """Nats per position of a window of fresh i.i.d. uniform tokens, (T,), after training on such."""
    torch.manual_seed(0)
    model = TensorizedTransformer(
        VOCAB, 64, lambda _: form(64, 16, WINDOW), num_layers=2, ffn_dim=128, max_length=WINDOW
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (64, WINDOW + 1))
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).mean().backward()
        optimizer.step()
    tokens = torch.randint(VOCAB, (4000, WINDOW + 1))
    with torch.no_grad():
        return model.loss(tokens[:, :-1], tokens[:, 1:]).mean(0)


@pytest.mark.slow
def test_only_the_published_layer_beats_chance_on_tokens_without_a_past() -> None:
    floor = math.log(VOCAB)
    masked, unmasked = train(AbsoluteMultiLinear), train(Published)
    assert floor - 0.01 < masked.mean() < floor + 0.05
    assert unmasked[:-1].mean() < floor - 0.3  # targets inside the window
    assert unmasked[-1] > floor - 0.02  # the one whose target is not
