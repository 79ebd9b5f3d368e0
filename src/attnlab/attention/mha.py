"""Multi-head, grouped-query and multi-query attention."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from .base import Cache, head_width, length_mask
from .bounds import PositiveFloat, Rate, Rotary, Size
from .ops.backends import dense_attention
from .ops.decode import attend_cached
from .ops.native import Layer, linear
from .ops.partial_softmax import Past, merged_attention
from .ops.rope import Llama3Scaling, rotate, turn
from .positional import Angles, Layout, PositionalAttention, PositionalCache

Projection = Literal["query", "key", "value", "out"]


class MHA(PositionalAttention):
    r"""Multi-head, grouped-query and multi-query attention with rotary positions.

    .. math:: o_h = \operatorname{softmax}\big(q_h k_g^\top / \sqrt{D}\big)\, v_g, \qquad g = \lfloor h G / H \rfloor

    G = H is multi-head, 1 < G < H grouped-query, G = 1 multi-query attention. MTLA paper, section 3; the biases are
    those of its released code. Cache: 2 G D elements per token.

    Args:
        num_heads: query heads H.
        num_kv_heads: key-value heads G, which must divide H; None: H.
        head_dim: width D of a head, even; None: d / H.
        bias: projections that have a bias: all, none, or a list of names (Qwen2: [query, key, value]).
        qk_norm: RMS norms of each head's queries and keys, before rotation, with one weight vector of width D for all
            queries and one for all keys (Qwen3).
        rope_theta: base of the rotary frequencies; None: frequencies are a buffer, saved with the weights.
        rope_scaling: scaling of the rotary frequencies for long texts, such as `Llama3Scaling`.
        rope_dim: number of leading components of a head that are rotated, even; None: all; 0: none (GPT-2, which has
            learned positions).

    ValueError: sizes do not fit each other, or `bias` names an unknown projection.
    """

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        num_kv_heads: Size | None = None,
        head_dim: Size | None = None,
        *,
        bias: bool | Sequence[Projection] = True,
        qk_norm: bool = False,
        dropout: Rate = 0.0,
        rope_theta: PositiveFloat | None = 10000.0,
        rope_scaling: Llama3Scaling | None = None,
        rope_dim: Rotary | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        head_dim = head_width(d_model, num_heads, head_dim)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads: {num_kv_heads} does not divide {num_heads}")
        if rope_dim is None and head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary pairs, not {head_dim}")
        turned = head_dim if rope_dim is None else rope_dim
        if turned % 2 or turned > head_dim:
            raise ValueError(f"rope_dim={turned}: expected an even number up to head_dim={head_dim}")
        projections = get_args(Projection)
        biased = (projections if bias else ()) if isinstance(bias, bool) else tuple(bias)
        if unknown := set(biased) - set(projections):
            raise ValueError(f"bias={list(biased)}: {unknown.pop()} is not one of {', '.join(projections)}")
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, num_kv_heads
        self.head_dim, self.dropout, self.scale = head_dim, dropout, head_dim**-0.5
        self._rotary(turned, rope_theta, rope_scaling)
        self.query = nn.Linear(d_model, num_heads * head_dim, bias="query" in biased)
        self.key = nn.Linear(d_model, num_kv_heads * head_dim, bias="key" in biased)
        self.value = nn.Linear(d_model, num_kv_heads * head_dim, bias="value" in biased)
        self.out = nn.Linear(num_heads * head_dim, d_model, bias="out" in biased)
        self.query_norm, self.key_norm = (
            nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity() for _ in ("query", "key")
        )

    def layout(self) -> Layout:
        shape = self.num_kv_heads, None, self.head_dim
        return {"key": shape, "value": shape}

    def _queries(self, x: Tensor, angles: Angles) -> Tensor:
        """(B, T, d) -> (B, H, T, D), rotated."""
        return self._rotated(self.query_norm(self._heads(x, self.query)), angles)

    def _entries(self, x: Tensor, angles: Angles) -> dict[str, Tensor]:
        """Keys, rotated, and values: (B, T, d) -> (B, G, T, D) each."""
        key = self.key_norm(self._heads(x, self.key))
        return {"key": self._rotated(key, angles), "value": self._heads(x, self.value)}

    def _keys_values(self, entries: dict[str, Tensor], angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, S, D) of the cache entries of S positions, with the angles of these."""
        return entries["key"], entries["value"]

    def _heads(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotated(self, x_bhtd: Tensor, angles: Angles) -> Tensor:
        cos, sin = (angle.unsqueeze(1) for angle in angles)
        if self.turned == self.head_dim:
            return rotate(x_bhtd, cos, sin)
        turned, rest = x_bhtd.split([self.turned, self.head_dim - self.turned], -1)
        return torch.cat((rotate(turned, cos, sin), rest), -1) if self.turned else x_bhtd

    def _pack(self, key: Tensor, value: Tensor) -> Tensor:
        """(B, G, S, D) each -> [value | key] for every query head, (B, S, H, 2 D)."""
        both = torch.cat((value, key), -1).transpose(1, 2)
        group = self.num_heads // self.num_kv_heads
        return both if group == 1 else both.repeat_interleave(group, dim=2)

    def _join(self, out_bhtd: Tensor) -> Tensor:
        return linear(self.out, out_bhtd.transpose(1, 2).flatten(2))

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        angles, before = self._angles(x, prefix, prefix_lengths)
        past = []
        if prefix is not None:
            mask = None if prefix_lengths is None else length_mask(prefix_lengths, prefix.shape[1])
            past.append(Past(self._pack(*self._keys_values(self._entries(prefix, before), before)), mask))
        pair = self._keys_values(self._entries(x, angles), angles)
        return self._attend(self._queries(x, angles), *pair, past, self._dropout)

    def _encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        angles, _ = self._angles(x, None, None)
        mask = self._near(lengths, x.shape[1])
        key, value = self._keys_values(self._entries(x, angles), angles)
        q = self._queries(x, angles)
        return self._join(dense_attention(q, key, value, mask, dropout=self._dropout, scale=self.scale))

    def _near(self, lengths: Tensor, size: int) -> Tensor:
        """Mask for `encode`: the positions that exist, (B, 1, 1, size)."""
        return length_mask(lengths, size)[:, None, None]

    def _attend(self, q_bhtd: Tensor, key: Tensor, value: Tensor, past: list[Past], dropout: float = 0.0) -> Tensor:
        if not past:  # keys of groups are not repeated
            return self._join(dense_attention(q_bhtd, key, value, causal=True, dropout=dropout, scale=self.scale))
        packed = self._pack(key, value)
        out = merged_attention(q_bhtd.transpose(1, 2), packed, self.head_dim, self.scale, past=past, dropout=dropout)
        return self.out(out.flatten(2))

    def _extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, PositionalCache)
        new, start, size = x.shape[1], cache.start, cache.prefix_size
        if self._is_lean(x, cache):
            return self._lean_step(x, cache)
        angles = cache.angles(start, start + new)
        q, entries = self._queries(x, angles), self._entries(x, angles)
        slot, _, used = cache.place(start)
        cache.write(cache.text, slot, entries)
        if new == 1 or isinstance(start, Tensor):
            return self._step(q, cache, used)
        past = []
        if start:
            slots = {name: slots.to(q.dtype) for name, slots in cache.past(start).items()}
            past.append(Past(self._pack(*self._keys_values(slots, cache.angles(0, start)))))
        if size:
            slots = {
                name: buffer.narrow(cache.axes[name], 0, size).to(q.dtype) for name, buffer in cache.prefix.items()
            }
            past.append(Past(self._pack(*self._keys_values(slots, cache.prefix_angles(0, size))), cache.prefix_mask))
        return self._attend(q, *self._keys_values(entries, angles), past)

    def _is_lean(self, x: Tensor, cache: PositionalCache) -> bool:
        """Whether `_lean_step` computes the same: not for a subclass with other queries or entries."""
        ours = type(self)._queries is MHA._queries and type(self)._entries is MHA._entries
        return ours and self.turned in (0, self.head_dim) and cache.is_lean(x)

    def _lean_step(self, x: Tensor, cache: PositionalCache) -> Tensor:
        """The fast CPU path of one position, (B, 1, d) -> (B, 1, d), which writes directly into the cache."""
        x, (slot, _, used) = x[:, 0], cache.place(cache.length)
        q, key, value = (linear(part, x).view(len(x), -1, self.head_dim) for part in (self.query, self.key, self.value))
        q, key = self.query_norm(q), self.key_norm(key)
        stored, values = (cache.text[name].select(2, slot - cache.sealed) for name in ("key", "value"))
        values.copy_(value)
        if self.turned:
            angles, turned = cache.turn(cache.length), torch.empty_like(q)
            turn(_halves(q), angles, _halves(turned))
            turn(_halves(key), angles, _halves(stored))
            q = turned
        else:
            stored.copy_(key)
        return self._step(q.unsqueeze(2), cache, used)

    def native_layer(self, cache: PositionalCache) -> Layer | None:
        norms = type(self.query_norm), type(self.key_norm)
        if norms != (nn.Identity, nn.Identity) or self.turned not in (0, self.head_dim):
            return None
        keys, tables = cache.text["key"], (cache.cos, cache.sin) if self.turned else (None, None)
        d, wide, narrow = self.d_model, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return Layer(
            "heads_step", self, query=(self.query, wide, d), key=(self.key, narrow, d), value=(self.value, narrow, d),
            out=(self.out, d, wide), cos=tables[0], sin=tables[1], keys=keys, values=cache.text["value"],
            prefix_keys=cache.prefix["key"], prefix_values=cache.prefix["value"], **cache.native_prefix(),
            rows=len(keys), d=d, heads=self.num_heads, groups=self.num_kv_heads, width=self.head_dim,
            capacity=keys.shape[2], scale=self.scale,
        )  # fmt: skip

    def _step(self, q: Tensor, cache: PositionalCache, used: int | Tensor) -> Tensor:
        """Attention of one position, (B, H, 1, D) -> (B, 1, d), to the prefix and the first `used` text slots."""
        text, prefix, counts = cache.text, cache.prefix, used if isinstance(used, Tensor) else None
        most, before = cache.reads(used)
        out = attend_cached(
            q, text["key"], text["value"], self.scale, prefix["key"], prefix["value"], cache.prefix_mask,
            used=most, counts=counts, prefix_used=before, prefix_counts=cache.prefix_counts, beam=cache.beam,
            older=cache.older("key", "value"),
        )  # fmt: skip
        return self._join(out.to(q.dtype))

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        projections = 2 * self.d_model * (self.num_heads + self.num_kv_heads) * self.head_dim
        return projections + 2 * context * self.num_heads * self.head_dim


def _halves(x: Tensor) -> Tensor:
    """(..., D) -> (..., 2, D / 2)."""
    return x.view(*x.shape[:-1], 2, x.shape[-1] // 2)
