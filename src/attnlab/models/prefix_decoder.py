"""Decoder of the MTLA paper, which reads the encoder's output as a prefix of keys and values in every layer."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from attnlab.attention import Attention, Cache
from attnlab.attention.ops.native import product
from attnlab.config.bounds import Layers, Rate, Size
from attnlab.models.decoder import PostNormBlock
from attnlab.models.language_model import Layered, linear_weights


class PrefixDecoderLayer(PostNormBlock):
    """h = LN1(x);  u = LN1(x + drop(attention(h, prefix)));  z = LN2(u + drop(W2 drop(relu(W1 u)))).

    LN1 is used twice, as in the released system. The attention reads the prefix as extra keys and values.
    """

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        return super().forward(x, lambda x: attend(self.norm1(x)))

    def parallel(self, prefix: Tensor, prefix_lengths: Tensor | None) -> list[Callable[[Tensor], Tensor]]:
        """Attention functions of the parallel form: prefix (B, S, d), lengths (B,) or None."""
        return [partial(self.attention, prefix=prefix, prefix_lengths=prefix_lengths)]

    def start(
        self, prefix: Tensor, prefix_lengths: Tensor | None, beam: int, capacity: int, dtype: torch.dtype | None
    ) -> list[Cache]:
        """Caches of the layer, see `TextDecoder.start`."""
        sentences, size = prefix.shape[:2]
        cache = self.attention.new_cache(
            sentences * beam, capacity, size, prefix_batch=sentences, dtype=dtype, device=prefix.device
        )
        self.attention.read_prefix(prefix, prefix_lengths, cache)
        return [cache]

    def cached(self, cache: Cache) -> list[Callable[[Tensor], Tensor]]:
        """Attention functions of the cached form."""
        return [partial(self.attention.extend, cache=cache)]

    def cache_bytes(self, rows: int, capacity: int, prefix: int, sentences: int, dtype: torch.dtype) -> int:
        return self.attention.cache_bytes(rows, capacity, prefix, sentences, dtype=dtype)

    def multiply_adds(self, context: int, prefix: int) -> int:
        """Multiply-adds of the attentions of a step."""
        return self.attention.multiply_adds(context, prefix)


def projector(d_model: int, inner: int) -> nn.Sequential:
    """Two linear layers with ReLU, applied to an encoder's output: (..., d) -> (..., d)."""
    return nn.Sequential(nn.Linear(d_model, inner), nn.ReLU(), nn.Linear(inner, d_model))


class TextDecoder(Layered):
    """Base of decoders of text after an encoder's output, the prefix; in parallel or with caches."""

    embedding: nn.Embedding
    unembedding: nn.Linear | None  # None: the embedding is the output matrix
    projector: nn.Module  # applied to the prefix
    norm: nn.Module
    dropout: nn.Module

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.scale = math.sqrt(d_model)

    def cache_bytes(self, rows: int, capacity: int, prefix: int, sentences: int, *, dtype: torch.dtype) -> int:
        """Bytes of all caches for `rows` hypotheses of `capacity` tokens after `sentences` prefixes."""
        return sum(layer.cache_bytes(rows, capacity, prefix, sentences, dtype) for layer in self.blocks)

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        """Multiply-adds of one cached step of one row at `context` positions, `prefix` of them in the prefix.

        Includes the output layer, and excludes the cost of the prefix, which is incurred once per sentence.
        """
        layers = sum(layer.multiply_adds(context, prefix) + linear_weights(layer) for layer in self.blocks)
        return layers + self.embedding.weight.numel()

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
        """Caches for `beam` rows of `capacity` tokens per sentence, whose prefix (N, S, d) is stored once."""
        prefix = self.projector(prefix)
        caches = [layer.start(prefix, prefix_lengths, beam, capacity, dtype) for layer in self.blocks]
        return [cache for caches_of_layer in caches for cache in caches_of_layer]

    @torch.no_grad()
    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        """Next tokens (B, n) -> logits (B, n, V), using and updating the caches."""
        x = self.embed(tokens, caches[0].start)
        count = len(caches) // len(self.layers)
        for i, layer in enumerate(self.blocks):
            x = layer(x, *layer.cached(*caches[i * count : (i + 1) * count]))
        return self.logits(x)

    def embed(self, tokens: Tensor, start: int | Tensor) -> Tensor:
        """(B, T) -> (B, T, d), from position `start` on: an int, or (1,) of a static cache."""
        return self.scale * self.embedding(tokens)

    def forward(self, tokens: Tensor, prefix: Tensor, prefix_lengths: Tensor | None = None) -> Tensor:
        """tokens (B, T), prefix (B, S, d), lengths (B,) -> logits (B, T, V)."""
        return self.logits(self.hidden(tokens, prefix, prefix_lengths))

    def hidden(self, tokens: Tensor, prefix: Tensor, prefix_lengths: Tensor | None = None) -> Tensor:
        """As :meth:`forward`, but returns the states before the last norm, (B, T, d)."""
        prefix, x = self.projector(prefix), self.dropout(self.embed(tokens, 0))
        for layer in self.blocks:
            x = layer(x, *layer.parallel(prefix, prefix_lengths))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., d) -> (..., V)."""
        matrix = self.embedding if self.unembedding is None else self.unembedding
        return product(self.norm(hidden), matrix.weight)


class PrefixDecoder(TextDecoder):
    """Text tokens after a prefix -> logits (MTLA paper, section 5, as in its released system).

    Args:
        attention: called with the index of a layer, returns its mechanism.
        projector_dim: inner width of the two linear layers that are applied to the prefix.
        dropout: dropout of the output of each sublayer.
        embedding_dropout: dropout of embeddings; None: `dropout`.
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
