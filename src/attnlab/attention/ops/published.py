"""Released systems' algorithms, in our words: what the fast paths are measured against.

MTLA's system: MHA, MLA, MTLA (spec, mtla 1.2-1.4, 2, 5). T6's: tensor product attention (tpa 1.1, 1.9). The
Tensorized Transformer's: multi-linear attention (tensorized 1.1), with the causal mask that it lacks.

`of(attention)` gives the published algorithm of one of our modules, with the same weights and the same interface.
Where the release does more work than its algorithm asks for and it is unclear how much, this does less: a ratio against
it is not flattered. Two things are ours: rotary pairs are half-split (a permutation, see `ops/rope.py`), and the
step counter is an integer (theirs, in the activations' dtype, sticks at 256 in bfloat16).

Shapes: B rows, N queries, S prefix positions, K = S + N keys, H heads.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import (
    MHA,
    MLA,
    MTLA,
    TPA,
    AbsoluteMultiLinear,
    Attention,
    Cache,
    RelativeMultiLinear,
    TPAKVOnly,
)
from ..base import rows_of, rows_per_prefix
from .tables import kept


def of(attention: Attention) -> "Published":
    """The published algorithm with `attention`'s weights. LookupError where none is kept here."""
    kept: dict[type[Attention], type[Published]] = {
        MTLA: PublishedMTLA,
        MLA: PublishedMLA,
        MHA: PublishedMHA,
        TPA: PublishedTPA,
        TPAKVOnly: PublishedTPA,
        AbsoluteMultiLinear: PublishedMultiLinear,
        RelativeMultiLinear: PublishedMultiLinear,
    }
    if type(attention) in kept:
        return kept[type(attention)](attention)
    raise LookupError(f"no published algorithm of {type(attention).__name__} is kept")


class PublishedCache(Cache):
    """Tensors that grow by concatenation; every row holds its own copy of the prefix."""

    def __init__(self, batch: int, beam: int, capacity: int, prefix_capacity: int) -> None:
        self.batch, self.beam, self.capacity, self.prefix_capacity = batch, beam, capacity, prefix_capacity
        self.tensors: dict[str, Tensor] = {}
        self.prefix: Tensor | None = None  # until the first step has turned it into keys
        self.steps: Tensor | None = None  # (B,) positions read, prefix included

    def buffers(self) -> list[Tensor]:
        return list(self.tensors.values())

    def reorder(self, rows: Tensor) -> None:
        self.tensors = {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}
        if self.steps is not None:
            self.steps = self.steps.index_select(0, rows)

    def select(self, prefixes: Tensor) -> None:
        self.reorder(rows_of(prefixes, self.beam))

    def crop(self, length: int) -> None:
        raise ValueError("the published cache cannot be cropped")

    def grow(self, name: str, new: Tensor, dim: int) -> Tensor:
        """Append to a tensor of the cache, by concatenation."""
        old = self.tensors.get(name)
        self.tensors[name] = new if old is None else torch.cat((old, new), dim)
        return self.tensors[name]


class Published(Attention):
    """What the three have in common: keys of prefix and text together, one token a step."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        self.ours, self.d_model = ours, ours.d_model

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        _equally_long(lengths, x)
        if prefix is None:
            return self.attend(x, x)
        _equally_long(prefix_lengths, prefix)
        return self.attend(x, torch.cat((prefix, x), 1))

    def attend(self, x: Tensor, joint: Tensor) -> Tensor:
        """Queries of x (B, N, d), the last N positions of joint (B, K, d), in parallel."""
        raise NotImplementedError

    def step(self, x: Tensor, new: Tensor, cache: PublishedCache) -> Tensor:
        """One query x (B, 1, d); `new` (B, n, d) are the positions whose keys the cache lacks, x's the last."""
        raise NotImplementedError

    def new_cache(
        self,
        batch: int,
        capacity: int,
        prefix_capacity: int = 0,
        *,
        prefix_batch: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> PublishedCache:
        if dtype not in (None, self.ours.out.weight.dtype):
            raise ValueError(f"the published cache has the weights' dtype, not {dtype}")
        return PublishedCache(batch, rows_per_prefix(batch, prefix_batch), capacity, prefix_capacity)

    def _store_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        """Copy the prefix to every row; the first step makes its keys."""
        assert isinstance(cache, PublishedCache)
        _equally_long(prefix_lengths, prefix)
        cache.prefix = prefix.repeat_interleave(cache.beam, 0)

    def _extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, PublishedCache)
        if x.shape[1] != 1:
            raise ValueError("the published step takes one token a call")
        new = x if cache.prefix is None else torch.cat((cache.prefix, x), 1)
        if cache.steps is None:
            cache.steps = torch.zeros(cache.batch, dtype=torch.long, device=x.device)
        cache.prefix = None
        cache.steps = cache.steps + new.shape[1]
        return self.step(x, new, cache)

    @property
    def cache_elements_per_token(self) -> float:
        return float(self.ours.cache_elements_per_token)

    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        """What the cache has grown to after `capacity` tokens: prefix and text together, once per row."""
        return int(self.ours.cache_elements(batch, prefix_capacity + capacity))

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        return int(self.ours.multiply_adds(context, prefix))

    def quadratic_bytes(self, batch: int, text: int, prefix: int = 0, layers: int = 1) -> int:
        """About what the N x K tensors of a training step take: probabilities kept per layer, two more passing."""
        scores = batch * self.ours.num_heads * text * (prefix + text)
        return int((layers + 2) * scores * self.ours.out.weight.itemsize)


class PublishedMHA(Published):
    """Plain matrix products; key and value heads are copied until there are as many as query heads."""

    def _keys(self, new: Tensor, first: int) -> tuple[Tensor, Tensor]:
        a = self.ours
        k = _turn(_heads(a.key(new), a.num_kv_heads), first, a.rope_theta)
        return k, _heads(a.value(new), a.num_kv_heads)

    def _read(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        a, steps = self.ours, x.shape[1]
        q = _turn(_heads(a.query(x) * a.head_dim**-0.5, a.num_heads), k.shape[2] - steps, a.rope_theta)
        group = a.num_heads // a.num_kv_heads
        if group > 1:
            k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        scores = q @ k.mT
        if mask is not None:
            scores = scores + mask
        return a.out((_softmax(scores) @ v).transpose(1, 2).flatten(2))

    def attend(self, x: Tensor, joint: Tensor) -> Tensor:
        return self._read(x, *self._keys(joint, 0), _causal(x.shape[1], joint.shape[1], x.dtype, x.device))

    def step(self, x: Tensor, new: Tensor, cache: PublishedCache) -> Tensor:
        first = cache.tensors["key"].shape[2] if cache.tensors else 0
        k, v = self._keys(new, first)
        return self._read(x, cache.grow("key", k, 2), cache.grow("value", v, 2), None)


class PublishedMLA(Published):
    """Absorbed in training as in decoding: queries of width r + d_r read latents of width r."""

    def _latents(self, new: Tensor, first: int) -> tuple[Tensor, Tensor]:
        a = self.ours
        latent, rotary = a.down(new).split([a.latent_dim, a.rope_dim], -1)
        return a.norm(latent), _turn(rotary, first, a.rope_theta)

    def _read(self, x: Tensor, latent: Tensor, rotary: Tensor, first: int, mask: Tensor | None) -> Tensor:
        """latent (B, K, r), rotary (B, K, d_r); x's first position is number `first`."""
        a = self.ours
        q = a.query(x).unflatten(-1, (a.num_heads, -1))
        content, turned = q[..., : a.head_dim], q[..., a.head_dim :]
        turned = _turn(turned.transpose(1, 2), first, a.rope_theta).transpose(1, 2)
        up_key, up_value = a.up_matrices()
        absorbed = torch.einsum("bnhd,hdr->bnhr", content, up_key)
        scores = torch.einsum("bnhr,bkr->bnhk", absorbed, latent) + torch.einsum("bnhr,bkr->bnhk", turned, rotary)
        scores = scores * a.scale
        if mask is not None:
            scores = scores + mask[:, None]
        read = torch.einsum("bnhk,bkr->bnhr", _softmax(scores), latent)
        return a.out(torch.einsum("bnhr,hdr->bnhd", read, up_value).flatten(2))

    def attend(self, x: Tensor, joint: Tensor) -> Tensor:
        size, steps = joint.shape[1], x.shape[1]
        return self._read(x, *self._latents(joint, 0), size - steps, _causal(steps, size, x.dtype, x.device))

    def step(self, x: Tensor, new: Tensor, cache: PublishedCache) -> Tensor:
        first = cache.tensors["latent"].shape[1] if cache.tensors else 0
        latent, rotary = self._latents(new, first)
        last = first + new.shape[1] - 1
        return self._read(x, cache.grow("latent", latent, 1), cache.grow("rotary", rotary, 1), last, None)


class PublishedMTLA(PublishedMLA):
    """A gate for every pair of positions, K x K masks made anew at each call, scores of all K columns."""

    def _slot_gates(self, slots: int, like: Tensor, first: int = 0) -> Tensor:
        """fc_c of the sinusoid of slots first ... first+slots-1, (slots, g): made on the CPU at each call."""
        width = self.ours.latent_dim
        dtype = torch.promote_types(like.dtype, torch.float32)
        angles = torch.arange(first, first + slots, dtype=dtype)[:, None] * _frequencies(width, 10000.0, dtype)
        sinusoid = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
        return self.ours.gate_slot(sinusoid.to(like.device, like.dtype))

    def _gates(self, slots: Tensor, latent: Tensor) -> Tensor:
        """Every slot row against every latent: (., g), (B, K, r) -> (B, ., K)."""
        return torch.sigmoid(slots @ self.ours.gate_latent(latent).mT)

    def attend(self, x: Tensor, joint: Tensor) -> Tensor:
        s, size, steps = self.ours.stride, joint.shape[1], x.shape[1]
        latent, rotary = self._latents(joint, 0)
        slots = self._slot_gates(-(-size // s), latent).repeat_interleave(s, 0)[:size]
        merged = (self._gates(slots, latent) * _chunk_mask(size, s).to(latent)) @ latent
        return self._read(x, merged, rotary, size - steps, _stride_mask(size, s).to(latent)[-steps:])

    def step(self, x: Tensor, new: Tensor, cache: PublishedCache) -> Tensor:
        assert cache.steps is not None
        s, total, size = (
            self.ours.stride,
            int(cache.steps[0]),
            new.shape[1],
        )  # row 0 speaks for all; waits for the device
        latent, rotary = self._latents(new, total - size)
        slots = -(-total // s)
        if not cache.tensors and size > 1:
            ends = list(range(s - 1, size, s))
            if size % s:
                ends.append(size - 1)
            gates = self._gates(self._slot_gates(slots, latent), latent) * _chunk_mask(size, s)[ends].to(latent)
            cache.tensors = {"latent": gates @ latent, "rotary": rotary[:, ends]}
        else:
            gated = self._gates(self._slot_gates(1, latent, slots - 1), latent).mT * latent
            if not cache.tensors or total % s == 1:
                cache.grow("latent", gated, 1)
                cache.grow("rotary", rotary, 1)
            else:  # with stride 1 always, as published: every token falls into one slot
                cache.tensors["latent"][:, -1:] += gated
                cache.tensors["rotary"][:, -1:] = rotary
        return self._read(x, cache.tensors["latent"], cache.tensors["rotary"], total - 1, None)

    def quadratic_bytes(self, batch: int, text: int, prefix: int = 0, layers: int = 1) -> int:
        """Also the gates of all pairs, before and after sigmoid and mask, and the masks."""
        pairs = (prefix + text) ** 2 * self.ours.out.weight.itemsize
        return (
            super().quadratic_bytes(batch, text, prefix, layers)
            + layers * (2 * batch + 1) * pairs
            + (batch + 2) * pairs
        )


class FactorBuffers(PublishedCache):
    """Factors as the released functions of several ranks take them, (B, M, h, R) and (B, M, D, R), in full size.

    No model was released that fills a cache step by step: nothing is charged for growing it.
    """

    def __init__(self, batch: int, beam: int, capacity: int, prefix_capacity: int, buffers: dict[str, Tensor]) -> None:
        super().__init__(batch, beam, capacity, prefix_capacity)
        self.tensors, self.prefix_size = buffers, 0

    @property
    def used(self) -> int:
        return self.prefix_size + self.length

    def reorder(self, rows: Tensor) -> None:
        if len(rows) == self.batch:
            for tensor in self.tensors.values():
                tensor[:, : self.used] = tensor[rows, : self.used]
        else:
            super().reorder(rows)
            self.batch = len(rows)

    def grow(self, name: str, new: Tensor, dim: int) -> Tensor:
        self.tensors[name][:, self.used : self.used + new.shape[1]] = new
        return self.tensors[name][:, : self.used + new.shape[1]]


class PublishedTPA(Published):
    """Training: queries, keys and values of all heads in memory, six projections, a fused kernel for the softmax.

    Step: the torch reference of FlashTPA's release, five einsums over the cached factors.
    """

    def __init__(self, ours: Any) -> None:
        super().__init__(ours)
        if ours.nonlinearity != "none" or ours.third_dim is not None or not isinstance(ours.norm, torch.nn.Identity):
            raise LookupError("no published algorithm of TPA with nonlinear or third-order factors or norm is kept")

    def _factor(self, x: Tensor, source: str, first: int) -> tuple[Tensor, Tensor]:
        """(B, n, R, h) and (B, n, R, D), rotated if they are to be."""
        a = self.ours
        counts = {"q": a.q_rank, "k": a.rank, "v": a.rank}
        rows = [counts[s] * width for width in (a.num_heads, a.head_dim) for s in "qkv"]
        weights = a.factors.weight.split(rows)
        at = "qkv".index(source)
        head, token = (F.linear(x, weights[i]).unflatten(-1, (counts[source], -1)) for i in (at, at + 3))
        if source != "v":
            token = _turn(token.transpose(1, 2), first, a.rope_theta).transpose(1, 2)
        return head, token

    def _whole(self, x: Tensor, source: str, first: int) -> Tensor:
        """(B, h, n, D)."""
        a = self.ours
        if source == "q" and not a.factorised_queries:
            return _turn(_heads(a.query(x), a.num_heads), first, a.rope_theta)
        head, token = self._factor(x, source, first)
        return (head.mT @ token).div(head.shape[2]).transpose(1, 2)

    def attend(self, x: Tensor, joint: Tensor) -> Tensor:
        size, steps = joint.shape[1], x.shape[1]
        q, k, v = self._whole(x, "q", size - steps), self._whole(joint, "k", 0), self._whole(joint, "v", 0)
        if size == steps:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=_causal(steps, size, q.dtype, q.device))
        return self.ours.out(out.transpose(1, 2).flatten(2))

    def new_cache(
        self,
        batch: int,
        capacity: int,
        prefix_capacity: int = 0,
        *,
        prefix_batch: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> FactorBuffers:
        a, positions = self.ours, prefix_capacity + capacity
        like = a.out.weight.detach().new_empty(0, dtype=dtype, device=device)
        widths = {
            "key_head": a.num_heads,
            "key_token": a.head_dim,
            "value_head": a.num_heads,
            "value_token": a.head_dim,
        }
        buffers = {name: like.new_zeros(batch, positions, width, a.rank) for name, width in widths.items()}
        return FactorBuffers(batch, rows_per_prefix(batch, prefix_batch), capacity, prefix_capacity, buffers)

    def step(self, x: Tensor, new: Tensor, cache: PublishedCache) -> Tensor:
        assert isinstance(cache, FactorBuffers)
        a, first = self.ours, cache.used
        (kh, kt), (vh, vt) = (self._factor(new, source, first) for source in "kv")
        named = {"key_head": kh, "key_token": kt, "value_head": vh, "value_token": vt}
        kh, kt, vh, vt = (cache.grow(name, tensor.mT, 1) for name, tensor in named.items())
        last = kh.shape[1] - 1
        cache.prefix_size += new.shape[1] - 1
        if a.factorised_queries:
            qh, qt = self._factor(x, "q", last)
            product = torch.einsum("bnrd,bmds->bnmrs", qt, kt)
            product = torch.einsum("bnrh,bnmrs->bnmhs", qh, product)
        else:
            product = torch.einsum("bhnd,bmds->bnmhs", self._whole(x, "q", last), kt)
        logits = torch.einsum("bnmhs,bmhs->bhnm", product, kh) * a.scale
        weights = torch.einsum("bhnm,bmhu->bhnmu", _softmax(logits), vh)
        out = torch.einsum("bhnmu,bmeu->bnhe", weights, vt) / a.rank
        return a.out(out.flatten(2))

    def quadratic_bytes(self, batch: int, text: int, prefix: int = 0, layers: int = 1) -> int:
        """None without a prefix; with one, the mask."""
        return text * (prefix + text) * self.ours.out.weight.itemsize if prefix else 0


class PublishedMultiLinear(Published):
    """The whole N x N x N tensor, once per core, then averaged; no cache, so that a step computes its text anew.

    The mask, and for the relative form the picking of lags out of the tensor, are ours. The position key is left out:
    the release computes a second tensor of that size per core. A prefix, which it does not know, is read as ours is.
    """

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        _equally_long(lengths, x)
        a, steps = self.ours, x.shape[1]
        q, k, v = a.qkv(x).split(a.rank, -1)
        tensors = [torch.einsum("r,bir,bjr,bmr->bijm", g, q, k, v) for g in a.cores]
        if a.num_readouts == 1:
            tensors = [torch.stack(tensors).mean(0) if len(tensors) > 1 else tensors[0]]
        read = torch.cat([self._slices(tensor, steps) for tensor in tensors], -1)
        out = F.linear(read, self._weight(steps))
        if isinstance(a, AbsoluteMultiLinear):
            out = out * (a.window / torch.arange(1, steps + 1, device=x.device, dtype=x.dtype))[:, None]
        if prefix is None:
            return out
        _equally_long(prefix_lengths, prefix)
        _, k, v = a.qkv(prefix).split(a.rank, -1)
        cores = a.cores.mean(0, keepdim=True) if a.num_readouts == 1 else a.cores
        return out + a.prefix_out(torch.einsum("cr,bir,bsr,bsm->bicm", cores, q, k, v).flatten(2) / prefix.shape[1])

    def _slices(self, tensor: Tensor, steps: int) -> Tensor:
        """(B, T, T, T) -> what the read-out sees of it, (B, T, slots)."""
        place = torch.arange(steps, device=tensor.device)
        seen = place <= place[:, None]
        tensor = tensor * (seen[:, :, None] & seen[:, None])
        if isinstance(self.ours, AbsoluteMultiLinear):
            return tensor.flatten(2)
        window = self.ours.window
        lag = place[:, None] - torch.arange(window - 1, -1, -1, device=tensor.device)  # (T, n): j of each slot
        picked = tensor[:, place[:, None, None], lag.clamp(min=0)[:, :, None], lag.clamp(min=0)[:, None]]
        return (picked * ((lag >= 0)[:, :, None] & (lag >= 0)[:, None])).flatten(2)

    def _weight(self, steps: int) -> Tensor:
        weight = self.ours.out.weight
        if isinstance(self.ours, RelativeMultiLinear) or steps == self.ours.window:
            return weight
        return weight.unflatten(1, (-1, self.ours.window, self.ours.window))[..., :steps, :steps].flatten(1)

    def step(self, x: Tensor, new: Tensor, cache: PublishedCache) -> Tensor:
        prefix = cache.tensors.get("prefix")
        if new.shape[1] > 1:
            prefix = cache.grow("prefix", new[:, :-1], 1)
        return self(cache.grow("text", x, 1), prefix)[:, -1:]

    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        return batch * (capacity + prefix_capacity) * self.d_model

    def quadratic_bytes(self, batch: int, text: int, prefix: int = 0, layers: int = 1) -> int:
        """The tensor of each core, their mean, the masked one, and two gradients."""
        return int((layers * (self.ours.num_cores + 2) + 2) * batch * text**3 * self.ours.out.weight.itemsize)


def _equally_long(lengths: Tensor | None, x: Tensor) -> None:
    if lengths is not None and bool((lengths != x.shape[1]).any()):
        raise ValueError("the published algorithms know no padding: all rows must be equally long")


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


def _frequencies(width: int, theta: float, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    return theta ** (-torch.arange(0, width, 2, dtype=dtype, device=device) / width)


def _turn(x: Tensor, first: int, theta: float) -> Tensor:
    """Rotary embedding of x (..., n, D) at positions first ... first+n-1; its table is made at each call."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    positions = torch.arange(first, first + x.shape[-2], dtype=dtype, device=x.device)
    angles = positions[:, None] * _frequencies(x.shape[-1], theta, dtype, x.device)
    cos, sin = angles.cos(), angles.sin()
    left, right = x.to(dtype).chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


@kept(1)  # the release's decoder keeps this one
def _causal(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[zeros(S) | causal(N)], additive, (N, K)."""
    return torch.full((queries, keys), float("-inf"), dtype=dtype, device=device).triu(keys - queries + 1)


def _chunk_mask(size: int, stride: int) -> Tensor:
    """(K, K): 1 where b stands in a's chunk, at or before a."""
    a, b = torch.arange(size)[:, None], torch.arange(size)[None]
    return ((a // stride == b // stride) & (a % stride >= b % stride)).float()


def _stride_mask(size: int, stride: int) -> Tensor:
    """(K, K), additive: query i sees the ends of chunks up to i, and itself."""
    i, j = torch.arange(size)[:, None], torch.arange(size)[None]
    return torch.full((size, size), -1e9).masked_fill_(((j <= i) & ((j + 1) % stride == 0)) | (i == j), 0.0)
