"""What padding holds reaches nothing: neither outputs nor gradients, NaN included."""

import pytest
import torch
from torch import Tensor, nn

from attnlab.models import ConformerEncoder, SpeechEncoder
from attnlab.models.cross_decoder import CrossAttention

NAN = float("nan")
LENGTHS = torch.tensor([23, 9])


def outputs(model: nn.Module, features: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs of the valid positions, and the gradients of all weights."""
    out = model(features, LENGTHS)
    y, lengths = out if isinstance(out, tuple) else (out, LENGTHS)
    valid = torch.cat([row[:length] for row, length in zip(y, lengths.tolist(), strict=True)])
    g = torch.randn(valid.shape, generator=torch.Generator().manual_seed(1), dtype=valid.dtype)
    grads = torch.autograd.grad(valid, list(model.parameters()), g, allow_unused=True)
    return valid, [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layers", [None, 3])
@pytest.mark.parametrize("projection", [None, 12])
@pytest.mark.parametrize("kind", [SpeechEncoder, ConformerEncoder])
def test_an_encoder_does_not_read_padding(
    kind: type[nn.Module], projection: int | None, layers: int | None, training: bool
) -> None:
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_heads": 2, "ffn_dim": 16, "conv_channels": 8}
    model = kind(16, 16, **sizes, projection_dim=projection, mix_layers=layers).double().train(training)
    clean = torch.randn(2, 25, *([layers] if layers else []), 16, dtype=torch.float64)
    padded = clean.clone()
    padded[torch.arange(25) >= LENGTHS[:, None]] = NAN
    (want, of_clean), (got, of_padded) = (outputs(model, x) for x in (clean, padded))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(of_padded, of_clean)


def test_cross_attention_does_not_read_padding() -> None:
    torch.manual_seed(0)
    cross, text, lengths = CrossAttention(16, 2).double(), torch.randn(2, 3, 16, dtype=torch.float64), LENGTHS // 8
    clean = torch.randn(2, 4, 16, dtype=torch.float64)
    padded = clean.masked_fill((torch.arange(4) >= lengths[:, None])[..., None], NAN)
    want, got = (cross(text, prefix, lengths) for prefix in (clean, padded))
    torch.testing.assert_close(got, want)
    g, weights = torch.randn_like(want), list(cross.parameters())
    torch.testing.assert_close(torch.autograd.grad(got, weights, g), torch.autograd.grad(want, weights, g))
    step = cross.extend(text, cross.start(padded, lengths, 1, None))
    torch.testing.assert_close(step, want.detach())
