"""Text encoder: a Transformer with standard self-attention or the encoder form of any mechanism."""

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.config.bounds import Layers, Rate, Size
from attnlab.models.decoder import PostNormBlock
from attnlab.models.encoder import encoder_layer, padded_embedding, padding_mask, sinusoidal_positions


class TextEncoderLayer(PostNormBlock):
    """Self-attention without a causal mask and ReLU feed-forward; LayerNorm after each, or before with `pre_norm`."""

    def __init__(self, attention: Attention, ffn_dim: int, dropout: float, pre_norm: bool) -> None:
        super().__init__(attention, ffn_dim, dropout)
        self.pre_norm = pre_norm

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]  # calls `encode` itself
        attend = partial(self.attention.encode, lengths=lengths)
        if not self.pre_norm:
            return super().forward(x, attend)
        x = x + self.dropout(attend(self.norm1(x)))
        return x + self.feed(self.norm2(x))


class TextEncoder(nn.Module):
    """Source pieces -> states of width d.

    Args:
        num_heads: number of heads, if `attention` is None.
        dropout: dropout of embeddings and in each layer.
        attention_dropout: dropout of attention weights, if `attention` is None.
        activation_dropout: dropout of feed-forward activations, if `attention` is None.
        pre_norm: LayerNorm before each sublayer, and once at the end; else after each sublayer, as published.
        attention: called with the index of a layer, returns its mechanism; None: `nn.MultiheadAttention`.
    """

    def __init__(
        self,
        vocab_size: Size,
        d_model: Size,
        num_layers: Layers = 6,
        num_heads: Size = 8,
        ffn_dim: Size = 2048,
        dropout: Rate = 0.0,
        attention_dropout: Rate = 0.0,
        activation_dropout: Rate = 0.0,
        pre_norm: bool = False,
        pad: int = 1,
        attention: Callable[[int], Attention] | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.mechanism = math.sqrt(d_model), attention is not None
        self.embedding = padded_embedding(vocab_size, d_model, pad)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            encoder_layer(d_model, num_heads, ffn_dim, dropout, pre_norm, attention_dropout, activation_dropout)
            if attention is None
            else TextEncoderLayer(attention(i), ffn_dim, dropout, pre_norm)
            for i in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model) if pre_norm else nn.Identity()

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S), (B,) -> (B, S, d), (B,)."""
        x = self.scale * self.embedding(tokens)
        x = self.dropout(x + sinusoidal_positions(x.shape[1], x.shape[2], x))
        _, bias = padding_mask(lengths, x)
        for layer in self.layers:
            x = layer(x, lengths) if self.mechanism else layer(x, src_key_padding_mask=bias)
        return self.norm(x), lengths
