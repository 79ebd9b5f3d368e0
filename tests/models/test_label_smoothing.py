"""Label smoothing and dropout of language models, against what they are by definition."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.attention import MHA, RelativeMultiLinear
from attnlab.data.text.windows import IGNORE
from attnlab.models import T6, LanguageModel, TensorizedTransformer
from attnlab.models.decoder import SharedDropout
from attnlab.tasks.language_modelling.module import LanguageModelling

V = 23
MODELS: dict[str, Callable[[], LanguageModel]] = {
    "t6": lambda: T6(V, 16, lambda _: MHA(16, 2), num_layers=1, max_length=9),
    "tied": lambda: TensorizedTransformer(V, 16, lambda _: RelativeMultiLinear(16, 5, 4), 1, 8, 9),
    "adaptive": lambda: TensorizedTransformer(
        V, 16, lambda _: RelativeMultiLinear(16, 5, 4), 1, 8, 9, cutoffs=[7, 15], div_value=2
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    torch.manual_seed(0)
    made = MODELS[request.param]().double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def windows() -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(V, (2, 3, 8), generator=torch.Generator().manual_seed(1))
    targets[1, 5:] = IGNORE
    return tokens, targets


def test_smoothed_loss_and_gradient_are_torch_s(model: LanguageModel) -> None:
    """Cross-entropy with torch's smoothing over all words; the reported loss is without; in chunks alike."""
    tokens, targets = windows()
    real = targets != IGNORE
    logits = model(tokens)[real]
    want = torch.nn.functional.cross_entropy(logits, targets[real], reduction="sum", label_smoothing=0.1)
    plain = torch.nn.functional.cross_entropy(logits, targets[real], reduction="sum")
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(want, parameters, allow_unused=True)
    for chunk in (None, 5):
        model.loss_chunk = chunk
        words: Any = SimpleNamespace()
        module = LanguageModelling(
            model, words, label_smoothing=0.1, optimizer=None, schedule=None, identity={}, seed=0
        )
        loss, reported, _, count = module.losses((tokens, targets))
        assert loss.item() == pytest.approx(want.item(), rel=1e-12)
        assert reported.item() == pytest.approx(plain.item(), rel=1e-12) and count == real.sum()
        gradients_here = torch.autograd.grad(loss, parameters, allow_unused=True)
        for got, exact in zip(gradients_here, gradients, strict=True):
            assert (got is None) == (exact is None)
            if got is not None and exact is not None:
                torch.testing.assert_close(got, exact)
        module.eval()
        with torch.no_grad():
            assert module.losses((tokens, targets))[0].item() == pytest.approx(plain.item(), rel=1e-12)


def test_shared_dropout_has_one_mask_for_all_positions() -> None:
    torch.manual_seed(0)
    drop, x = SharedDropout(0.4), torch.randn(50, 7, 40)
    y = drop(x)
    zero = y == 0
    assert torch.equal(zero, zero[:, :1].expand_as(zero))
    assert zero.double().mean().item() == pytest.approx(0.4, abs=0.05)
    assert not torch.equal(zero[0], zero[1])
    torch.testing.assert_close(y[~zero], (x / 0.6)[~zero])
    assert torch.equal(drop.eval()(x), x)
