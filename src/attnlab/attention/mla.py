"""Multi-head latent attention: all heads share one latent and one rotary key per position."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor, nn

from .base import Cache, head_width, length_mask
from .bounds import PositiveFloat, Rank, Rate, Rotary, Size
from .ops.backends import Backend, choose, dense_attention
from .ops.decode import attend_cached, products
from .ops.native import Layer, Weights, eps_of, linear, norm_kind
from .ops.partial_softmax import Past, expand, expanded_attention
from .ops.quantised import attend
from .ops.rope import Turn, rotate, turn
from .positional import Angles, Layout, PositionalAttention, PositionalCache

Norm = Literal["layer", "rms", "none"]
Biased = Literal["query", "down", "out"]


class LatentOptions(TypedDict, total=False):
    """Keyword arguments of all mechanisms with a latent; `MLA` documents them and has their defaults."""

    head_dim: Size | None
    rope_dim: Rotary | None
    latent_dim: Rank | None
    norm: Norm
    bias: Sequence[Biased]
    qk_norm: Size | None
    norm_eps: PositiveFloat
    dropout: Rate
    rope_theta: PositiveFloat | None


class LatentCache(PositionalCache):
    """[latent | rotary key] of each slot: text (B, slots, r + d_r), prefixes (N, slots, r + d_r).

    Steps attend in latent space: `up_key` maps queries into it, and `up_value` maps the output back to heads.
    Arguments are those of `PositionalCache`.
    """

    def __init__(self, attention: "MLA", *sizes: Any) -> None:
        super().__init__(attention, *sizes)
        (up_key, up_value), dtype = attention.up_matrices(), self.text["slots"].dtype
        self.up_key = (up_key.detach() * attention.scale).to(dtype).contiguous()
        self.up_value = up_value.detach().mT.to(dtype).contiguous()
        self._step: LatentStep | None = None

    def step(self, attention: "MLA", x: Tensor) -> "LatentStep | None":
        """The fast CPU path for the step of x (B, n, d); None: use the generic path.

        A subclass that overrides queries or latents has no fast path.
        """
        same = type(attention)._queries is MLA._queries and type(attention)._latents is MLA._latents
        if not (same and self.is_lean(x)) or choose("step", x, masked=True) is Backend.TRITON:
            return None
        if self._step is None or self._step.slots is not self.text["slots"]:
            self._step = LatentStep(attention, self)
        return self._step


class MLA(PositionalAttention):
    r"""Multi-head latent attention (MTLA paper, section 3.2, after DeepSeek-V2), as the MTLA system computes it.

    .. math::
        c_j = \operatorname{LayerNorm}(W_a x_j), \qquad k^r_j = \operatorname{rotary}_j(W_p x_j), \qquad
        o_{ih} = U^v_h \textstyle\sum_j P_{ihj} c_j, \\
        P_{ihj} = \operatorname{softmax}_j\big((q^n_{ih} \cdot U^k_h c_j + q^r_{ih} \cdot k^r_j) / \sqrt{d_n + d_r}\big)

    with d_n = d_v = `head_dim`. Projections have no bias unless `bias` names them.
    The parallel form expands keys and values per head; a step maps queries into latent space instead.
    Cache: r + d_r elements per token.

    Args:
        head_dim: width of a head's content key d_n and value d_v; None: d / H.
        rope_dim: width d_r of the rotary key that all heads share, even; None: half of `head_dim`; 0: no rotary key.
            DeepSeek's `qk_rope_head_dim`.
        latent_dim: width r of the latent, at most the width of all keys and values; None: 4 `head_dim`. DeepSeek's
            `kv_lora_rank`.
        norm: normalisation of latents; "none" for converted attention.
        bias: projections that have a bias.
        qk_norm: number G of key heads for RMS norms of the queries and keys of each head, as in Qwen3: full keys and
            values are then computed and projected down. None: no norms.
        rope_theta: base of the rotary frequencies; None: frequencies are a buffer, saved with the weights.

    ValueError: `num_heads` does not divide `d_model` and `head_dim` is None, `rope_dim` is odd, `latent_dim` is out of
    its bounds, or `bias` names an unknown projection.
    """

    cache_type: type[LatentCache] = LatentCache

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        head_dim: Size | None = None,
        rope_dim: Rotary | None = None,
        latent_dim: Rank | None = None,
        *,
        norm: Norm = "layer",
        bias: Sequence[Biased] = (),
        qk_norm: Size | None = None,
        norm_eps: PositiveFloat = 1e-6,
        dropout: Rate = 0.0,
        rope_theta: PositiveFloat | None = 10000.0,
    ) -> None:
        super().__init__()
        if unknown := set(bias) - set(get_args(Biased)):
            raise ValueError(f"bias={list(bias)}: {unknown.pop()} is not one of {', '.join(get_args(Biased))}")
        head_dim = head_width(d_model, num_heads, head_dim)
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
        self.dropout, self.scale = dropout, (head_dim + rope_dim) ** -0.5
        self._rotary(rope_dim, rope_theta)
        cached, read = self.latent_dim + rope_dim, head_dim + rope_dim
        self.query: nn.Module
        self.down: nn.Module
        if qk_norm is None:
            self.query = nn.Linear(d_model, num_heads * read, bias="query" in bias)
            self.down = nn.Linear(d_model, cached, bias="down" in bias)
        else:
            self.query = NormedQueries(d_model, num_heads, head_dim, read, norm_eps)
            self.down = NormedKeys(d_model, qk_norm, head_dim, cached, norm_eps, bias="down" in bias)
        self.norm: nn.Module = latent_norm(norm, self.latent_dim, norm_eps)
        self.up = nn.Linear(self.latent_dim, num_heads * 2 * head_dim, bias=False)
        self.out = nn.Linear(num_heads * head_dim, d_model, bias="out" in bias)

    def up_matrices(self) -> tuple[Tensor, Tensor]:
        """Up-projections of keys and values, U^k (H, d_n, r) and U^v (H, d_v, r)."""
        value, key = self.up.weight.unflatten(0, (self.num_heads, 2, self.head_dim)).unbind(1)
        return key, value

    def layout(self) -> Layout:
        return {"slots": (None, self.latent_dim + self.rope_dim)}

    def _queries(self, x: Tensor, angles: Angles) -> Tensor:
        """(B, T, d) -> (B, T, H, d_n + d_r), the last d_r rotated."""
        cos, sin = angles
        return rotate(self.query(x).unflatten(-1, (self.num_heads, -1)), cos.unsqueeze(-2), sin.unsqueeze(-2))

    def _latents(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """(B, T, d) -> latents (B, T, r) and rotary keys (B, T, d_r)."""
        latent, rotary = self.down(x).split([self.latent_dim, self.rope_dim], -1)
        cos, sin = (t.unsqueeze(-2) for t in angles)
        return self.norm(latent), rotate(rotary.unsqueeze(-2), cos, sin).squeeze(-2)

    def _entries(self, x: Tensor, angles: Angles) -> dict[str, Tensor]:
        return {"slots": torch.cat(self._latents(x, angles), -1)}

    def _expand(self, latent: Tensor, rotary: Tensor) -> Tensor:
        """Values and keys of each head, packed [value | content key | rotary key]: (B, T, H, d_v + d_n + d_r)."""
        return expand(latent, rotary, self._up())

    def _up(self) -> Tensor:
        """[U^v | U^k], (H, d_v + d_n, r)."""
        return self.up.weight.unflatten(0, (self.num_heads, 2 * self.head_dim))

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        angles, before = self._angles(x, prefix, prefix_lengths)
        past = []
        if prefix is not None:
            mask = None if prefix_lengths is None else length_mask(prefix_lengths, prefix.shape[1])
            past.append(Past(self._expand(*self._latents(prefix, before)), mask))
        latents = self._latents(x, angles)
        return self._attend(self._queries(x, angles), *latents, past, self.dropout if self.training else 0.0)

    def _encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        angles, _ = self._angles(x, None, None)
        packed, mask = self._slots_of(*self._latents(x, angles), lengths)
        out = self._dense(self._queries(x, angles), packed, mask[:, None, None], self.dropout if self.training else 0.0)
        return self._join(out)

    def _join(self, out: Tensor) -> Tensor:
        """Outputs of the heads (B, n, H, d_v) -> (B, n, d)."""
        return self.out(out.flatten(2))

    def _dense(self, q: Tensor, packed: Tensor, mask: Tensor, dropout: float = 0.0) -> Tensor:
        """q (B, n, H, D), packed (B, K, H, d_v + D), mask broadcasting to (B, H, n, K) -> (B, n, H, d_v)."""
        value, key = packed.transpose(1, 2).split([self.head_dim, self.head_dim + self.rope_dim], -1)
        return dense_attention(q.transpose(1, 2), key, value, mask, dropout=dropout, scale=self.scale).transpose(1, 2)

    def _slots_of(self, latent: Tensor, rotary: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """All slots of each row, packed as by `_expand`, and a mask of those that exist, (B, slots)."""
        return self._expand(latent, rotary), length_mask(lengths, latent.shape[1])

    def _attend(self, q: Tensor, latent: Tensor, rotary: Tensor, past: list[Past], dropout: float = 0.0) -> Tensor:
        out = expanded_attention(q, latent, rotary, self._up(), self.head_dim, self.scale, past=past, dropout=dropout)
        return self._join(out)

    def _extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, LatentCache)
        new, start, size = x.shape[1], cache.start, cache.prefix_size
        slot, _, used = cache.place(start)
        if (step := cache.step(self, x)) is not None:
            turn = cache.turn(cache.length)
            latent, key = step.project(x, turn)
            step.write(slot - cache.sealed, latent, key, turn)
            return step.read(cache, used)
        angles = cache.angles(start, start + new)
        q, (latent, rotary) = self._queries(x, angles), self._latents(x, angles)
        cache.write(cache.text, slot, {"slots": torch.cat((latent, rotary), -1)})
        if new == 1 or isinstance(start, Tensor):
            return self._step(q, cache, used)
        past = []
        if start:
            past.append(self._stored(cache.past(start)["slots"], q.dtype))
        if size:
            past.append(self._stored(cache.prefix["slots"][:, :size], q.dtype, cache.prefix_mask))
        return self._attend(q, latent, rotary, past)

    def native_layer(self, cache: PositionalCache, **gate: Any) -> Layer | None:
        assert isinstance(cache, LatentCache)
        if (kind := norm_kind(self.norm, self.latent_dim)) is None:
            return None
        slots, weight, bias = cache.text["slots"], getattr(self.norm, "weight", None), getattr(self.norm, "bias", None)
        gate = gate or {"gate": Weights(), "gate_slots": None, "gate_width": 0}
        d, heads, r, wide = self.d_model, self.num_heads, self.latent_dim, self.head_dim + self.rope_dim
        return Layer(
            "latents_step", self, query=(self.query, heads * wide, d), down=(self.down, r + self.rope_dim, d),
            out=(self.out, d, heads * self.head_dim), cos=cache.cos, sin=cache.sin, norm=weight, norm_bias=bias,
            up_key=cache.up_key, up_value=cache.up_value, slots=slots, prefix_slots=cache.prefix["slots"],
            **cache.native_prefix(), rows=len(slots), d=d, heads=heads,
            width=self.head_dim, r=r, turned=self.rope_dim, capacity=slots.shape[1], norm_kind=kind, scale=self.scale,
            eps=eps_of(self.norm), **gate,
        )  # fmt: skip

    def _stored(self, slots: Tensor, dtype: torch.dtype, mask: Tensor | None = None) -> Past:
        latent, rotary = slots.to(dtype).split([self.latent_dim, self.rope_dim], -1)
        return Past(self._expand(latent, rotary), mask)

    def _step(
        self,
        q: Tensor,
        cache: LatentCache,
        used: int | Tensor,
        text_mask: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Attention of one position in latent space, (B, 1, H, d_n + d_r) -> (B, 1, d), to the first `used` text slots.

        text_mask (B, columns): which of these exist, or `counts` (B,): the number that exist; None: all. Without a
        mask, `used` on the device, (1,) or (B,), takes the place of `counts`.
        """
        if isinstance(used, Tensor) and text_mask is None:
            counts = used
        if counts is not None and cache.sealed:
            counts = counts - cache.sealed
        most, before = cache.reads(used)
        read = attend_cached(
            self._absorbed(q, cache), cache.text["slots"].unsqueeze(1), None, 1.0,
            cache.prefix["slots"].unsqueeze(1), None, cache.prefix_mask, text_mask, value_dim=self.latent_dim,
            used=most, counts=counts, prefix_used=before, prefix_counts=cache.prefix_counts, beam=cache.beam,
            older=cache.older("slots"),
        )  # fmt: skip
        out = torch.matmul(read[:, :, 0].transpose(0, 1), cache.up_value).transpose(0, 1)  # (B, H, d_v)
        return self.out(out.reshape(q.shape[0], 1, -1).to(q.dtype))

    def _absorbed(self, q: Tensor, cache: LatentCache) -> Tensor:
        """Scaled queries for latents, [absorbed | rotary]: (B, 1, H, d_n + d_r) -> (B, H, 1, r + d_r)."""
        content, rotary = q[:, 0].to(cache.up_key.dtype).split([self.head_dim, self.rope_dim], -1)
        absorbed = torch.matmul(content.transpose(0, 1), cache.up_key).transpose(0, 1)
        return torch.cat((absorbed, rotary * self.scale), -1).unsqueeze(2)

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        matrices = sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))
        matrices += sum(module.turn.numel() for module in self.modules() if isinstance(module, NormedQueries))
        slots, _ = self.slots(context, 0)
        return matrices + slots * self.num_heads * (2 * self.latent_dim + self.rope_dim)


def latent_norm(norm: Norm, width: int, eps: float) -> nn.Module:
    """The normalisation of latents (..., width)."""
    if norm == "rms":
        return nn.RMSNorm(width, eps=eps)
    return nn.LayerNorm(width) if norm == "layer" else nn.Identity()


class NormedQueries(nn.Module):
    """Queries of H heads, (..., d) -> (..., H (d_n + d_r)): W_q x, then an RMS norm and a linear map per head.

    Args:
        head_dim: input width D of a head's map.
        width: output width d_n + d_r of a head's map.
    """

    def __init__(self, d_model: int, num_heads: int, head_dim: int, width: int, eps: float) -> None:
        super().__init__()
        self.full = nn.Linear(d_model, num_heads * head_dim, bias=False)
        self.norm = nn.RMSNorm(head_dim, eps=eps)
        self.turn = nn.Parameter(torch.empty(num_heads, width, head_dim))  # map of each head, (H, d_n + d_r, D)
        nn.init.uniform_(self.turn, -(head_dim**-0.5), head_dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(self.full(x).unflatten(-1, (len(self.turn), -1)))
        return torch.einsum("...hd,hwd->...hw", heads, self.turn.to(heads.dtype)).flatten(-2)


class NormedKeys(nn.Module):
    """Keys, after an RMS norm, and values of G heads, projected down: (..., d) -> (..., r + d_r)."""

    def __init__(self, d_model: int, num_kv_heads: int, head_dim: int, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.key, self.value = (nn.Linear(d_model, num_kv_heads * head_dim, bias=False) for _ in range(2))
        self.norm = nn.RMSNorm(head_dim, eps=eps)
        self.down = nn.Linear(2 * num_kv_heads * head_dim, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        key = self.norm(self.key(x).unflatten(-1, (-1, self.norm.normalized_shape[0]))).flatten(-2)
        return self.down(torch.cat((key, self.value(x)), -1))


class MLAQueryLatent(MLA):
    r"""MLA of the T6 system: queries are projected from a latent too, and both latents are RMS-normalised.

    .. math:: q = W_{qb} \operatorname{RMSNorm}(W_{qa} x), \qquad c = \operatorname{RMSNorm}(W_a x)

    The query of a head has d_n content and d_r rotary components. The norms have weights, which the formulas of the
    TPA paper (section 2) lack.

    Args:
        query_latent_dim: width d_c' of the latent of queries. DeepSeek's `q_lora_rank`.
        Others are those of `MLA`; `latent_dim` is the paper's d_c.
    """

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        head_dim: Size = 64,
        rope_dim: Size = 32,
        latent_dim: Rank = 256,
        query_latent_dim: Rank = 512,
        *,
        dropout: Rate = 0.0,
        rope_theta: PositiveFloat = 10000.0,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim, rope_dim, latent_dim, dropout=dropout, rope_theta=rope_theta)
        self.query = nn.Sequential(
            nn.Linear(d_model, query_latent_dim, bias=False),
            nn.RMSNorm(query_latent_dim, eps=1e-6),
            nn.Linear(query_latent_dim, num_heads * (head_dim + rope_dim), bias=False),
        )
        self.norm = nn.RMSNorm(latent_dim, eps=1e-6)


class LatentStep:
    """The fast CPU path of a decoding step in latent space: few kernels, which write directly into the cache.

    Buffers and views of the cache are created once, because creating a view takes as long as a small kernel.
    In-place changes of the weights but `up` take effect.

    Attributes:
        slots, prefix: buffers of the cache, [latent | rotary key] (B, K, r + d_r) of the text and (N, P, r + d_r).
        up_key, up_value: projections between latents and heads, (H, d_n, r), with the scale of logits, and (H, r, d_v).
        row: the newest [latent | rotary key], (B, r + d_r), set by :meth:`newest`.
        row_turned: view of its rotary key, (B, 1, 2, d_r / 2).
    """

    def __init__(self, attention: MLA, cache: LatentCache) -> None:
        self.slots, self.prefix = cache.text["slots"], cache.prefix["slots"]
        self.up_key, self.up_value, self.scale = cache.up_key, cache.up_value, attention.scale
        self.heads, head_dim, r = self.up_key.shape
        rows, pairs = len(self.slots), (self.slots.shape[-1] - r) // 2
        self.pairs, self.query_widths, self.widths = pairs, [head_dim, 2 * pairs], [r, 2 * pairs]
        self.attention = attention
        self.q = self.slots.new_empty(rows, self.heads, r + 2 * pairs)
        self.row = self.slots.new_empty(rows, r + 2 * pairs)
        self.latents, self.turned = self._parts(self.slots)
        self._row_latent, self.row_turned = self._parts(self.row)
        self._absorbed = self.q[..., :r].transpose(0, 1)
        self._rotary = self.q[..., r:].unflatten(-1, (2, pairs))
        self._values = self.prefix[..., :r]

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        latent, rotary = rows.split(self.widths, -1)
        return latent, rotary.unflatten(-1, (1, 2, self.pairs))

    def project(self, x: Tensor, angles: Turn) -> tuple[Tensor, Tensor]:
        """Store the queries of x (B, 1, d), and return latents (B, r) and unrotated rotary keys (B, d_r)."""
        x = x[:, 0]
        q = linear(self.attention.query, x).view(len(x), self.heads, -1)
        content, rotary = torch.split_with_sizes(q, self.query_widths, -1)
        self._absorbed.copy_(torch.bmm(content.transpose(0, 1), self.up_key))
        if self.pairs:
            turn(rotary.unflatten(-1, (2, self.pairs)), angles, self._rotary)
            self._rotary.mul_(self.scale)
        latent, key = torch.split_with_sizes(linear(self.attention.down, x), self.widths, -1)
        return self.attention.norm(latent), key

    def turn_into(self, out: Tensor, key: Tensor, angles: Turn) -> None:
        """Rotate rotary keys (B, d_r) into `out` (B, 1, 2, d_r / 2)."""
        if self.pairs:
            turn(key.unflatten(-1, (1, 2, self.pairs)), angles, out)

    def write(self, slot: int, latent: Tensor, key: Tensor, angles: Turn) -> None:
        """Store latents (B, r) and unrotated rotary keys (B, d_r) in a text slot."""
        self.latents.select(1, slot).copy_(latent)
        self.turn_into(self.turned.select(1, slot), key, angles)

    def merge(self, slot: int, latent: Tensor, gate: Tensor, key: Tensor, angles: Turn, *, opens: bool) -> None:
        """Add latents (B, r), multiplied by gates (B, 1), to a slot, and replace its rotary keys by unrotated (B, d_r).

        Args:
            opens: whether this is the first position of the slot, which replaces the old content.
        """
        merged = self.latents.select(1, slot)
        if opens:
            torch.mul(latent, gate, out=merged)
        else:
            merged.addcmul_(latent, gate)
        self.turn_into(self.turned.select(1, slot), key, angles)

    def newest(self, latent: Tensor, key: Tensor, angles: Turn) -> Tensor:
        """Set `row` to latents (B, r) and unrotated rotary keys (B, d_r), and return it."""
        self._row_latent.copy_(latent)
        self.turn_into(self.row_turned, key, angles)
        return self.row

    def read(
        self, cache: LatentCache, used: int, text_mask: Tensor | None = None, counts: Tensor | None = None
    ) -> Tensor:
        """Output (B, 1, d) of the queries of `project`, attending to the prefix and to the first `used` text slots.

        Args:
            text_mask: (B, columns) bool, true where a slot exists, for the first text slots that are no codes.
            counts: number of text slots that exist, (B,), in place of `text_mask`.
        """
        sealed, prefix_slots = cache.sealed, cache.prefix_used
        used -= sealed
        if counts is not None:
            text_mask = torch.arange(used) < counts.unsqueeze(1) - sealed
        key, value = self.slots.narrow(1, 0, used), self.latents.narrow(1, 0, used)
        older = attend(self.q, *codes, value.shape[-1]) if (codes := cache.older("slots")) else None
        if not prefix_slots:
            read = products(self.q, key, value, 1, text_mask, older=older)
        else:
            before, values = (t.narrow(1, 0, prefix_slots) for t in (self.prefix, self._values))
            read = products(self.q, key, value, 1, text_mask, before, values, cache.prefix_mask, older=older)
        values = torch.bmm(read.transpose(0, 1), self.up_value)  # (H, B, d_v)
        return linear(self.attention.out, values.transpose(0, 1).reshape(len(read), -1)).unsqueeze(1)
