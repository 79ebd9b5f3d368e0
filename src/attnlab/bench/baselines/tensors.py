"""Algorithms of the released systems of T6 and the Tensorized Transformer: tensor products and multi-linear forms."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.attention import AbsoluteMultiLinear, RelativeMultiLinear
from attnlab.bench.baselines.base import (
    Published,
    PublishedCache,
    PublishedJoint,
    causal,
    equally_long,
    heads,
    softmax,
    turn,
)


class FactorBuffers(PublishedCache):
    """Factors in the layout of the released functions for several ranks, (B, M, h, R) and (B, M, D, R).

    M = capacity + prefix_capacity. No released model fills a cache step by step, so that the baseline does not grow it.
    Arguments are those of `PublishedCache`.
    """

    def __init__(
        self, attention: Any, batch: int, capacity: int, prefix_capacity: int, beam: int, like: Tensor
    ) -> None:
        super().__init__(attention, batch, capacity, prefix_capacity, beam, like)
        a = attention.original
        widths = {"head": a.num_heads, "token": a.head_dim}
        self.tensors = {
            f"{source}_{part}": like.new_zeros(batch, prefix_capacity + capacity, width, a.rank)
            for source in ("key", "value")
            for part, width in widths.items()
        }
        self.prefix_size = 0

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


class PublishedTPA(PublishedJoint):
    """Training materialises queries, keys and values, with six projections and a fused kernel for the softmax.

    A step is the torch reference of FlashTPA's release, five einsums over the cached factors.
    """

    cache_type = FactorBuffers

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        plain = original.nonlinearity == "none" and original.third_dim is None
        if not plain or not isinstance(original.norm, torch.nn.Identity):
            raise LookupError("there is no published algorithm of TPA with nonlinear or third-order factors or norm")

    def _factor(self, x: Tensor, source: str, first: int) -> tuple[Tensor, Tensor]:
        """Head factors (B, n, R, h) and token factors (B, n, R, D), rotated for queries and keys."""
        a = self.original
        counts = {"q": a.q_rank, "k": a.rank, "v": a.rank}
        rows = [counts[s] * width for width in (a.num_heads, a.head_dim) for s in "qkv"]
        weights = a.factors.weight.split(rows)
        at = "qkv".index(source)
        head, token = (F.linear(x, weights[i]).unflatten(-1, (counts[source], -1)) for i in (at, at + 3))
        if source != "v":
            token = turn(token.transpose(1, 2), first, a.rope_theta).transpose(1, 2)
        return head, token

    def _whole(self, x: Tensor, source: str, first: int) -> Tensor:
        """(B, h, n, D)."""
        a = self.original
        if source == "q" and not a.factorised_queries:
            return turn(heads(a.query(x), a.num_heads), first, a.rope_theta)
        head, token = self._factor(x, source, first)
        return (head.mT @ token).div(head.shape[2]).transpose(1, 2)

    def attend(self, x: Tensor, joint: Tensor) -> Tensor:
        size, steps = joint.shape[1], x.shape[1]
        q, k, v = self._whole(x, "q", size - steps), self._whole(joint, "k", 0), self._whole(joint, "v", 0)
        if size == steps:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal(steps, size, q.dtype, q.device))
        return self.original.out(out.transpose(1, 2).flatten(2))

    def step(self, x: Tensor, new: Tensor, cache: PublishedCache) -> Tensor:
        assert isinstance(cache, FactorBuffers)
        a, first = self.original, cache.used
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
        weights = torch.einsum("bhnm,bmhu->bhnmu", softmax(logits), vh)
        out = torch.einsum("bhnmu,bmeu->bnhe", weights, vt) / a.rank
        return a.out(out.flatten(2))

    def quadratic_bytes(self, batch: int, text: int, prefix: int = 0, layers: int = 1) -> int:
        """The mask, if there is a prefix."""
        return text * (prefix + text) * self.original.out.weight.itemsize if prefix else 0


class PublishedMultiLinear(Published):
    """The full N x N x N tensor of each core, then their mean. There is no cache: a step computes its text again.

    As published (section 3.2, eq. 8), the slice A_i.. of a query is multiplied by W_O. Added are the causal mask
    j, m <= i, the row scale N / (i + 1) of the absolute form, whose row i sums (i + 1)^2 terms, and the selection of
    lags of the relative form. The position key is omitted, for which the release computes a second tensor of that size
    per core. A prefix, which the release lacks, is read as in `MultiLinear`.
    """

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        equally_long(lengths, x)
        a, steps = self.original, x.shape[1]
        q, k, v = a.qkv(x).split(a.rank, -1)
        tensors = [torch.einsum("r,bir,bjr,bmr->bijm", g, q, k, v) for g in a.core_weights()]
        if a.num_readouts == 1:
            tensors = [torch.stack(tensors).mean(0) if len(tensors) > 1 else tensors[0]]
        read = torch.cat([self._slices(tensor, steps) for tensor in tensors], -1)
        out = F.linear(read, self._weight(steps))
        if isinstance(a, AbsoluteMultiLinear):
            out = out * (a.window / torch.arange(1, steps + 1, device=x.device, dtype=x.dtype))[:, None]
        if prefix is None:
            return out
        equally_long(prefix_lengths, prefix)
        _, k, v = a.qkv(prefix).split(a.rank, -1)
        cores = a.core_weights()
        if a.num_readouts == 1:
            cores = cores.mean(0, keepdim=True)
        return out + a.prefix_out(torch.einsum("cr,bir,bsr,bsm->bicm", cores, q, k, v).flatten(2) / prefix.shape[1])

    def _slices(self, tensor: Tensor, steps: int) -> Tensor:
        """(B, T, T, T) -> inputs of the read-out, (B, T, slots)."""
        place = torch.arange(steps, device=tensor.device)
        seen = place <= place[:, None]
        tensor = tensor * (seen[:, :, None] & seen[:, None])
        if isinstance(self.original, AbsoluteMultiLinear):
            return tensor.flatten(2)
        window = self.original.window
        lag = place[:, None] - torch.arange(window - 1, -1, -1, device=tensor.device)  # (T, n): j of each slot
        picked = tensor[:, place[:, None, None], lag.clamp(min=0)[:, :, None], lag.clamp(min=0)[:, None]]
        return (picked * ((lag >= 0)[:, :, None] & (lag >= 0)[:, None])).flatten(2)

    def _weight(self, steps: int) -> Tensor:
        weight = self.original.out.weight
        if isinstance(self.original, RelativeMultiLinear) or steps == self.original.window:
            return weight
        return weight.unflatten(1, (-1, self.original.window, self.original.window))[..., :steps, :steps].flatten(1)

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
        """Bytes of the tensor of each core, their mean, the masked one, and two gradients."""
        return int((layers * (self.original.num_cores + 2) + 2) * batch * text**3 * self.original.out.weight.itemsize)
