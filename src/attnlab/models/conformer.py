"""Conformer encoder: feed-forward, attention, convolution, feed-forward in each layer."""

from typing import Annotated

import torch
from annotated_types import MinLen
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F

from attnlab.config.bounds import Layers, Rate, Size
from attnlab.models.encoder import FrontEnd, padding_mask


class FeedForward(nn.Sequential):
    """LayerNorm, then two linear layers with SiLU between and dropout after each: (..., d) -> (..., d)."""

    def __init__(self, d_model: int, ffn_dim: int, dropout: float, activation_dropout: float) -> None:
        super().__init__(
            nn.LayerNorm(d_model), nn.Linear(d_model, ffn_dim), nn.SiLU(), nn.Dropout(activation_dropout),
            nn.Linear(ffn_dim, d_model), nn.Dropout(dropout),
        )  # fmt: skip


class MaskedBatchNorm(nn.BatchNorm1d):
    """BatchNorm over the real positions of padded rows. Padding becomes zero.

    Equivalent to `nn.BatchNorm1d` over the real positions, without the synchronisation that selecting them would need.

    Args: those of `nn.BatchNorm1d`; `momentum` is a number.

    Attributes:
        shared: whether statistics are computed over all processes, each of which has a part of the batch.
        idle: with `shared`, whether to exclude the part of this process.
    """

    shared = False
    idle = False

    def forward(self, x: Tensor, real: Tensor) -> Tensor:  # type: ignore[override]  # torch's has no mask
        """(B, S, d), (B, S) bool, false at padding -> (B, S, d)."""
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        wide, weight = x.to(torch.promote_types(x.dtype, torch.float32)), real.unsqueeze(-1)
        wide = wide.where(weight, 0.0)
        if self.training:
            counted = torch.zeros_like(weight) if self.idle else weight
            count = self._over_parts(counted.sum())
            mean = self._over_parts(wide.where(counted, 0.0).sum((0, 1))) / count
            variance = self._over_parts((wide - mean).where(counted, 0.0).square().sum((0, 1))) / count
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
        else:
            mean, variance = self.running_mean, self.running_var
        out = (wide - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias
        return out.where(weight, 0.0).to(x.dtype)

    def _over_parts(self, value: Tensor) -> Tensor:
        """Sum a value and its gradient over all processes, if they share the batch."""
        return all_reduce(value) if self.shared else value


class ConvolutionModule(nn.Module):
    """LayerNorm, pointwise with GLU, depthwise, BatchNorm, SiLU, pointwise; no biases.

    The depthwise convolution reads padding as zeros; BatchNorm excludes it from its statistics.

    Args:
        kernel: kernel size of the depthwise convolution, odd.

    ValueError: `kernel` is even.
    """

    def __init__(self, d_model: int, kernel: int, dropout: float) -> None:
        super().__init__()
        if kernel % 2 == 0:
            raise ValueError(f"kernel={kernel}: it must be odd, to be centred")
        self.norm = nn.LayerNorm(d_model)
        self.widen = nn.Linear(d_model, 2 * d_model, bias=False)
        self.depthwise = nn.Conv1d(d_model, d_model, kernel, padding=kernel // 2, groups=d_model, bias=False)
        self.batch_norm = MaskedBatchNorm(d_model)
        self.mix = nn.Linear(d_model, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """(B, S, d), (B, S) bool, false at padding -> (B, S, d)."""
        x = F.glu(self.widen(self.norm(x)), dim=-1).where(real.unsqueeze(-1), 0.0)
        x = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        return self.dropout(self.mix(F.silu(self.batch_norm(x, real))))


class ConformerLayer(nn.Module):
    """x + FFN/2, + attention, + convolution, + FFN/2, LayerNorm (Gulati et al. 2020, figure 1)."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        ffn_dim: int,
        kernel: int,
        dropout: float,
        attention_dropout: float,
        activation_dropout: float,
    ) -> None:
        super().__init__()
        self.first, self.second = (FeedForward(d_model, ffn_dim, dropout, activation_dropout) for _ in range(2))
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads, attention_dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.convolution = ConvolutionModule(d_model, kernel, dropout)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, real: Tensor, bias: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        h = self.attention_norm(x)
        x = x + self.dropout(self.attention(h, h, h, key_padding_mask=bias, need_weights=False)[0])
        x = x + self.convolution(x, real)
        return self.norm(x + 0.5 * self.second(x))


class ConformerEncoder(FrontEnd):
    """Filter bank -> states of width d: fairseq's `s2t_conformer` with absolute positions, as in MTLA's recipe.

    Args:
        kernel: kernel size of the depthwise convolutions, odd.
        conv_kernels: kernel size of each convolution of stride 2; None: [5].
        dropout, attention_dropout, activation_dropout, projection_dim, mix_layers: as in :class:`SpeechEncoder`.
    """

    def __init__(
        self,
        d_model: Size,
        num_mels: Size = 80,
        num_layers: Layers = 12,
        num_heads: Size = 8,
        ffn_dim: Size = 2048,
        kernel: Size = 31,
        conv_channels: Size = 1024,
        conv_kernels: Annotated[list[Size], MinLen(1)] | None = None,
        dropout: Rate = 0.0,
        attention_dropout: Rate | None = None,
        activation_dropout: Rate | None = None,
        projection_dim: Size | None = None,
        mix_layers: Layers | None = None,
    ) -> None:
        super().__init__(d_model, num_mels, conv_channels, list(conv_kernels or [5]), projection_dim, mix_layers)
        self.linear = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)
        rates = [dropout if rate is None else rate for rate in (None, attention_dropout, activation_dropout)]
        self.layers = nn.ModuleList(
            ConformerLayer(d_model, num_heads, ffn_dim, kernel, *rates) for _ in range(num_layers)
        )

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, F), or (B, S, L, F) with `mix_layers`, and (B,) -> (B, S', d), (B,)."""
        x, lengths = self.embed(features, lengths)
        x = self.dropout(self.linear(x))
        real, bias = padding_mask(lengths, x)
        for layer in self.layers:
            x = layer(x, real, bias)
        return x, lengths
