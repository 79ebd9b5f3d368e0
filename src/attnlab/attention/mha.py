"""Multi-head attention and its forms with fewer key-value heads."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Attention, Cache, begin_prefix, check_room, length_mask, rows_of, rows_per_prefix
from .ops.decode import attend_cached
from .ops.partial_softmax import Past, merged_attention
from .ops.rope import rotary_table, rotate


class MHACache(Cache):
    """Rotated keys and values: text (B, G, capacity, D), prefixes (N, G, prefix_capacity, D)."""

    def __init__(
        self, attention: "MHA", batch: int, capacity: int, prefix_capacity: int, beam: int, like: Tensor
    ) -> None:
        heads, width = attention.num_kv_heads, attention.head_dim
        self.length, self.beam, self.capacity = 0, beam, capacity
        self.key, self.value = (like.new_zeros(batch, heads, capacity, width) for _ in "kv")
        self.prefix_key, self.prefix_value = (
            like.new_zeros(batch // beam, heads, prefix_capacity, width) for _ in "kv"
        )
        self.prefix_size = 0
        self.prefix_lengths: Tensor | None = None  # set where prefixes differ in length
        self.prefix_mask: Tensor | None = None
        positions = prefix_capacity + capacity
        self.cos, self.sin = rotary_table(width, attention.rope_theta, positions, like.dtype, like.device)

    def buffers(self) -> list[Tensor]:
        return [self.key, self.value, self.prefix_key, self.prefix_value]

    def reorder(self, rows: Tensor) -> None:
        self.key[:, :, : self.length] = self.key[rows, :, : self.length]
        self.value[:, :, : self.length] = self.value[rows, :, : self.length]

    def select(self, prefixes: Tensor) -> None:
        rows = rows_of(prefixes, self.beam)
        self.key, self.value = self.key[rows], self.value[rows]
        self.prefix_key, self.prefix_value = self.prefix_key[prefixes], self.prefix_value[prefixes]
        if self.prefix_lengths is not None and self.prefix_mask is not None:
            self.prefix_lengths, self.prefix_mask = self.prefix_lengths[prefixes], self.prefix_mask[prefixes]

    def crop(self, length: int) -> None:
        self._check_crop(length)
        self.length = length

    def angles(self, new: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the next `new` positions, (B or 1, 1, new, D/2)."""
        start = self.length
        if self.prefix_lengths is None:
            span = slice(self.prefix_size + start, self.prefix_size + start + new)
            return self.cos[None, None, span], self.sin[None, None, span]
        lengths = self.prefix_lengths.repeat_interleave(self.beam)
        positions = (lengths + start)[:, None, None] + torch.arange(new, device=lengths.device)
        return self.cos[positions], self.sin[positions]


class MHA(Attention):
    """softmax(q k^T / sqrt(D)) v with rotary queries and keys; query head h reads key-value head floor(h G / H).

    G = H is multi-head, 1 < G < H grouped-query, G = 1 multi-query attention.  MTLA paper, section 3; the biases
    are those of its released code.  Cache: 2 G D elements per token.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads: {num_kv_heads} does not divide {num_heads}")
        head_dim = d_model // num_heads if head_dim is None else head_dim
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary pairs, not {head_dim}")
        self.d_model, self.num_heads, self.num_kv_heads, self.head_dim = d_model, num_heads, num_kv_heads, head_dim
        self.dropout, self.rope_theta, self.scale = dropout, rope_theta, head_dim**-0.5
        self.query = nn.Linear(d_model, num_heads * head_dim, bias=bias)
        self.key = nn.Linear(d_model, num_kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(d_model, num_kv_heads * head_dim, bias=bias)
        self.out = nn.Linear(num_heads * head_dim, d_model, bias=bias)

    def _heads(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _pack(self, key: Tensor, value: Tensor) -> Tensor:
        """(B, G, S, D) each -> [value | key] for every query head, (B, S, H, 2 D)."""
        both = torch.cat((value, key), -1).transpose(1, 2)
        group = self.num_heads // self.num_kv_heads
        return both if group == 1 else both.repeat_interleave(group, dim=2)

    def _join(self, out_bhtd: Tensor) -> Tensor:
        return self.out(out_bhtd.transpose(1, 2).flatten(2))

    def forward(
        self,
        x: Tensor,
        prefix: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (self._heads(x, linear) for linear in (self.query, self.key, self.value))
        steps, start = x.shape[1], 0 if prefix is None else prefix.shape[1]
        cos, sin = rotary_table(self.head_dim, self.rope_theta, start + steps, x.dtype, x.device)
        if prefix is None:
            at = (cos, sin)
        elif prefix_lengths is None:
            at = (cos[start:], sin[start:])
        else:
            positions = prefix_lengths[:, None, None] + torch.arange(steps, device=x.device)
            at = (cos[positions], sin[positions])
        q, k = rotate(q, *at), rotate(k, *at)
        dropout = self.dropout if self.training else 0.0
        if prefix is None or not start:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=self.num_kv_heads < self.num_heads
            )
            return self._join(out)
        kp, vp = self._heads(prefix, self.key), self._heads(prefix, self.value)
        kp = rotate(kp, cos[:start], sin[:start])
        mask = None if prefix_lengths is None else length_mask(prefix_lengths, start)
        return self._attend(q, self._pack(k, v), [Past(self._pack(kp, vp), mask)], dropout)

    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        """(B, S, d), (B,) -> (B, S, d): every position sees all of its row."""
        cos, sin = rotary_table(self.head_dim, self.rope_theta, x.shape[1], x.dtype, x.device)
        q, k, v = (self._heads(x, linear) for linear in (self.query, self.key, self.value))
        mask = length_mask(lengths, x.shape[1])[:, None, None]
        dropout = self.dropout if self.training else 0.0
        grouped = self.num_kv_heads < self.num_heads
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, mask, dropout, enable_gqa=grouped
        )
        return self._join(out)

    def _attend(self, q_bhtd: Tensor, packed: Tensor, past: list[Past], dropout: float = 0.0) -> Tensor:
        out = merged_attention(q_bhtd.transpose(1, 2), packed, self.head_dim, self.scale, past=past, dropout=dropout)
        return self.out(out.flatten(2))

    def new_cache(
        self,
        batch: int,
        capacity: int,
        prefix_capacity: int = 0,
        *,
        prefix_batch: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> MHACache:
        like = self.out.weight.new_empty(0, dtype=dtype, device=device)
        return MHACache(self, batch, capacity, prefix_capacity, rows_per_prefix(batch, prefix_batch), like)

    @torch.no_grad()
    def read_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        assert isinstance(cache, MHACache)
        size = prefix.shape[1]
        begin_prefix(cache, size, cache.prefix_key.shape[2])
        cache.prefix_key[:, :, :size] = rotate(self._heads(prefix, self.key), cache.cos[:size], cache.sin[:size])
        cache.prefix_value[:, :, :size] = self._heads(prefix, self.value)
        cache.prefix_size = size
        if prefix_lengths is not None and bool((prefix_lengths != size).any()):
            cache.prefix_lengths, cache.prefix_mask = prefix_lengths, length_mask(prefix_lengths, size)

    @torch.no_grad()
    def extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, MHACache)
        new, start, size = x.shape[1], cache.length, cache.prefix_size
        check_room(cache, new, cache.capacity)
        q, k, v = (self._heads(x, linear) for linear in (self.query, self.key, self.value))
        at = cache.angles(new)
        q, k = rotate(q, *at), rotate(k, *at)
        cache.key[:, :, start : start + new] = k
        cache.value[:, :, start : start + new] = v
        cache.length = start + new
        if new == 1:
            seen = slice(0, start + 1)
            out = attend_cached(
                q, cache.key[:, :, seen], cache.value[:, :, seen], self.scale,
                cache.prefix_key[:, :, :size], cache.prefix_value[:, :, :size], cache.prefix_mask,
            )  # fmt: skip
            return self._join(out.to(q.dtype))
        past = []
        if start:
            past.append(Past(self._pack(cache.key[:, :, :start], cache.value[:, :, :start])))
        if size:
            prefix = self._pack(cache.prefix_key[:, :, :size], cache.prefix_value[:, :, :size])
            past.append(Past(prefix, cache.prefix_mask))
        return self._attend(q, self._pack(k, v), past)

    @property
    def cache_elements_per_token(self) -> float:
        return 2.0 * self.num_kv_heads * self.head_dim

    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        prefixes = batch // rows_per_prefix(batch, prefix_batch)
        return 2 * self.num_kv_heads * self.head_dim * (batch * capacity + prefixes * prefix_capacity)

    def multiply_adds(self, context: int) -> int:
        projections = 2 * self.d_model * (self.num_heads + self.num_kv_heads) * self.head_dim
        return projections + 2 * context * self.num_heads * self.head_dim
