"""The algorithms of T6's released system: tensor product attention."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.attention.base import rows_per_prefix
from attnlab.bench.baselines.base import PublishedCache, PublishedJoint, causal, heads, softmax, turn


class FactorBuffers(PublishedCache):
    """Factors as the released functions of several ranks take them, (B, M, h, R) and (B, M, D, R), in full size.

    No model was released that fills a cache step by step: nothing is charged for growing it.

    Args:
        batch: rows B.
        beam: rows that share one prefix.
        capacity: text positions of each row.
        prefix_capacity: positions of each prefix; M = capacity + prefix_capacity.
        buffers: the factors by name.
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


class PublishedTPA(PublishedJoint):
    """Training: queries, keys and values of all heads in memory, six projections, a fused kernel for the softmax.

    Step: the torch reference of FlashTPA's release, five einsums over the cached factors.

    Args:
        original: the `TPA`, whose weights are used.
    """

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        plain = original.nonlinearity == "none" and original.third_dim is None
        if not plain or not isinstance(original.norm, torch.nn.Identity):
            raise LookupError("there is no published algorithm of TPA with nonlinear or third-order factors or norm")

    def _factor(self, x: Tensor, source: str, first: int) -> tuple[Tensor, Tensor]:
        """(B, n, R, h) and (B, n, R, D), rotated if they are to be."""
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
        a, positions = self.original, prefix_capacity + capacity
        like = a.out.weight.detach().new_empty(0, dtype=dtype, device=device)
        widths = {
            "key_head": a.num_heads,
            "key_token": a.head_dim,
            "value_head": a.num_heads,
            "value_token": a.head_dim,
        }
        buffers = {name: like.new_zeros(batch, positions, width, a.rank) for name, width in widths.items()}
        cache = FactorBuffers(batch, rows_per_prefix(batch, prefix_batch), capacity, prefix_capacity, buffers)
        cache.made_by = self.makes
        return cache

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
        """None without a prefix; with one, the mask."""
        return text * (prefix + text) * self.original.out.weight.itemsize if prefix else 0
