"""Layers of a pretrained model, mixed with learned weights."""

import pytest
import torch
from torch import Tensor

from attnlab.models.encoder import LayerMix
from tests.attention.mechanisms import error

LENGTHS = torch.tensor([9, 4, 1])


def layers() -> Tensor:
    """(3, 9, L=5, F=6), with numbers in the padding, which must not be read."""
    return torch.randn(3, 9, 5, 6, dtype=torch.float64)


def test_the_mix_is_the_formula_and_its_weights_learn() -> None:
    mix, x = LayerMix(5).double(), layers()
    torch.nn.init.normal_(mix.weights)
    got = mix(x, LENGTHS)
    shares = [float(w.exp() / mix.weights.exp().sum()) for w in mix.weights]
    assert sum(shares) == pytest.approx(1) and mix.shares().tolist() == pytest.approx(shares)
    for b, length in enumerate(LENGTHS.tolist()):
        want = torch.stack([sum(s * x[b, t, i] for i, s in enumerate(shares)) for t in range(length)])  # type: ignore[misc]
        assert error(got[b, :length], want - want.mean(0)) < 1e-12
        assert not got[b, length:].any()
    assert torch.autograd.gradcheck(
        lambda w: torch.func.functional_call(mix, {"weights": w}, (x, LENGTHS)), mix.weights.detach().requires_grad_()
    )


def test_it_begins_as_the_mean_and_computes_in_float32() -> None:
    mix, x = LayerMix(5), layers().float()
    mean = x.mean(2)[:1]
    torch.testing.assert_close(mix(x, LENGTHS)[:1], mean - mean.mean(1, keepdim=True))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(mix(x, LENGTHS)[:1], mean - mean.mean(1, keepdim=True))
