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
    """(positions, width): the sines of all frequencies, then their cosines, as fairseq lays them out.

    Args:
        positions: how many, from 0; or which, (n,).
        width: components, half of them sines.
        like: a tensor of the dtype and device of the result.
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half, device=like.device) * (-math.log(10000.0) / (half - 1)))
    if isinstance(positions, int):
        positions = torch.arange(positions, device=like.device)
    angles = positions[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1).to(like.dtype)


def padded_embedding(vocab_size: int, d_model: int, pad: int) -> nn.Embedding:
    """Normal with standard deviation 1 / sqrt(d); that of the padding `pad` is zero and stays so."""
    embedding = nn.Embedding(vocab_size, d_model, padding_idx=pad)
    nn.init.normal_(embedding.weight, std=d_model**-0.5)
    with torch.no_grad():
        embedding.weight[pad].zero_()
    return embedding


def padding_mask(lengths: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Where positions are real, (B, S) bool, and what is added to attention logits, 0 or -inf, (B, S).

    Args:
        lengths: (B,).
        x: (B, S, d).
    """
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
    """torch's layer with dropout rates of attention weights and inside the feed-forward part; None: `dropout`."""
    layer = nn.TransformerEncoderLayer(
        d_model, num_heads, ffn_dim, dropout, activation="relu", batch_first=True, norm_first=pre_norm
    )
    layer.self_attn.dropout = dropout if attention_dropout is None else attention_dropout
    layer.dropout.p = dropout if activation_dropout is None else activation_dropout
    return layer


class LayerMix(nn.Module):
    """sum_l softmax(w)_l h_l over the layers h_l of a pretrained model, without its mean over the utterance.

    The weighted sum is that of SUPERB (Yang et al. 2021, section 2) and of S3PRL's featurizer: one number w_l for each
    layer, all zero at first, so that it begins as the mean of the layers. Taking the mean over the utterance off is
    ESPnet's `UtteranceMVN` with its defaults. Both stand in the front end of the MTLA paper's AMI recipe, where they
    are computed in float32 whatever the precision of the model.

    Args:
        num_layers: L, the pretrained model's layers and the input of the first one.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_layers))

    def shares(self) -> Tensor:
        """The share of each layer, (L,), which add up to 1."""
        return self.weights.softmax(0)

    def forward(self, layers: Tensor, lengths: Tensor) -> Tensor:
        """Features (B, S, L, F) and their lengths (B,) -> (B, S, F), zeros after the end of a row."""
        with torch.autocast(layers.device.type, enabled=False):
            wide = torch.promote_types(self.weights.dtype, torch.float32)
            shares = self.shares().to(wide).expand(*layers.shape[:2], 1, -1)
            mixed = blank(shares, lengths) @ layers.to(wide)  # without a copy of the layers, whose padding may be NaN
            mixed = blank(mixed.squeeze(2), lengths)
            mean = mixed.sum(1, keepdim=True) / lengths.view(-1, 1, 1)
            return blank(mixed - mean, lengths).to(layers.dtype)


class ConvSubsampler(nn.Module):
    """One 1-D convolution of stride 2 per kernel size, each halved in width by a gated linear unit.

    Args:
        channels: of all convolutions but the last, before the gated linear unit.
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
        """(B, S, F), (B,) -> (B, S', d), (B,). Padding is set to zero between the layers, so that no row reads it."""
        x = x.transpose(1, 2)
        for conv in self.convs:
            x = F.glu(conv(x), dim=1)
            lengths = (lengths - 1) // 2 + 1
            x = blank(x.transpose(1, 2), lengths).transpose(1, 2)
        return x.transpose(1, 2), lengths


class FrontEnd(nn.Module):
    """What the speech encoders do with features before the convolutions.

    Args:
        projection_dim: width of a linear layer and LayerNorm over the features; None: there are none.
        mix_layers: layers of a pretrained model that the features have, which are mixed with learned weights; None: the
            features are of one layer.
    """

    def __init__(self, num_mels: int, projection_dim: int | None, mix_layers: int | None) -> None:
        super().__init__()
        self.project: nn.Module = nn.Identity()
        if projection_dim is not None:
            self.project = nn.Sequential(nn.Linear(num_mels, projection_dim), nn.LayerNorm(projection_dim))
        self.mix = None if mix_layers is None else LayerMix(mix_layers)
        self.width = projection_dim or num_mels

    def prepared(self, features: Tensor, lengths: Tensor) -> Tensor:
        """(B, S, F), or (B, S, L, F) with `mix_layers`, and (B,) -> (B, S, width), zeros after the end of a row."""
        features = blank(features, lengths) if self.mix is None else self.mix(features, lengths)
        return blank(self.project(features), lengths)


class SpeechEncoder(FrontEnd):
    """Features -> states of width d: fairseq's `s2t_transformer` as the MTLA recipes use it.

    Args:
        conv_channels: between the convolutions of the subsampler.
        conv_kernels: one for each convolution of stride 2; None: [5, 5].
        dropout: of embeddings and after each part of a layer.
        attention_dropout, activation_dropout: of attention weights and inside feed-forward parts; None: `dropout`.
        projection_dim: wide features first go through a linear layer of this width and LayerNorm (AMI's WavLM
            features); None: they do not.
        mix_layers: layers of a pretrained model in each frame, which are mixed with learned weights before that (see
            :class:`LayerMix`); None: a frame is of one layer.
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
        super().__init__(num_mels, projection_dim, mix_layers)
        self.scale = math.sqrt(d_model)
        self.subsample = ConvSubsampler(self.width, conv_channels, d_model, list(conv_kernels or [5, 5]))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            encoder_layer(d_model, num_heads, ffn_dim, dropout, True, attention_dropout, activation_dropout)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, F), or (B, S, L, F) with `mix_layers`, and (B,) -> (B, S', d), (B,)."""
        x, lengths = self.subsample(self.prepared(features, lengths), lengths)
        x = self.dropout(self.scale * x + sinusoidal_positions(x.shape[1], x.shape[2], x))
        _, bias = padding_mask(lengths, x)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=bias)
        return self.norm(x), lengths
