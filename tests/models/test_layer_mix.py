"""Layers of a pretrained model, mixed with learned weights."""

import pytest
import torch
from torch import Tensor

from attnlab.models import ConformerEncoder, LayerMix, SpeechEncoder
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


@pytest.mark.parametrize("kind", [SpeechEncoder, ConformerEncoder])
def test_encoders_mix_before_they_project(kind: type[SpeechEncoder] | type[ConformerEncoder]) -> None:
    """Every weight of the mix learns, and one layer repeated is that layer."""
    torch.manual_seed(1)
    sizes = {"num_mels": 6, "num_layers": 1, "num_heads": 2, "ffn_dim": 8, "conv_channels": 8, "conv_kernels": [5]}
    encoder = kind(16, **sizes, projection_dim=4, mix_layers=5).double().eval()  # type: ignore[arg-type]
    assert encoder.mix is not None and encoder.subsample.convs[0].in_channels == 4
    torch.nn.init.normal_(encoder.mix.weights)
    x = layers()
    out, _ = encoder(x, LENGTHS)
    out.square().sum().backward()
    assert encoder.mix.weights.grad is not None and encoder.mix.weights.grad.abs().min() > 1e-12
    plain = kind(16, **sizes, projection_dim=4).double().eval()  # type: ignore[arg-type]
    plain.load_state_dict({k: v for k, v in encoder.state_dict().items() if k != "mix.weights"})
    layer = x[:1, :, :1]
    centred = layer[:, :, 0] - layer[:, :, 0].mean(1, keepdim=True)
    same, _ = encoder(layer.expand(-1, -1, 5, -1), LENGTHS[:1])
    assert error(same, plain(centred, LENGTHS[:1])[0]) < 1e-11
