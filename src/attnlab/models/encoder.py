"""Speech encoder: convolutional subsampling, then a pre-norm Transformer."""

import math
from typing import Annotated

import torch
from annotated_types import MinLen
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.attention.base import blank, length_mask
from attnlab.config.bounds import Layers, Rate, Size


def sinusoidal_positions(positions: int | Tensor, width: int, like: Tensor) -> Tensor:
    """Sinusoidal embeddings (n, width): sines of all frequencies, then cosines, in the order of fairseq.

    Args:
        positions: number n of positions, from 0, or a tensor of positions, (n,).
        like: tensor with the dtype and device of the result.
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half, device=like.device) * (-math.log(10000.0) / (half - 1)))
    if isinstance(positions, int):
        positions = torch.arange(positions, device=like.device)
    angles = positions[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1).to(like.dtype)


def padded_embedding(vocab_size: int, d_model: int, pad: int) -> nn.Embedding:
    """Embedding with standard deviation 1 / sqrt(d). The embedding of `pad` is zero and is not trained."""
    embedding = nn.Embedding(vocab_size, d_model, padding_idx=pad)
    nn.init.normal_(embedding.weight, std=d_model**-0.5)
    with torch.no_grad():
        embedding.weight[pad].zero_()
    return embedding


def padding_mask(lengths: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """lengths (B,), x (B, S, d) -> mask of real positions, (B, S) bool, and additive mask, 0 or -inf, (B, S)."""
    real = length_mask(lengths, x.shape[1])
    return real, torch.zeros_like(real, dtype=x.dtype).masked_fill(~real, float("-inf"))


def encoder_layer(
    d_model: int,
    num_heads: int,
    ffn_dim: int,
    dropout: float,
    pre_norm: bool,
    attention_dropout: float | None,
    activation_dropout: float | None,
) -> nn.TransformerEncoderLayer:
    """torch's layer with separate dropout for attention weights and feed-forward activations; None: `dropout`."""
    layer = nn.TransformerEncoderLayer(
        d_model, num_heads, ffn_dim, dropout, activation="relu", batch_first=True, norm_first=pre_norm
    )
    layer.self_attn.dropout = dropout if attention_dropout is None else attention_dropout
    layer.dropout.p = dropout if activation_dropout is None else activation_dropout
    return layer


class LayerMix(nn.Module):
    """sum_l softmax(w)_l h_l over the layers h_l of a pretrained model, minus its mean over the utterance.

    The weighted sum is that of SUPERB (Yang et al. 2021, section 2) and of S3PRL's featurizer: one weight w_l per
    layer, initially zero, which gives the mean of the layers. Subtracting the mean over the utterance is ESPnet's
    `UtteranceMVN` with its defaults. Both belong to the front end of the MTLA paper's AMI recipe, and are computed in
    float32 in any precision of the model.

    Args:
        num_layers: number L of layers, including the input of the first one.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_layers))

    def shares(self) -> Tensor:
        """Weight of each layer, (L,). They sum to 1."""
        return self.weights.softmax(0)

    def forward(self, layers: Tensor, lengths: Tensor) -> Tensor:
        """Features (B, S, L, F), lengths (B,) -> (B, S, F), zero in padding."""
        with torch.autocast(layers.device.type, enabled=False):
            wide = torch.promote_types(self.weights.dtype, torch.float32)
            shares = self.shares().to(wide).expand(*layers.shape[:2], 1, -1)
            mixed = blank(shares, lengths) @ layers.to(wide)  # masks weights, not layers, to avoid a copy
            mixed = blank(mixed.squeeze(2), lengths)
            mean = mixed.sum(1, keepdim=True) / lengths.view(-1, 1, 1)
            return blank(mixed - mean, lengths).to(layers.dtype)


class ConvSubsampler(nn.Module):
    """1-D convolutions of stride 2, one per kernel size, each followed by a gated linear unit that halves its width.

    Args:
        channels: output channels of all convolutions but the last, before the gated linear unit.
    """

    def __init__(self, num_mels: int, channels: int, d_model: int, kernels: list[int]) -> None:
        super().__init__()
        last = len(kernels) - 1
        self.convs = nn.ModuleList(
            nn.Conv1d(
                num_mels if i == 0 else channels // 2,
                2 * d_model if i == last else channels,
                kernel,
                stride=2,
                padding=kernel // 2,
            )
            for i, kernel in enumerate(kernels)
        )

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, F), (B,) -> (B, S', d), (B,). Padding is set to zero after each layer."""
        x = x.transpose(1, 2)
        for conv in self.convs:
            x = F.glu(conv(x), dim=1)
            lengths = (lengths - 1) // 2 + 1
            x = blank(x.transpose(1, 2), lengths).transpose(1, 2)
        return x.transpose(1, 2), lengths


class FrontEnd(nn.Module):
    """Base of the speech encoders: layer mixing, projection, convolutional subsampling, and positions."""

    def __init__(
        self,
        d_model: int,
        num_mels: int,
        conv_channels: int,
        conv_kernels: list[int],
        projection_dim: int | None,
        mix_layers: int | None,
    ) -> None:
        super().__init__()
        self.scale = math.sqrt(d_model)
        self.project: nn.Module = nn.Identity()
        if projection_dim is not None:
            self.project = nn.Sequential(nn.Linear(num_mels, projection_dim), nn.LayerNorm(projection_dim))
        self.mix = None if mix_layers is None else LayerMix(mix_layers)
        self.subsample = ConvSubsampler(projection_dim or num_mels, conv_channels, d_model, conv_kernels)

    def embed(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, F), or (B, S, L, F) with `mix_layers`, and (B,) -> (B, S', d), (B,)."""
        features = blank(features, lengths) if self.mix is None else self.mix(features, lengths)
        x, lengths = self.subsample(blank(self.project(features), lengths), lengths)
        return self.scale * x + sinusoidal_positions(x.shape[1], x.shape[2], x), lengths


class SpeechEncoder(FrontEnd):
    """Features -> states of width d: fairseq's `s2t_transformer` as the MTLA recipes use it.

    Args:
        conv_channels: channels of the convolutions but the last.
        conv_kernels: kernel size of each convolution of stride 2; None: [5, 5].
        dropout: dropout of embeddings and of the output of each sublayer.
        attention_dropout: dropout of attention weights; None: `dropout`.
        activation_dropout: dropout of feed-forward activations; None: `dropout`.
        projection_dim: width of a linear layer with LayerNorm for wide features (AMI's WavLM features); None: no
            projection.
        mix_layers: number of pretrained layers per frame, which are mixed first, see :class:`LayerMix`; None: frames of
            one layer.
    """

    def __init__(
        self,
        d_model: Size,
        num_mels: Size = 80,
        num_layers: Layers = 12,
        num_heads: Size = 8,
        ffn_dim: Size = 2048,
        conv_channels: Size = 1024,
        conv_kernels: Annotated[list[Size], MinLen(1)] | None = None,
        dropout: Rate = 0.0,
        attention_dropout: Rate | None = None,
        activation_dropout: Rate | None = None,
        projection_dim: Size | None = None,
        mix_layers: Layers | None = None,
    ) -> None:
        super().__init__(d_model, num_mels, conv_channels, list(conv_kernels or [5, 5]), projection_dim, mix_layers)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            encoder_layer(d_model, num_heads, ffn_dim, dropout, True, attention_dropout, activation_dropout)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, F), or (B, S, L, F) with `mix_layers`, and (B,) -> (B, S', d), (B,)."""
        x, lengths = self.embed(features, lengths)
        x = self.dropout(x)
        _, bias = padding_mask(lengths, x)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=bias)
        return self.norm(x), lengths
