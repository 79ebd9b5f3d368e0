"""The Transformer's decoder with cross-attention, with the cache interface of the prefix decoder."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.attention import Attention, Cache
from attnlab.attention.base import blank, length_mask
from attnlab.attention.ops.backends import dense_attention
from attnlab.attention.ops.decode import attend_cached
from attnlab.config.bounds import Layers, Rate, Size
from attnlab.models.encoder import padded_embedding, sinusoidal_positions
from attnlab.models.prefix_decoder import TextDecoder, projector


class CrossCache(Cache):
    """Keys and values of each prefix, shared by its rows.

    Args:
        key: (N, H, S, D).
        value: (N, H, S, D).
        mask: (N, S) bool, true where a position of the prefix exists; None: all exist.
    """

    def __init__(self, key: Tensor, value: Tensor, mask: Tensor | None, beam: int) -> None:
        self.length, self.beam, self.key, self.value, self.mask = 0, beam, key, value, mask

    def buffers(self) -> list[Tensor]:
        return [self.key, self.value]

    def reorder(self, rows: Tensor) -> None:
        pass  # rows of a sentence share its prefix

    def select(self, prefixes: Tensor) -> None:
        self.key, self.value = self.key[prefixes], self.value[prefixes]
        self.mask = None if self.mask is None else self.mask[prefixes]

    def crop(self, length: int) -> None:
        """Without effect: the cache contains no text."""

    def make_static(self) -> None:
        """Without effect: no shape depends on the length."""

    @property
    def can_be_static(self) -> bool:
        return True

    @property
    def is_static(self) -> bool:
        return True


class CrossAttention(nn.Module):
    """Multi-head attention of text to the encoder's output (Vaswani et al. 2017, section 3.2.3).

    ValueError: `num_heads` does not divide `d_model`.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if d_model % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide d_model={d_model}")
        self.num_heads, self.dropout, self.scale = num_heads, dropout, (d_model // num_heads) ** -0.5
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, prefix: Tensor, prefix_lengths: Tensor | None) -> Tensor:
        """(B, T, d), (B, S, d), (B,) -> (B, T, d)."""
        prefix = blank(prefix, prefix_lengths)
        q, k, v = self._heads(self.query(x)), self._heads(self.key(prefix)), self._heads(self.value(prefix))
        mask = None if prefix_lengths is None else length_mask(prefix_lengths, prefix.shape[1])[:, None, None]
        out = dense_attention(q, k, v, mask, dropout=self.dropout if self.training else 0.0)
        return self.out(out.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def start(self, prefix: Tensor, prefix_lengths: Tensor | None, beam: int, dtype: torch.dtype | None) -> CrossCache:
        """Keys and values of prefixes (N, S, d), each shared by `beam` rows."""
        mask = None if prefix_lengths is None else length_mask(prefix_lengths, prefix.shape[1])
        prefix = blank(prefix, prefix_lengths)
        key, value = (self._heads(f(prefix)).to(dtype or prefix.dtype) for f in (self.key, self.value))
        return CrossCache(key, value, mask, beam)

    @torch.no_grad()
    def extend(self, x: Tensor, cache: CrossCache) -> Tensor:
        """(B, n, d) -> (B, n, d), with rows grouped by prefix."""
        steps = x.shape[1]
        q = self._heads(self.query(x)).transpose(1, 2).flatten(0, 1).unsqueeze(2)  # (B n, H, 1, D): rows of one prefix
        text = q.new_empty(q.shape[0], self.num_heads, 0, q.shape[-1], dtype=cache.key.dtype)
        beam = cache.beam * steps
        out = attend_cached(q, text, text, self.scale, cache.key, cache.value, cache.mask, beam=beam)
        return self.out(out.to(x.dtype).squeeze(2).flatten(1).unflatten(0, (-1, steps)))


class CrossDecoderLayer(nn.Module):
    """Self-attention, cross-attention, ReLU feed-forward; LayerNorm after each, or before with `pre_norm`.

    Args:
        dropout: dropout of each sublayer's output.
        attention_dropout: dropout of cross-attention weights.
        activation_dropout: dropout after the ReLU; None: `dropout`.
    """

    def __init__(
        self,
        attention: Attention,
        num_heads: int,
        ffn_dim: int,
        dropout: float,
        pre_norm: bool,
        attention_dropout: float = 0.0,
        activation_dropout: float | None = None,
    ) -> None:
        super().__init__()
        d_model = attention.d_model
        self.attention, self.pre_norm = attention, pre_norm
        self.cross = CrossAttention(d_model, num_heads, attention_dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(3))
        self.up, self.down = nn.Linear(d_model, ffn_dim), nn.Linear(ffn_dim, d_model)
        self.dropout = nn.Dropout(dropout)
        self.activation_dropout = nn.Dropout(dropout if activation_dropout is None else activation_dropout)

    def parallel(self, prefix: Tensor, prefix_lengths: Tensor | None) -> list[Callable[[Tensor], Tensor]]:
        """Attention functions of the parallel form: prefix (B, S, d), lengths (B,) or None."""
        return [self.attention, partial(self.cross, prefix=prefix, prefix_lengths=prefix_lengths)]

    def start(
        self, prefix: Tensor, prefix_lengths: Tensor | None, beam: int, capacity: int, dtype: torch.dtype | None
    ) -> list[Cache]:
        """Two caches: for the text of each row, and for the prefix (N, S, d) of each sentence."""
        sentences, device = prefix.shape[0], prefix.device
        text = self.attention.new_cache(sentences * beam, capacity, prefix_batch=sentences, dtype=dtype, device=device)
        return [text, self.cross.start(prefix, prefix_lengths, beam, dtype)]

    def cached(self, text: Cache, cross: CrossCache) -> list[Callable[[Tensor], Tensor]]:
        """Attention functions of the cached form."""
        return [partial(self.attention.extend, cache=text), partial(self.cross.extend, cache=cross)]

    def cache_bytes(self, rows: int, capacity: int, prefix: int, sentences: int, dtype: torch.dtype) -> int:
        text = self.attention.cache_bytes(rows, capacity, dtype=dtype)
        return text + dtype.itemsize * 2 * self.attention.d_model * sentences * prefix

    def multiply_adds(self, context: int, prefix: int) -> int:
        """Multiply-adds of the attentions of a step. Keys and values of the prefix are computed once per sentence."""
        cross = self.cross.query.weight.numel() + self.cross.out.weight.numel() + 2 * prefix * self.attention.d_model
        return self.attention.multiply_adds(context - prefix) + cross

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor], cross: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, d); `attend`, `cross`: attention functions of the parallel or the cached form."""
        for norm, part in zip(self.norms, (attend, cross, self._feed), strict=True):
            x = x + self.dropout(part(norm(x))) if self.pre_norm else norm(x + self.dropout(part(x)))
        return x

    def _feed(self, x: Tensor) -> Tensor:
        return self.down(self.activation_dropout(F.relu(self.up(x))))


class CrossDecoder(TextDecoder):
    """Text tokens and an encoder's output -> logits (Vaswani et al. 2017).

    With `pre_norm` and without `tie_embeddings` it is the decoder of fairseq's `s2t_transformer`, with which the MTLA
    paper's recipe trains recognition before translation. It also takes the arguments of :class:`PrefixDecoder`, so that
    the two are interchangeable.

    Args:
        attention: called with the index of a layer, returns its mechanism.
        dropout: dropout of embeddings and of each sublayer's output.
        pre_norm: LayerNorm before each sublayer, and once at the end; else after each sublayer.
        final_norm: LayerNorm after the last layer; None: as `pre_norm`.
        projector_dim: inner width of two linear layers applied to the encoder's output; None: no projector.
        attention_dropout: dropout of cross-attention weights.
        activation_dropout: dropout of feed-forward activations; None: `dropout`.
    """

    def __init__(
        self,
        vocab_size: Size,
        d_model: Size,
        attention: Callable[[int], Attention],
        num_layers: Layers = 6,
        num_heads: Size = 8,
        ffn_dim: Size = 2048,
        dropout: Rate = 0.0,
        pre_norm: bool = False,
        pad: int = 1,
        tie_embeddings: bool = True,
        final_norm: bool | None = None,
        projector_dim: Size | None = None,
        attention_dropout: Rate = 0.0,
        activation_dropout: Rate | None = None,
    ) -> None:
        super().__init__(d_model)
        self.embedding = padded_embedding(vocab_size, d_model, pad)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            CrossDecoderLayer(
                attention(i), num_heads, ffn_dim, dropout, pre_norm, attention_dropout, activation_dropout
            )
            for i in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model) if (pre_norm if final_norm is None else final_norm) else nn.Identity()
        self.projector = projector(d_model, projector_dim) if projector_dim else nn.Identity()
        self.unembedding = None if tie_embeddings else nn.Linear(d_model, vocab_size, bias=False)
        if self.unembedding is not None:
            nn.init.normal_(self.unembedding.weight, std=d_model**-0.5)

    def embed(self, tokens: Tensor, start: int | Tensor) -> Tensor:
        x = super().embed(tokens, start)
        if isinstance(start, Tensor):
            return x + sinusoidal_positions(start, x.shape[2], x)
        return x + sinusoidal_positions(start + x.shape[1], x.shape[2], x)[start:]
