"""Multi-head latent attention: one latent and one rotary key per position, shared by all heads."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Attention, Cache, begin_prefix, check_room, length_mask, rows_of, rows_per_prefix
from .ops.decode import attend_cached
from .ops.partial_softmax import Past, expand, expanded_attention
from .ops.rope import rotary_table, rotate


class LatentCache(Cache):
    """[latent | rotary key] of each slot: text (B, slots, r + d_r), prefixes (N, slots, r + d_r)."""

    def __init__(
        self, attention: "MLA", batch: int, capacity: int, prefix_capacity: int, beam: int, like: Tensor
    ) -> None:
        slots, prefix_slots = attention.slots(capacity, prefix_capacity)
        width = attention.latent_dim + attention.rope_dim
        self.length, self.beam, self.capacity, self.prefix_capacity = 0, beam, capacity, prefix_capacity
        self.text = like.new_zeros(batch, slots, width)
        self.prefix = like.new_zeros(batch // beam, prefix_slots, width)
        self.prefix_size = 0  # positions of the longest prefix
        self.prefix_lengths: Tensor | None = None  # set where prefixes differ in length
        self.prefix_mask: Tensor | None = None
        self.cos, self.sin = rotary_table(
            attention.rope_dim, attention.rope_theta, prefix_capacity + capacity, like.dtype, like.device
        )
        # Decoding works in latent space: queries go through U_k, read latents, and come back through U_v.
        up_key, up_value = attention.up_matrices()
        self.up_key = (up_key.detach() * attention.scale).to(like.dtype).contiguous()
        self.up_value = up_value.detach().mT.to(like.dtype).contiguous()

    def buffers(self) -> list[Tensor]:
        return [self.text, self.prefix]

    def reorder(self, rows: Tensor) -> None:
        used = self.used_slots()
        self.text[:, :used] = self.text[rows, :used]

    def used_slots(self) -> int:
        return self.length

    def select(self, prefixes: Tensor) -> None:
        self.text, self.prefix = self.text[rows_of(prefixes, self.beam)], self.prefix[prefixes]
        if self.prefix_lengths is not None and self.prefix_mask is not None:
            self.prefix_lengths, self.prefix_mask = self.prefix_lengths[prefixes], self.prefix_mask[prefixes]

    def crop(self, length: int) -> None:
        self._check_crop(length)
        self.length = length

    def angles(self, new: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the next `new` positions, (B or 1, new, d_r/2)."""
        start = self.length
        if self.prefix_lengths is None:
            span = slice(self.prefix_size + start, self.prefix_size + start + new)
            return self.cos[None, span], self.sin[None, span]
        lengths = self.prefix_lengths.repeat_interleave(self.beam)
        positions = (lengths + start)[:, None] + torch.arange(new, device=lengths.device)
        return self.cos[positions], self.sin[positions]


class MLA(Attention):
    """Multi-head latent attention (MTLA paper, section 3.2, after DeepSeek-V2), as the MTLA system computes it.

    c = LayerNorm(W_a x), kp = rotary(W_p x);  logits_ihj = (q^n_ih . U^k_h c_j + q^r_ih . kp_j) / sqrt(d_n + d_r);
    o_ih = U^v_h sum_j P_ihj c_j.  d_n = d_v = head_dim.  No biases but LayerNorm's.
    In parallel, keys and values are expanded per head; in a step, queries are taken into latent space instead.
    Cache: r + d_r elements per token.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None = None,
        rope_dim: int | None = None,
        latent_dim: int | None = None,
        *,
        dropout: float = 0.0,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        head_dim = d_model // num_heads if head_dim is None else head_dim
        rope_dim = head_dim // 2 if rope_dim is None else rope_dim
        if rope_dim % 2:
            raise ValueError(f"rope_dim must be even for rotary pairs, not {rope_dim}")
        self.d_model, self.num_heads, self.head_dim, self.rope_dim = d_model, num_heads, head_dim, rope_dim
        self.latent_dim = 4 * head_dim if latent_dim is None else latent_dim
        widest = head_dim * max(4, 2 * num_heads)
        if not 1 <= self.latent_dim <= widest:
            raise ValueError(
                f"latent_dim={self.latent_dim}: expected 1 to {widest}; keys and values of {num_heads} x {head_dim} "
                "together are no wider, and more would compress nothing"
            )
        self.dropout, self.rope_theta, self.scale = dropout, rope_theta, (head_dim + rope_dim) ** -0.5
        self.query: nn.Module = nn.Linear(d_model, num_heads * (head_dim + rope_dim), bias=False)
        self.down = nn.Linear(d_model, self.latent_dim + rope_dim, bias=False)
        self.norm: nn.Module = nn.LayerNorm(self.latent_dim)
        self.up = nn.Linear(self.latent_dim, num_heads * 2 * head_dim, bias=False)
        self.out = nn.Linear(num_heads * head_dim, d_model, bias=False)

    def up_matrices(self) -> tuple[Tensor, Tensor]:
        """U^k and U^v, (H, d_n, r) and (H, d_v, r)."""
        value, key = self.up.weight.unflatten(0, (self.num_heads, 2, self.head_dim)).unbind(1)
        return key, value

    def slots(self, capacity: int, prefix_capacity: int) -> tuple[int, int]:
        """Slots that so many text and prefix positions need."""
        return capacity, prefix_capacity

    def _queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, H, d_n + d_r), the last d_r rotated; cos, sin (B or 1, T, d_r/2)."""
        content, rotary = self.query(x).unflatten(-1, (self.num_heads, -1)).split([self.head_dim, self.rope_dim], -1)
        return torch.cat((content, rotate(rotary, cos.unsqueeze(-2), sin.unsqueeze(-2))), -1)

    def _latents(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, d) -> latents (B, T, r) and rotary keys (B, T, d_r)."""
        latent, rotary = self.down(x).split([self.latent_dim, self.rope_dim], -1)
        return self.norm(latent), rotate(rotary, cos, sin)

    def _expand(self, latent: Tensor, rotary: Tensor) -> Tensor:
        """Values and keys of each head, packed [value | content key | rotary key]: (B, T, H, d_v + d_n + d_r)."""
        return expand(latent, rotary, self._up())

    def _up(self) -> Tensor:
        """[U^v | U^k], (H, d_v + d_n, r)."""
        return self.up.weight.unflatten(0, (self.num_heads, 2 * self.head_dim))

    def _angles(self, x: Tensor, prefix: Tensor | None, prefix_lengths: Tensor | None) -> tuple[Tensor, ...]:
        """Tables of the text positions, (B or 1, T, d_r/2), and of the prefix's, (1, S, d_r/2)."""
        steps, start = x.shape[1], 0 if prefix is None else prefix.shape[1]
        cos, sin = rotary_table(self.rope_dim, self.rope_theta, start + steps, x.dtype, x.device)
        before = cos[None, :start], sin[None, :start]
        if prefix_lengths is None:
            return cos[None, start:], sin[None, start:], *before
        positions = prefix_lengths[:, None] + torch.arange(steps, device=x.device)
        return cos[positions], sin[positions], *before

    def forward(
        self,
        x: Tensor,
        prefix: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> Tensor:
        cos, sin, *before = self._angles(x, prefix, prefix_lengths)
        past = []
        if prefix is not None and prefix.shape[1]:
            mask = None if prefix_lengths is None else length_mask(prefix_lengths, prefix.shape[1])
            past.append(Past(self._expand(*self._latents(prefix, *before)), mask))
        latents = self._latents(x, cos, sin)
        return self._attend(self._queries(x, cos, sin), *latents, past, self.dropout if self.training else 0.0)

    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        """(B, S, d), (B,) -> (B, S, d): every position sees all of its row."""
        cos, sin = (t[None] for t in rotary_table(self.rope_dim, self.rope_theta, x.shape[1], x.dtype, x.device))
        packed, mask = self._slots_of(*self._latents(x, cos, sin), lengths)
        value, key = packed.transpose(1, 2).split([self.head_dim, self.head_dim + self.rope_dim], -1)
        q = self._queries(x, cos, sin).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, key, value, mask[:, None, None], dropout, scale=self.scale)
        return self.out(out.transpose(1, 2).flatten(2))

    def _slots_of(self, latent: Tensor, rotary: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """All that a row holds, packed as `_expand` does, and where there is a slot, (B, slots)."""
        return self._expand(latent, rotary), length_mask(lengths, latent.shape[1])

    def _attend(self, q: Tensor, latent: Tensor, rotary: Tensor, past: list[Past], dropout: float = 0.0) -> Tensor:
        out = expanded_attention(q, latent, rotary, self._up(), self.head_dim, self.scale, past=past, dropout=dropout)
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
    ) -> LatentCache:
        like = self.out.weight.new_empty(0, dtype=dtype, device=device)
        return LatentCache(self, batch, capacity, prefix_capacity, rows_per_prefix(batch, prefix_batch), like)

    @torch.no_grad()
    def read_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        assert isinstance(cache, LatentCache)
        size = prefix.shape[1]
        begin_prefix(cache, size, cache.prefix_capacity)
        latent, rotary = self._latents(prefix, cache.cos[None, :size], cache.sin[None, :size])
        cache.prefix[:, :size, : self.latent_dim] = latent
        cache.prefix[:, :size, self.latent_dim :] = rotary
        cache.prefix_size = size
        if prefix_lengths is not None and bool((prefix_lengths != size).any()):
            cache.prefix_lengths, cache.prefix_mask = prefix_lengths, length_mask(prefix_lengths, size)

    @torch.no_grad()
    def extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, LatentCache)
        new, start = x.shape[1], cache.length
        check_room(cache, new, cache.capacity)
        cos, sin = cache.angles(new)
        q = self._queries(x, cos, sin)
        latent, rotary = self._latents(x, cos, sin)
        cache.text[:, start : start + new, : self.latent_dim] = latent
        cache.text[:, start : start + new, self.latent_dim :] = rotary
        cache.length = start + new
        size = cache.prefix_size
        if new == 1:
            return self._step(q, cache, start + 1, size)
        past = []
        if start:
            past.append(self._stored(cache.text[:, :start], q.dtype))
        if size:
            past.append(self._stored(cache.prefix[:, :size], q.dtype, cache.prefix_mask))
        return self._attend(q, latent, rotary, past)

    def _stored(self, slots: Tensor, dtype: torch.dtype, mask: Tensor | None = None) -> Past:
        latent, rotary = slots.to(dtype).split([self.latent_dim, self.rope_dim], -1)
        return Past(self._expand(latent, rotary), mask)

    def _step(
        self, q: Tensor, cache: LatentCache, used: int, prefix_slots: int, text_mask: Tensor | None = None
    ) -> Tensor:
        """One position, (B, 1, H, d_n + d_r) -> (B, 1, d), in latent space, over the first slots of the cache."""
        content, rotary = q[:, 0].to(cache.text.dtype).split([self.head_dim, self.rope_dim], -1)
        absorbed = torch.matmul(content.transpose(0, 1), cache.up_key).transpose(0, 1)  # (B, H, r), scaled
        q_bh1d = torch.cat((absorbed, rotary * self.scale), -1).unsqueeze(2)
        text, prefix = cache.text[:, None, :used], cache.prefix[:, None, :prefix_slots]
        r = self.latent_dim
        read = attend_cached(q_bh1d, text, text[..., :r], 1.0, prefix, prefix[..., :r], cache.prefix_mask, text_mask)
        out = torch.matmul(read[:, :, 0].transpose(0, 1), cache.up_value).transpose(0, 1)  # (B, H, d_v)
        return self.out(out.reshape(q.shape[0], 1, -1).to(q.dtype))

    @property
    def cache_elements_per_token(self) -> float:
        return float(self.latent_dim + self.rope_dim)

    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        slots, prefix_slots = self.slots(capacity, prefix_capacity)
        prefixes = batch // rows_per_prefix(batch, prefix_batch)
        return (self.latent_dim + self.rope_dim) * (batch * slots + prefixes * prefix_slots)

    def multiply_adds(self, context: int) -> int:
        matrices = sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))
        slots, _ = self.slots(context, 0)
        return matrices + slots * self.num_heads * (2 * self.latent_dim + self.rope_dim)


class MLAQueryLatent(MLA):
    """MLA whose queries come from a latent too, and whose latents pass RMS norms: the T6 system's (its spec 1.4).

    q = W_qb RMSNorm(W_qa x), split per head into d_n content and d_r rotary components; c = RMSNorm(W_a x).
    The norms have weights, which the paper's formulas lack.  `query_latent_dim` is d_c', `latent_dim` d_c.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int = 64,
        rope_dim: int = 32,
        latent_dim: int = 256,
        query_latent_dim: int = 512,
        *,
        dropout: float = 0.0,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim, rope_dim, latent_dim, dropout=dropout, rope_theta=rope_theta)
        self.query = nn.Sequential(
            nn.Linear(d_model, query_latent_dim, bias=False),
            nn.RMSNorm(query_latent_dim, eps=1e-6),
            nn.Linear(query_latent_dim, num_heads * (head_dim + rope_dim), bias=False),
        )
        self.norm = nn.RMSNorm(latent_dim, eps=1e-6)
