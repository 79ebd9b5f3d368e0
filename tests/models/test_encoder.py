"""The speech encoder: what its layers compute, and that no row sees another's padding."""

import math

import pytest
import torch
from torch import Tensor, nn

from attnlab.models.encoder import ConvSubsampler, SpeechEncoder, sinusoidal_positions
from tests.attention.mechanisms import error

LENGTHS = torch.tensor([37, 1, 36, 5, 20, 19])


def small(kernels: list[int] | None = None) -> SpeechEncoder:
    encoder = SpeechEncoder(
        16, num_mels=7, num_layers=2, num_heads=4, ffn_dim=24, conv_channels=20, conv_kernels=kernels
    )
    return encoder.double().eval()


def features() -> Tensor:
    """Padded with zeros, as batches are."""
    x = torch.randn(len(LENGTHS), 40, 7, dtype=torch.float64)
    x[torch.arange(40) >= LENGTHS[:, None]] = 0.0
    return x


@pytest.mark.parametrize("kernels", [[5, 5], [5], [3, 5, 3]])
def test_lengths_are_those_of_the_convolutions(kernels: list[int]) -> None:
    subsample = ConvSubsampler(7, 20, 16, kernels)
    for length in range(1, 40):
        out, lengths = subsample(torch.randn(1, length, 7), torch.tensor([length]))
        assert lengths.item() == out.shape[1] == math.ceil(length / 2 ** len(kernels))
        assert out.shape[2] == 16


@pytest.mark.parametrize("kernels", [[5, 5], [5], [3, 5, 3]])
def test_a_padded_row_gets_what_it_gets_alone(kernels: list[int]) -> None:
    """With gradients, and by the fused layers that torch takes without them."""
    encoder, x = small(kernels), features().requires_grad_()
    out, lengths = encoder(x, LENGTHS)
    g = torch.randn_like(out)
    g[torch.arange(out.shape[1]) >= lengths[:, None]] = 0.0
    (of_batch,) = torch.autograd.grad(out, x, g)
    with torch.no_grad():
        fused, _ = encoder(x, LENGTHS)
    for b, length in enumerate(LENGTHS.tolist()):
        row = x[b : b + 1, :length].detach().requires_grad_()
        alone, [size] = encoder(row, LENGTHS[b : b + 1])
        assert size == alone.shape[1] == lengths[b]
        assert error(out[b, :size], alone[0]) < 1e-11
        assert error(fused[b, :size], alone[0]) < 1e-11
        (of_row,) = torch.autograd.grad(alone, row, g[b : b + 1, :size])
        assert error(of_batch[b, :length], of_row[0]) < 1e-11


@pytest.mark.parametrize("width", [4, 16])
def test_positions_are_all_sines_then_all_cosines(width: int) -> None:
    table = sinusoidal_positions(9, width, torch.zeros(1, dtype=torch.float64))
    half = width // 2
    for position in range(9):
        for m in range(half):
            angle = position * 10000 ** (-m / (half - 1))
            assert table[position, m].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, half + m].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_equals_its_formula() -> None:
    """Scaled subsampled features plus positions; x += attention(LN(x)); x += W2 relu(W1 LN(x)); a last LN."""
    encoder, x = small(), features()[:1]
    with torch.no_grad():
        for parameter in encoder.parameters():  # biases and norms that count
            parameter.add_(0.2 * torch.randn_like(parameter))
    want, _ = encoder.subsample(x, LENGTHS[:1])
    want = math.sqrt(16) * want[0] + sinusoidal_positions(want.shape[1], 16, want)
    for layer in encoder.layers:
        assert isinstance(layer, nn.TransformerEncoderLayer)
        weights = layer.self_attn
        h = layer.norm1(want)
        q, k, v = (h @ weights.in_proj_weight.T + weights.in_proj_bias).unflatten(-1, (3, 4, 4)).unbind(1)
        p = torch.einsum("thd,shd->hts", q, k).div(math.sqrt(4)).softmax(-1)
        want = want + weights.out_proj(torch.einsum("hts,shd->thd", p, v).flatten(1))
        want = want + layer.linear2(layer.linear1(layer.norm2(want)).relu())
    assert error(encoder(x, LENGTHS[:1])[0][0], encoder.norm(want)) < 1e-6  # float32 sines
