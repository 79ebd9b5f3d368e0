"""The MTLA paper's decoder-only translator: the encoder's output is a prefix of keys and values in every layer."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.attention import Attention, Cache
from attnlab.config.bounds import Layers, Rate, Size
from attnlab.models.language_model import linear_weights


class PrefixDecoderLayer(nn.Module):
    """h = LN1(x);  u = LN1(x + drop(attention(h, prefix)));  z = LN2(u + drop(W2 drop(relu(W1 u)))).

    LN1 is used twice, as in the released system.

    Args:
        attention: reads the prefix as extra keys and values.
        dropout: of both parts' outputs, in training.
        activation_dropout: after the ReLU, in training.
    """

    def __init__(self, attention: Attention, ffn_dim: int, dropout: float, activation_dropout: float) -> None:
        super().__init__()
        d_model = attention.d_model
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.up, self.down = nn.Linear(d_model, ffn_dim), nn.Linear(ffn_dim, d_model)
        self.dropout, self.activation_dropout = nn.Dropout(dropout), nn.Dropout(activation_dropout)

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, d); `attend` is the attention in its parallel or its cached form."""
        u = self.norm1(x + self.dropout(attend(self.norm1(x))))
        inner = self.activation_dropout(F.relu(self.up(u)))
        return self.norm2(u + self.dropout(self.down(inner)))


def projector(d_model: int, inner: int) -> nn.Sequential:
    """Two linear maps with ReLU between, through which an encoder's output goes: (..., d) -> (..., d).

    Args:
        d_model: width d of input and output.
        inner: the width between the maps.
    """
    return nn.Sequential(nn.Linear(d_model, inner), nn.ReLU(), nn.Linear(inner, d_model))


class TextDecoder(nn.Module):
    """Text tokens and an encoder's output, the prefix -> logits; in parallel, or through caches.

    Args:
        d_model: width d.
    """

    embedding: nn.Embedding
    unembedding: nn.Linear | None  # None: the embedding is the output matrix
    layers: nn.ModuleList
    projector: nn.Module  # of the prefix
    norm: nn.Module
    dropout: nn.Module

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.scale = math.sqrt(d_model)

    @property
    def blocks(self) -> list[Any]:
        return list(self.layers)

    @property
    def attentions(self) -> list[Attention]:
        """The mechanisms of the text, one per layer."""
        return [layer.attention for layer in self.blocks]

    def cache_bytes(self, rows: int, capacity: int, prefix: int, sentences: int, *, dtype: torch.dtype) -> int:
        """Of all caches of this dtype, for `rows` hypotheses of `capacity` tokens on `sentences` prefixes."""
        raise NotImplementedError

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        """Of one cached step of one row at `context` positions, `prefix` of them the prefix's; vocabulary included.

        What the prefix costs once per sentence does not count.
        """
        raise NotImplementedError

    def attend(self, layer: Any, prefix: Tensor, prefix_lengths: Tensor | None) -> list[Callable[[Tensor], Tensor]]:
        """The attentions of a layer in their parallel form.

        Args:
            prefix: projected, (B, S, d).
            prefix_lengths: (B,); None: no padding.
        """
        raise NotImplementedError

    def start(
        self,
        prefix: Tensor,
        prefix_lengths: Tensor | None,
        beam: int,
        capacity: int,
        *,
        dtype: torch.dtype | None = None,
    ) -> list[Cache]:
        """Caches for `beam` rows of `capacity` tokens on each sentence, whose prefix (N, S, d) is stored once."""
        raise NotImplementedError

    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        """The next tokens (B, n) -> logits (B, n, V), through the caches."""
        raise NotImplementedError

    def embed(self, tokens: Tensor, start: int | Tensor) -> Tensor:
        """(B, T) -> (B, T, d), at positions from `start` on: an int, or (1,) of a static cache."""
        return self.scale * self.embedding(tokens)

    def forward(self, tokens: Tensor, prefix: Tensor, prefix_lengths: Tensor | None = None) -> Tensor:
        """tokens (B, T), prefix (B, S, d), lengths (B,) -> logits (B, T, V)."""
        return self.logits(self.hidden(tokens, prefix, prefix_lengths))

    def hidden(self, tokens: Tensor, prefix: Tensor, prefix_lengths: Tensor | None = None) -> Tensor:
        """As :meth:`forward`, the states before the last norm, (B, T, d)."""
        prefix, x = self.projector(prefix), self.dropout(self.embed(tokens, 0))
        for layer in self.blocks:
            x = layer(x, *self.attend(layer, prefix, prefix_lengths))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., d) -> (..., V)."""
        matrix = self.embedding if self.unembedding is None else self.unembedding
        return F.linear(self.norm(hidden), matrix.weight)


class PrefixDecoder(TextDecoder):
    """Text tokens after a prefix -> logits (MTLA paper, section 5, as its released system is built).

    Args:
        vocab_size: pieces V of the text.
        d_model: width d.
        attention: called with the number of a layer, returns its mechanism.
        ffn_dim: width of the feed-forward parts.
        projector_dim: inner width of the two linear maps through which the prefix goes.
        dropout: after each part of a layer.
        activation_dropout: inside feed-forward parts.
        tie_embeddings: whether input and output embeddings are one matrix.
        final_norm: LayerNorm after the last layer.
        embedding_dropout: of embeddings; None: `dropout`.
        pad: the id of padding, whose embedding is zero.
    """

    projector: nn.Sequential
    unembedding: nn.Linear

    def __init__(
        self,
        vocab_size: Size,
        d_model: Size,
        attention: Callable[[int], Attention],
        num_layers: Layers = 9,
        ffn_dim: Size = 2048,
        projector_dim: Size = 256,
        dropout: Rate = 0.0,
        activation_dropout: Rate = 0.0,
        tie_embeddings: bool = False,
        final_norm: bool = True,
        embedding_dropout: Rate | None = None,
        pad: int = 1,
    ) -> None:
        super().__init__(d_model)
        self.projector = projector(d_model, projector_dim)
        self.embedding = nn.Embedding(vocab_size, d_model, padding_idx=pad)
        self.dropout = nn.Dropout(dropout if embedding_dropout is None else embedding_dropout)
        self.layers = nn.ModuleList(
            PrefixDecoderLayer(attention(i), ffn_dim, dropout, activation_dropout) for i in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model) if final_norm else nn.Identity()
        self.unembedding = nn.Linear(d_model, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        nn.init.normal_(self.unembedding.weight, std=d_model**-0.5)
        with torch.no_grad():
            self.embedding.weight[pad].zero_()
        if tie_embeddings:
            self.unembedding.weight = self.embedding.weight

    def cache_bytes(self, rows: int, capacity: int, prefix: int, sentences: int, *, dtype: torch.dtype) -> int:
        return sum(a.cache_bytes(rows, capacity, prefix, sentences, dtype=dtype) for a in self.attentions)

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        layers = sum(layer.attention.multiply_adds(context, prefix) + linear_weights(layer) for layer in self.blocks)
        return layers + self.embedding.weight.numel()

    def attend(self, layer: Any, prefix: Tensor, prefix_lengths: Tensor | None) -> list[Callable[[Tensor], Tensor]]:
        return [partial(layer.attention, prefix=prefix, prefix_lengths=prefix_lengths)]

    @torch.no_grad()
    def start(
        self,
        prefix: Tensor,
        prefix_lengths: Tensor | None,
        beam: int,
        capacity: int,
        *,
        dtype: torch.dtype | None = None,
    ) -> list[Cache]:
        prefix = self.projector(prefix)
        sentences, size = prefix.shape[:2]
        caches = []
        for attention in self.attentions:
            cache = attention.new_cache(
                sentences * beam, capacity, size, prefix_batch=sentences, dtype=dtype, device=prefix.device
            )
            attention.read_prefix(prefix, prefix_lengths, cache)
            caches.append(cache)
        return caches

    @torch.no_grad()
    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        x = self.embed(tokens, 0)
        for layer, cache in zip(self.blocks, caches, strict=True):
            x = layer(x, partial(layer.attention.extend, cache=cache))
        return self.logits(x)
