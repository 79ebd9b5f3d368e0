"""Compressed attention modules for timm's vision transformers and GPT-2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.compression.decompositions.fusion import constrained_fusion
from attnlab.compression.modules.base import Dense, Replacement

CACHED = 2**18  # logits computed at a time on a CPU: 1 MiB in float32
ROUND = 8  # padded widths are multiples of this: vector registers, tensor cores
MOST = 3  # calls of scaled_dot_product_attention for heads of different ranks
CALL = 16  # cost of one more call, in columns of one head


class CompressedAttention(Replacement):
    """Base class: R query and key columns, and P_h value and output columns of each head.

    x: (B, N, F) -> (B, N, F'). `qkv` has the rows queries | keys | values, `query_bias` (R) is added to the queries,
    `proj` is (F', P).

    Args:
        dim: F, the width of the input.
    """

    heads: list[int]  # the numbers of the heads in the original layer
    layer: int | None = None  # in a decoder of transformers, the number of the layer in its cache

    def __init__(
        self,
        dim: int,
        rank: int,
        value_ranks: Sequence[int],
        scale: float,
        out_dim: int | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if rank < 1 or min(value_ranks) < 1:
            raise ValueError(f"rank {rank}, value ranks {list(value_ranks)}: expected each at least 1")
        self.rank, self.value_ranks, self.scale = rank, list(value_ranks), scale
        self.num_heads, self.value_rank = len(value_ranks), sum(value_ranks)
        self.qkv = nn.Linear(dim, 2 * rank + self.value_rank, bias=False)
        self.query_bias = nn.Parameter(torch.zeros(rank))
        self.proj = nn.Linear(self.value_rank, out_dim or dim)
        self.attn_drop, self.proj_drop = nn.Dropout(attn_drop), nn.Dropout(proj_drop)

    def layout(self) -> dict[str, Any]:
        return {
            "dim": self.qkv.in_features,
            "value_ranks": self.value_ranks,
            "scale": self.scale,
            "out_dim": self.proj.out_features,
            "attn_drop": self.attn_drop.p,
            "proj_drop": self.proj_drop.p,
        }

    @abstractmethod
    def mixing(self) -> Tensor:
        """(H, R), float64: the weight of each column in each head's logits."""

    @abstractmethod
    def products(self) -> int:
        """Multiplications for the logits of one pair of tokens in all heads."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """(B, N, R), (B, N, R), (B, N, P) -> (B, N, P)."""

    def bind(self, model: nn.Module, path: str) -> None:
        if hasattr(model, "generate"):
            self.layer = next(int(part) for part in path.split(".") if part.isdigit())

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Any:
        """The output; in a decoder of transformers, whose arguments have other names, (output, None)."""
        bias = F.pad(self.query_bias, (0, self.rank + self.value_rank))
        q, k, v = F.linear(x, self.qkv.weight, bias).split([self.rank, self.rank, self.value_rank], -1)
        if self.layer is None:
            return self.proj_drop(self.proj(self.attend(q, k, v, attn_mask, is_causal)))
        if past_key_values is not None:
            k, v = (z[:, 0] for z in past_key_values.update(k[:, None], v[:, None], self.layer))
        y = self.attend(q, k, v, attention_mask, attention_mask is None and q.shape[1] > 1)
        return self.proj_drop(self.proj(y)), None

    def multiply_adds(self, tokens: int) -> int:
        """Projections, and the products of queries and keys and of weights and values."""
        inputs, outputs = self.qkv.in_features, self.proj.out_features
        projections = tokens * (inputs * (2 * self.rank + self.value_rank) + self.value_rank * outputs)
        return projections + tokens**2 * (self.products() + self.value_rank)

    @torch.no_grad()
    def dense(self) -> tuple[Dense, float]:
        """q, k, v, o of heads whose width is scale^-2, and the relative error of the query-key tensor.

        If a head's effective query-key matrix has a higher rank than its width (a free fusion, CP SlimAtt), the nearest
        matrix of that rank is used (Eckart and Young).
        """
        query, key, value = self.qkv.weight.double().split([self.rank, self.rank, self.value_rank])
        query = torch.cat([query, self.query_bias.double()[:, None]], -1)
        values, outputs = value.split(self.value_ranks), self.proj.weight.double().split(self.value_ranks, -1)
        width, lost, square = round(self.scale**-2), 0.0, 0.0
        parts: dict[int, tuple[Tensor, ...]] = {}
        for head, weights, v, o in zip(self.heads, self.mixing(), values, outputs, strict=True):
            columns = weights.nonzero()[:, 0]
            left, right = (query[columns] * weights[columns][:, None]).T, key[columns].T
            if len(columns) > width:
                (q, r), (p, s) = torch.linalg.qr(left), torch.linalg.qr(right)
                u, singular, vh = torch.linalg.svd(r @ s.T)
                root = singular[:width].sqrt()
                left, right = q @ (u[:, :width] * root), p @ (vh[:width].T * root)
                lost, square = lost + float(singular[width:].square().sum()), square + float(singular.square().sum())
            else:
                square += float(((left.T @ left) * (right.T @ right)).sum())
            parts[head] = tuple(F.pad(side, (0, width - side.shape[-1])) for side in (left, right, v.T, o))
        q, k, v, o = (torch.cat([parts[h][i] for h in sorted(parts)], -1) for i in range(4))
        zero = q.new_zeros(q.shape[-1])
        matrices: Dense = {"q": (q[:-1].T, q[-1]), "k": (k.T, zero), "v": (v.T, zero), "o": (o, self.proj.bias)}
        return matrices, (lost / square) ** 0.5 if square else 0.0


class FactoredAttention(CompressedAttention):
    """Attention with a query-key rank R_h and a value-output rank P_h of each head h: TruncAtt, global SVD, IrrAtt.

        logits_g = scale * sum_h fusion[g, h] (x A_h + a_h) (x B_h)',     y = sum_g softmax(logits_g) x V_g O_g' + o

    Heads are sorted by falling R_h. Without a fusion (the identity) neighbouring heads of similar ranks are padded to a
    common width for scaled_dot_product_attention, one call for each bucket. With a fusion, logits are mixed before the
    softmax, (B, H, N, N) numbers, for which no fused kernel exists.

    Args:
        ranks: R_h, the largest first.
        value_ranks: P_h, in the same order.
        fused: with a fusion, (H, H), trained with the rest (IrrAtt, section 3.1).
        heads: the numbers of the heads in the original layer; None: 0, 1, ...
        Others are those of `CompressedAttention`.

    Raises:
        ValueError: a rank below 1, ranks in another order, or heads that are not 0, 1, ... in some order.
    """

    kind = "factored"

    def __init__(
        self,
        dim: int,
        ranks: Sequence[int],
        value_ranks: Sequence[int],
        scale: float,
        *,
        fused: bool = False,
        heads: Sequence[int] | None = None,
        **rest: Any,
    ) -> None:
        if len(ranks) != len(value_ranks) or min(ranks) < 1:
            raise ValueError(f"ranks {list(ranks)} and {list(value_ranks)}: expected as many, each at least 1")
        if list(ranks) != sorted(ranks, reverse=True):
            raise ValueError(f"ranks {list(ranks)}: expected the largest first")
        if heads is not None and sorted(heads) != list(range(len(ranks))):
            raise ValueError(f"heads {list(heads)}: expected 0 to {len(ranks) - 1}, each once")
        super().__init__(dim, sum(ranks), value_ranks, scale, **rest)
        self.ranks, self.heads = list(ranks), list(range(len(ranks)) if heads is None else heads)
        self.fusion = nn.Parameter(torch.eye(self.num_heads)) if fused else None
        self.buckets = [Bucket(0, self.num_heads, max(ranks))] if fused else buckets(self.ranks, self.value_ranks)

    def layout(self) -> dict[str, Any]:
        return super().layout() | {"ranks": self.ranks, "fused": self.fusion is not None, "heads": self.heads}

    @property
    def weights(self) -> Tensor | None:
        """The fusion, (H, H); None: the identity."""
        return self.fusion

    def mixing(self) -> Tensor:
        fusion = torch.eye(self.num_heads).to(self.query_bias) if self.fusion is None else self.fusion
        return fusion.double().repeat_interleave(torch.tensor(self.ranks, device=fusion.device), -1)

    def products(self) -> int:
        return self.rank + (self.num_heads**2 if self.fusion is not None else 0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        if self.fusion is not None:
            return self._mixed(self.fusion, q, k, v, attn_mask, is_causal)
        dropout = self.attn_drop.p if self.training else 0.0
        outputs = []
        for bucket in self.buckets:
            heads, width = slice(bucket.first, bucket.end), bucket.width
            qs, ks = (_pack(z, self.ranks, bucket, width) for z in (q, k))
            vs = _pack(v, self.value_ranks, bucket, width)
            y = F.scaled_dot_product_attention(
                qs, ks, vs, attn_mask, dropout, is_causal=is_causal, scale=self.scale
            ).transpose(1, 2)  # (B, N, h, E)
            outputs.append(_unpack(y, self.value_ranks[heads]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def _mixed(
        self, fusion: Tensor, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        (bucket,) = self.buckets
        qs, ks = (_pack(z, self.ranks, bucket, bucket.width) for z in (q, k))
        vs = _pack(v, self.value_ranks, bucket, max(self.value_ranks))
        fusion = fusion.to(q.dtype) * self.scale

        def attend(qs: Tensor, ks: Tensor, vs: Tensor) -> Tensor:
            logits = qs @ ks.mT  # (B, H, N, N)
            logits = (fusion @ logits.flatten(2)).view_as(logits)
            return self.attn_drop(_softmax(logits, attn_mask, is_causal)) @ vs

        return _unpack(_in_parts(attend, qs, ks, vs, masked=attn_mask is not None).transpose(1, 2), self.value_ranks)


class SlimAttention(CompressedAttention):
    """CP SlimAtt: one query and one key projection of width R for all heads, weighted by each (IrrAtt, eq. 4).

        logits_h = scale * (x S^Q + a) diag(S^H[h]) (x S^K)'

    Args:
        constrained: S^H satisfies eq. 7 at every step of training, as `constrained_fusion` of the parameter `fusion`.
        Others are those of `CompressedAttention`.

    Raises:
        ValueError: a rank below 1, or fewer columns than heads with `constrained`.
    """

    kind = "slim"

    def __init__(
        self, dim: int, rank: int, value_ranks: Sequence[int], scale: float, *, constrained: bool = False, **rest: Any
    ) -> None:
        super().__init__(dim, rank, value_ranks, scale, **rest)
        if constrained and rank < len(value_ranks):
            raise ValueError(f"rank {rank}: a constrained fusion of {len(value_ranks)} heads needs as many columns")
        self.constrained, self.heads = constrained, list(range(self.num_heads))
        self.fusion = nn.Parameter(torch.ones(self.num_heads, rank))

    def layout(self) -> dict[str, Any]:
        return super().layout() | {"rank": self.rank, "constrained": self.constrained}

    @property
    def weights(self) -> Tensor:
        """S^H, (H, R): the parameter `fusion`, constrained if `constrained` is set."""
        return constrained_fusion(self.fusion) if self.constrained else self.fusion

    def mixing(self) -> Tensor:
        return self.weights.double()

    def products(self) -> int:
        return self.num_heads * self.rank

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        fusion = self.weights.to(q.dtype)[None, :, None, :] * self.scale

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            logits = (q[:, None] * fusion).flatten(1, 2) @ k.mT  # (B, H N, N): all heads share their keys
            logits = logits.unflatten(1, (self.num_heads, -1))
            return self.attn_drop(_softmax(logits, attn_mask, is_causal)) @ v

        widest = max(self.value_ranks)
        v = _pack(v, self.value_ranks, Bucket(0, self.num_heads, widest), widest)
        y = _in_parts(attend, q, k, v, masked=attn_mask is not None).transpose(1, 2)
        return _unpack(y, self.value_ranks)


def _pack(z: Tensor, ranks: Sequence[int], bucket: Bucket, width: int) -> Tensor:
    """Columns (B, N, sum ranks) of the bucket's heads, each padded with zeros: (B, h, N, width)."""
    in_bucket = ranks[bucket.first : bucket.end]
    begin = sum(ranks[: bucket.first])
    z = z[..., begin : begin + sum(in_bucket)]
    if all(rank == width for rank in in_bucket):
        return z.unflatten(-1, (len(in_bucket), width)).transpose(1, 2)
    if len(set(in_bucket)) == 1:
        return F.pad(z.unflatten(-1, (len(in_bucket), in_bucket[0])), (0, width - in_bucket[0])).transpose(1, 2)
    zero = z.new_zeros(1).expand(*z.shape[:-1], width)
    pieces = [piece for part in z.split(list(in_bucket), -1) for piece in (part, zero[..., : width - part.shape[-1]])]
    return torch.cat(pieces, -1).unflatten(-1, (len(in_bucket), width)).transpose(1, 2)


def _unpack(y: Tensor, ranks: Sequence[int]) -> Tensor:
    """(B, N, h, E) -> (B, N, sum ranks): drop the padding."""
    if len(set(ranks)) == 1:
        return y[..., : ranks[0]].flatten(2)
    return torch.cat([y[:, :, h, :rank] for h, rank in enumerate(ranks)], -1)


def _in_parts(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *, masked: bool) -> Tensor:
    """On a CPU without gradients, a few samples at a time, so that their logits stay in its cache."""
    heads, tokens = v.shape[1], v.shape[2]
    part = max(1, CACHED // (heads * tokens**2))
    if masked or torch.is_grad_enabled() or q.device.type != "cpu" or part >= len(q):
        return attend(q, k, v)
    return torch.cat([attend(*parts) for parts in zip(q.split(part), k.split(part), v.split(part), strict=True)])


def _softmax(logits: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    if is_causal:
        size = logits.shape[-1]
        attn_mask = torch.ones(size, size, dtype=torch.bool, device=logits.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # a row of padding alone stays finite
        logits = logits.masked_fill(~attn_mask, torch.finfo(logits.dtype).min)
    elif attn_mask is not None:
        logits = logits + attn_mask
    exact = torch.float32 if logits.dtype in (torch.bfloat16, torch.float16) else None
    return logits.softmax(-1, dtype=exact).to(logits.dtype)


@dataclass(frozen=True)
class Bucket:
    """Heads `first` to `end` - 1, padded to `width`: one call of scaled_dot_product_attention."""

    first: int
    end: int
    width: int


def buckets(ranks: Sequence[int], value_ranks: Sequence[int]) -> list[Bucket]:
    """The cheapest split of heads, sorted by falling rank, into at most three buckets.

    A bucket is as wide as its widest query or value, because fused kernels need equal widths; its cost is its number
    of heads times its width. Heads of one rank for queries and values are not padded.
    """
    heads = len(ranks)

    def width(first: int, end: int) -> int:
        widest = max(*ranks[first:end], *value_ranks[first:end])
        same = {*ranks[first:end], *value_ranks[first:end]} == {widest}
        return widest if same else -(-widest // ROUND) * ROUND

    best: tuple[int, list[Bucket]] | None = None
    for count in range(1, min(MOST, heads) + 1):
        for cuts in combinations(range(1, heads), count - 1):
            edges = [0, *cuts, heads]
            cut = [Bucket(a, b, width(a, b)) for a, b in zip(edges, edges[1:], strict=False)]
            price = sum((bucket.end - bucket.first) * bucket.width for bucket in cut) + CALL * count
            if best is None or price < best[0]:
                best = price, cut
    assert best is not None
    return best[1]
