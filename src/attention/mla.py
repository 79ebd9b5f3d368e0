"""Multi-head latent attention: one latent and one rotary key per position, shared by all heads."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Attention, Cache, begin_prompt, check_room, length_mask, rows_of, rows_per_prompt
from .cached import attend_cached
from .merged import Past, expand, expanded_attention
from .rope import rotary_table, rotate


class LatentCache(Cache):
    """[latent | rotary key] of each slot: text (B, slots, r + d_r), prompts (N, slots, r + d_r)."""

    def __init__(
        self, attention: "MLA", batch: int, capacity: int, prompt_capacity: int, beam: int, like: Tensor
    ) -> None:
        slots, prompt_slots = attention.slots(capacity, prompt_capacity)
        width = attention.latent_dim + attention.rope_dim
        self.length, self.beam, self.capacity, self.prompt_capacity = 0, beam, capacity, prompt_capacity
        self.text = like.new_zeros(batch, slots, width)
        self.prompt = like.new_zeros(batch // beam, prompt_slots, width)
        self.prompt_size = 0  # positions of the longest prompt
        self.prompt_lengths: Tensor | None = None  # set where prompts differ in length
        self.prompt_mask: Tensor | None = None
        self.cos, self.sin = rotary_table(
            attention.rope_dim, attention.rope_theta, prompt_capacity + capacity, like.dtype, like.device
        )
        # Decoding works in latent space: queries go through U_k, read latents, and come back through U_v.
        up_key, up_value = attention.up_matrices()
        self.up_key = (up_key.detach() * attention.scale).to(like.dtype).contiguous()
        self.up_value = up_value.detach().mT.to(like.dtype).contiguous()

    def buffers(self) -> list[Tensor]:
        return [self.text, self.prompt]

    def reorder(self, rows: Tensor) -> None:
        used = self.used_slots()
        self.text[:, :used] = self.text[rows, :used]

    def used_slots(self) -> int:
        return self.length

    def select(self, prompts: Tensor) -> None:
        self.text, self.prompt = self.text[rows_of(prompts, self.beam)], self.prompt[prompts]
        if self.prompt_lengths is not None and self.prompt_mask is not None:
            self.prompt_lengths, self.prompt_mask = self.prompt_lengths[prompts], self.prompt_mask[prompts]

    def crop(self, length: int) -> None:
        self._check_crop(length)
        self.length = length

    def angles(self, new: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the next `new` positions, (B or 1, new, d_r/2)."""
        start = self.length
        if self.prompt_lengths is None:
            span = slice(self.prompt_size + start, self.prompt_size + start + new)
            return self.cos[None, span], self.sin[None, span]
        lengths = self.prompt_lengths.repeat_interleave(self.beam)
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

    def slots(self, capacity: int, prompt_capacity: int) -> tuple[int, int]:
        """Slots that so many text and prompt positions need."""
        return capacity, prompt_capacity

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

    def _angles(self, x: Tensor, prompt: Tensor | None, prompt_lengths: Tensor | None) -> tuple[Tensor, ...]:
        """Tables of the text positions, (B or 1, T, d_r/2), and of the prompt's, (1, S, d_r/2)."""
        steps, start = x.shape[1], 0 if prompt is None else prompt.shape[1]
        cos, sin = rotary_table(self.rope_dim, self.rope_theta, start + steps, x.dtype, x.device)
        before = cos[None, :start], sin[None, :start]
        if prompt_lengths is None:
            return cos[None, start:], sin[None, start:], *before
        positions = prompt_lengths[:, None] + torch.arange(steps, device=x.device)
        return cos[positions], sin[positions], *before

    def forward(
        self,
        x: Tensor,
        prompt: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        prompt_lengths: Tensor | None = None,
    ) -> Tensor:
        cos, sin, *before = self._angles(x, prompt, prompt_lengths)
        past = []
        if prompt is not None and prompt.shape[1]:
            mask = None if prompt_lengths is None else length_mask(prompt_lengths, prompt.shape[1])
            past.append(Past(self._expand(*self._latents(prompt, *before)), mask))
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
        prompt_capacity: int = 0,
        *,
        prompt_batch: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> LatentCache:
        like = self.out.weight.new_empty(0, dtype=dtype, device=device)
        return LatentCache(self, batch, capacity, prompt_capacity, rows_per_prompt(batch, prompt_batch), like)

    @torch.no_grad()
    def read_prompt(self, prompt: Tensor, prompt_lengths: Tensor | None, cache: Cache) -> None:
        assert isinstance(cache, LatentCache)
        size = prompt.shape[1]
        begin_prompt(cache, size, cache.prompt_capacity)
        latent, rotary = self._latents(prompt, cache.cos[None, :size], cache.sin[None, :size])
        cache.prompt[:, :size, : self.latent_dim] = latent
        cache.prompt[:, :size, self.latent_dim :] = rotary
        cache.prompt_size = size
        if prompt_lengths is not None and bool((prompt_lengths != size).any()):
            cache.prompt_lengths, cache.prompt_mask = prompt_lengths, length_mask(prompt_lengths, size)

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
        size = cache.prompt_size
        if new == 1:
            return self._step(q, cache, start + 1, size)
        past = []
        if start:
            past.append(self._stored(cache.text[:, :start], q.dtype))
        if size:
            past.append(self._stored(cache.prompt[:, :size], q.dtype, cache.prompt_mask))
        return self._attend(q, latent, rotary, past)

    def _stored(self, slots: Tensor, dtype: torch.dtype, mask: Tensor | None = None) -> Past:
        latent, rotary = slots.to(dtype).split([self.latent_dim, self.rope_dim], -1)
        return Past(self._expand(latent, rotary), mask)

    def _step(
        self, q: Tensor, cache: LatentCache, used: int, prompt_slots: int, text_mask: Tensor | None = None
    ) -> Tensor:
        """One position, (B, 1, H, d_n + d_r) -> (B, 1, d), in latent space, over the first slots of the cache."""
        content, rotary = q[:, 0].to(cache.text.dtype).split([self.head_dim, self.rope_dim], -1)
        absorbed = torch.matmul(content.transpose(0, 1), cache.up_key).transpose(0, 1)  # (B, H, r), scaled
        q_bh1d = torch.cat((absorbed, rotary * self.scale), -1).unsqueeze(2)
        text, prompt = cache.text[:, None, :used], cache.prompt[:, None, :prompt_slots]
        r = self.latent_dim
        read = attend_cached(q_bh1d, text, text[..., :r], 1.0, prompt, prompt[..., :r], cache.prompt_mask, text_mask)
        out = torch.matmul(read[:, :, 0].transpose(0, 1), cache.up_value).transpose(0, 1)  # (B, H, d_v)
        return self.out(out.reshape(q.shape[0], 1, -1).to(q.dtype))

    @property
    def cache_elements_per_token(self) -> float:
        return float(self.latent_dim + self.rope_dim)

    def cache_elements(
        self, batch: int, capacity: int, prompt_capacity: int = 0, prompt_batch: int | None = None
    ) -> int:
        slots, prompt_slots = self.slots(capacity, prompt_capacity)
        prompts = batch // rows_per_prompt(batch, prompt_batch)
        return (self.latent_dim + self.rope_dim) * (batch * slots + prompts * prompt_slots)

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
