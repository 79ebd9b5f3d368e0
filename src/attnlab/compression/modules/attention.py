"""Compressed attention for timm's vision transformers: modules in place of a whole attention module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.compression.decompositions import constrained_fusion
from attnlab.compression.modules.base import Dense, Replacement
from attnlab.compression.modules.dense import dense_heads
from attnlab.compression.modules.packing import Bucket, buckets

CACHED = 2**18  # logits that are computed at a time on a CPU: 1 MiB in float32


class CompressedAttention(Replacement):
    """What both forms share: R query and key columns, and of each head P_h value and output columns.

    `qkv` has the rows queries | keys | values, `query_bias` (R) is added to the queries, `proj` is (F', P).
    """

    rank: int
    value_rank: int
    value_ranks: list[int]
    num_heads: int
    heads: list[int]  # the numbers of the heads in the original layer
    scale: float
    qkv: nn.Linear
    query_bias: nn.Parameter
    proj: nn.Linear

    @abstractmethod
    def mixing(self) -> Tensor:
        """(H, R), float64: the weight of each column in each head's logits."""

    @abstractmethod
    def products(self) -> int:
        """Multiplications that give the logits of one pair of tokens in all heads."""

    def multiply_adds(self, tokens: int) -> int:
        """Projections, and the products of queries and keys and of weights and values."""
        inputs, outputs = self.qkv.in_features, self.proj.out_features
        projections = tokens * (inputs * (2 * self.rank + self.value_rank) + self.value_rank * outputs)
        return projections + tokens**2 * (self.products() + self.value_rank)

    def dense(self) -> tuple[Dense, float]:
        """q, k, v, o of heads whose width is scale^-2, and the relative error of the query-key tensor."""
        query, key, value = self.qkv.weight.double().split([self.rank, self.rank, self.value_rank])
        query = torch.cat([query, self.query_bias.double()[:, None]], -1)
        values, outputs = value.split(self.value_ranks), self.proj.weight.double().split(self.value_ranks, -1)
        width = round(self.scale**-2)
        return dense_heads(query, key, list(values), list(outputs), self.mixing(), self.heads, width, self.proj.bias)


class FactoredAttention(CompressedAttention):
    """Attention whose head h has its own query-key rank R_h and value-output rank P_h: TruncAtt, global SVD, IrrAtt.

        logits_g = scale * sum_h fusion[g, h] (x A_h + a_h) (x B_h)',     y = sum_g softmax(logits_g) x V_g O_g' + o

    x: (B, N, F) -> (B, N, F'). Heads are kept with falling R_h; `heads` has their numbers in the original layer.
    Without a fusion (the identity) neighbouring heads of similar ranks are packed to a common width and go through
    scaled_dot_product_attention, one call for each bucket. With one, logits are mixed before the softmax: (B, H, N, N)
    numbers, which no fused kernel does.

    Args:
        dim: F, the width of the input.
        ranks: R_h, the largest first.
        value_ranks: P_h, in the same order.
        scale: factor of the logits.
        out_dim: F', the width of the output; None: F.
        fused: whether there is a fusion, (H, H), trained with the rest (IrrAtt, section 3.1).
        heads: the numbers of the heads in the original layer; None: 0, 1, ...
        attn_drop: dropout rate of the attention weights.
        proj_drop: dropout rate of the output.

    Raises:
        ValueError: a rank below 1, or ranks in another order.
    """

    kind = "factored"

    def __init__(
        self,
        dim: int,
        ranks: Sequence[int],
        value_ranks: Sequence[int],
        scale: float,
        *,
        out_dim: int | None = None,
        fused: bool = False,
        heads: Sequence[int] | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if len(ranks) != len(value_ranks) or min(*ranks, *value_ranks) < 1:
            raise ValueError(f"ranks {list(ranks)} and {list(value_ranks)}: expected as many, each at least 1")
        if list(ranks) != sorted(ranks, reverse=True):
            raise ValueError(f"ranks {list(ranks)}: expected the largest first")
        self.ranks, self.value_ranks, self.scale = list(ranks), list(value_ranks), scale
        self.heads = list(range(len(ranks))) if heads is None else list(heads)
        self.num_heads, self.rank, self.value_rank = len(ranks), sum(ranks), sum(value_ranks)
        self.qkv = nn.Linear(dim, 2 * self.rank + self.value_rank, bias=False)  # rows: queries | keys | values
        self.query_bias = nn.Parameter(torch.zeros(self.rank))
        self.fusion = nn.Parameter(torch.eye(self.num_heads)) if fused else None
        self.proj = nn.Linear(self.value_rank, out_dim or dim)
        self.attn_drop, self.proj_drop = nn.Dropout(attn_drop), nn.Dropout(proj_drop)
        self.buckets = [Bucket(0, self.num_heads, max(ranks))] if fused else buckets(self.ranks, self.value_ranks)

    def layout(self) -> dict[str, Any]:
        return {
            "dim": self.qkv.in_features,
            "ranks": self.ranks,
            "value_ranks": self.value_ranks,
            "scale": self.scale,
            "out_dim": self.proj.out_features,
            "fused": self.fusion is not None,
            "heads": self.heads,
            "attn_drop": self.attn_drop.p,
            "proj_drop": self.proj_drop.p,
        }

    @property
    def weights(self) -> Tensor | None:
        """The fusion, (H, H); None: the identity."""
        return self.fusion

    def mixing(self) -> Tensor:
        fusion = torch.eye(self.num_heads).to(self.query_bias) if self.fusion is None else self.fusion
        return fusion.double().repeat_interleave(torch.tensor(self.ranks, device=fusion.device), -1)

    def products(self) -> int:
        return self.rank + (self.num_heads**2 if self.fusion is not None else 0)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        bias = F.pad(self.query_bias, (0, self.rank + self.value_rank))
        q, k, v = F.linear(x, self.qkv.weight, bias).split([self.rank, self.rank, self.value_rank], -1)
        if self.fusion is not None:
            y = self._mixed(q, k, v, attn_mask, is_causal)
        else:
            y = self._packed(q, k, v, attn_mask, is_causal)
        return self.proj_drop(self.proj(y))

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """(B, N, R), (B, N, R), (B, N, P) -> (B, N, P)."""
        dropout = self.attn_drop.p if self.training else 0.0
        found = []
        for bucket in self.buckets:
            mine, width = slice(bucket.first, bucket.end), bucket.width
            qs, ks = (_pack(z, self.ranks, bucket, width) for z in (q, k))
            vs = _pack(v, self.value_ranks, bucket, width)
            y = F.scaled_dot_product_attention(
                qs, ks, vs, attn_mask, dropout, is_causal=is_causal, scale=self.scale
            ).transpose(1, 2)  # (B, N, h, E)
            found.append(_unpack(y, self.value_ranks[mine]))
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        assert self.fusion is not None
        (bucket,) = self.buckets
        qs, ks = (_pack(z, self.ranks, bucket, bucket.width) for z in (q, k))
        vs = _pack(v, self.value_ranks, bucket, max(self.value_ranks))
        fusion = self.fusion.to(q.dtype) * self.scale

        def attend(qs: Tensor, ks: Tensor, vs: Tensor) -> Tensor:
            logits = qs @ ks.mT  # (B, H, N, N)
            logits = (fusion @ logits.flatten(2)).view_as(logits)
            return self.attn_drop(_softmax(logits, attn_mask, is_causal)) @ vs

        return _unpack(_in_parts(attend, qs, ks, vs, whole=attn_mask is not None).transpose(1, 2), self.value_ranks)


class SlimAttention(CompressedAttention):
    """CP SlimAtt: one query and one key projection of width R for all heads, weighted by each (IrrAtt, eq. 4).

        logits_h = scale * (x S^Q + a) diag(S^H[h]) (x S^K)'

    x: (B, N, F) -> (B, N, F'). Values and outputs have a rank of their own in each head.

    Args:
        dim: F, the width of the input.
        rank: R.
        value_ranks: P_h.
        scale: factor of the logits.
        out_dim: F', the width of the output; None: F.
        constrained: S^H satisfies eq. 7 at every step of training: it is `constrained_fusion` of the parameter
            `fusion`, which itself is free.
        attn_drop: dropout rate of the attention weights.
        proj_drop: dropout rate of the output.

    Raises:
        ValueError: a rank below 1, or fewer columns than heads with `constrained`.
    """

    kind = "slim"

    def __init__(
        self,
        dim: int,
        rank: int,
        value_ranks: Sequence[int],
        scale: float,
        *,
        out_dim: int | None = None,
        constrained: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if rank < 1 or min(value_ranks) < 1:
            raise ValueError(f"rank {rank}, value ranks {list(value_ranks)}: expected each at least 1")
        if constrained and rank < len(value_ranks):
            raise ValueError(f"rank {rank}: a constrained fusion of {len(value_ranks)} heads needs as many columns")
        self.rank, self.value_ranks, self.scale, self.constrained = rank, list(value_ranks), scale, constrained
        self.num_heads, self.value_rank = len(value_ranks), sum(value_ranks)
        self.heads = list(range(self.num_heads))
        self.qkv = nn.Linear(dim, 2 * rank + self.value_rank, bias=False)  # rows: queries | keys | values
        self.query_bias = nn.Parameter(torch.zeros(rank))
        self.fusion = nn.Parameter(torch.ones(self.num_heads, rank))
        self.proj = nn.Linear(self.value_rank, out_dim or dim)
        self.attn_drop, self.proj_drop = nn.Dropout(attn_drop), nn.Dropout(proj_drop)

    def layout(self) -> dict[str, Any]:
        return {
            "dim": self.qkv.in_features,
            "rank": self.rank,
            "value_ranks": self.value_ranks,
            "scale": self.scale,
            "out_dim": self.proj.out_features,
            "constrained": self.constrained,
            "attn_drop": self.attn_drop.p,
            "proj_drop": self.proj_drop.p,
        }

    @property
    def weights(self) -> Tensor:
        """S^H, (H, R): the parameter `fusion`, or what the constraint makes of it."""
        return constrained_fusion(self.fusion) if self.constrained else self.fusion

    def mixing(self) -> Tensor:
        return self.weights.double()

    def products(self) -> int:
        return self.num_heads * self.rank

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        bias = F.pad(self.query_bias, (0, self.rank + self.value_rank))
        q, k, v = F.linear(x, self.qkv.weight, bias).split([self.rank, self.rank, self.value_rank], -1)
        fusion = self.weights.to(q.dtype)[None, :, None, :] * self.scale

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            logits = (q[:, None] * fusion).flatten(1, 2) @ k.mT  # (B, H N, N): all heads share their keys
            logits = logits.unflatten(1, (self.num_heads, -1))
            return self.attn_drop(_softmax(logits, attn_mask, is_causal)) @ v

        widest = max(self.value_ranks)
        v = _pack(v, self.value_ranks, Bucket(0, self.num_heads, widest), widest)
        y = _in_parts(attend, q, k, v, whole=attn_mask is not None).transpose(1, 2)
        return self.proj_drop(self.proj(_unpack(y, self.value_ranks)))


def _pack(z: Tensor, ranks: Sequence[int], bucket: Bucket, width: int) -> Tensor:
    """Columns (B, N, sum ranks) of the bucket's heads, each filled up with zeros: (B, h, N, width)."""
    mine = ranks[bucket.first : bucket.end]
    begin = sum(ranks[: bucket.first])
    z = z[..., begin : begin + sum(mine)]
    if all(rank == width for rank in mine):
        return z.unflatten(-1, (len(mine), width)).transpose(1, 2)
    if len(set(mine)) == 1:
        return F.pad(z.unflatten(-1, (len(mine), mine[0])), (0, width - mine[0])).transpose(1, 2)
    zero = z.new_zeros(1).expand(*z.shape[:-1], width)
    pieces = [piece for part in z.split(list(mine), -1) for piece in (part, zero[..., : width - part.shape[-1]])]
    return torch.cat(pieces, -1).unflatten(-1, (len(mine), width)).transpose(1, 2)


def _unpack(y: Tensor, ranks: Sequence[int]) -> Tensor:
    """(B, N, h, E) -> (B, N, sum ranks): what was filled up falls away."""
    if len(set(ranks)) == 1:
        return y[..., : ranks[0]].flatten(2)
    return torch.cat([y[:, :, h, :rank] for h, rank in enumerate(ranks)], -1)


def _in_parts(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *, whole: bool) -> Tensor:
    """On a CPU without gradients, a few samples at a time, so that their logits stay in its cache."""
    heads, tokens = v.shape[1], v.shape[2]
    part = max(1, CACHED // (heads * tokens**2))
    if whole or torch.is_grad_enabled() or q.device.type != "cpu" or part >= len(q):
        return attend(q, k, v)
    return torch.cat([attend(*parts) for parts in zip(q.split(part), k.split(part), v.split(part), strict=True)])


def _softmax(logits: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    if is_causal:
        size = logits.shape[-1]
        attn_mask = torch.ones(size, size, dtype=torch.bool, device=logits.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=logits.dtype).masked_fill(~attn_mask, float("-inf"))
    logits = logits if attn_mask is None else logits + attn_mask
    exact = torch.float32 if logits.dtype in (torch.bfloat16, torch.float16) else None
    return logits.softmax(-1, dtype=exact).to(logits.dtype)
