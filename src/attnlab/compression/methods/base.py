"""What every method has: ranks, their bounds, and what is common to all: value-output and MLP by truncated SVD."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.compression.decompositions import BlockTerms, low_rank, truncated_svd
from attnlab.compression.modules.attention import FactoredAttention, LowRankLinear, SlimAttention
from attnlab.errors import ConfigError
from attnlab.pretrained.timm import Heads

Watch = Callable[[str, int, int], None]  # what is being computed, sweeps done, sweeps at most


@dataclass(frozen=True)
class Sizes:
    """Of an attention layer: F, H, D, F', the logits' scale, dropouts."""

    dim: int
    heads: int
    width: int
    out_dim: int
    scale: float
    attn_drop: float = 0.0
    proj_drop: float = 0.0

    @property
    def rest(self) -> dict[str, Any]:
        return {"out_dim": self.out_dim, "attn_drop": self.attn_drop, "proj_drop": self.proj_drop}


@dataclass(frozen=True)
class Fit:
    """A compressed layer and what is worth knowing of it (plain values)."""

    module: FactoredAttention | SlimAttention
    report: dict[str, Any] = field(default_factory=dict)


class Method(ABC):
    """A way to compress the query-key tensor of attention layers; values and outputs, and on request MLPs, by SVD.

    rank: of the query-key tensor; null: half of what is exact, at least one for each head. vo_rank: of each head's
    value-output matrix; null: half the head's width. mlp_rank: of both matrices of an MLP; null: MLPs stay as they
    are. ValueError: a rank below 1.
    """

    per_head = False  # whether `rank` counts for each head, or for all together
    compresses_attention = True

    def __init__(self, rank: int | None = None, vo_rank: int | None = None, mlp_rank: int | None = None) -> None:
        for name, value in (("rank", rank), ("vo_rank", vo_rank), ("mlp_rank", mlp_rank)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
        self.rank, self.vo_rank, self.mlp_rank = rank, vo_rank, mlp_rank

    def settings(self) -> dict[str, Any]:
        """What makes two fits of the same weights differ."""
        return {"method": type(self).__name__, **{k: v for k, v in vars(self).items() if k not in ("mlp_rank",)}}

    def ranks(self, sizes: Sizes, path: str = "attention") -> tuple[int, int]:
        """Query-key and value-output rank in use. ConfigError: out of bounds for a layer of these sizes."""
        heads, width = sizes.heads, sizes.width
        least, most = (1, width) if self.per_head else (heads, heads * width)
        rank = max(least, (most + 1) // 2) if self.rank is None else self.rank
        what = f"of a head, whose width is {width}" if self.per_head else f"of all {heads} heads of width {width}"
        if not least <= rank <= most:
            raise ConfigError(f"rank={rank}: {path} takes {least} to {most}, the query-key rank {what}")
        vo_rank = (width + 1) // 2 if self.vo_rank is None else self.vo_rank
        if vo_rank > width:
            raise ConfigError(f"compress.vo_rank={vo_rank}: {path} takes 1 to {width}, the width of a head")
        return rank, vo_rank

    def mlp_shape(self, dim: int, out_dim: int, path: str) -> int:
        """The rank of an MLP's matrix. ConfigError: above what it can have."""
        assert self.mlp_rank is not None
        if self.mlp_rank > min(dim, out_dim):
            raise ConfigError(
                f"compress.mlp_rank={self.mlp_rank}: {path} ({dim} x {out_dim}) takes 1 to {min(dim, out_dim)}"
            )
        return self.mlp_rank

    @abstractmethod
    def outline(self, sizes: Sizes) -> FactoredAttention | SlimAttention:
        """A layer with the size and arithmetic of a fit, its ranks shared out evenly; for counting, without weights."""

    @abstractmethod
    def fit(self, heads: Heads, sizes: Sizes, watch: Watch) -> Fit:
        """Decompose, in float64; the module's weights are float64 too."""

    def refit(self, slim: SlimAttention) -> Fit:
        """From a trained CP SlimAtt layer. ConfigError, except for methods that start from one."""
        raise ConfigError(f"{type(self).__name__}: the model is compressed already; start from an uncompressed one")

    def fit_linear(self, linear: nn.Linear, path: str) -> tuple[LowRankLinear, float]:
        """A matrix of an MLP, in float64, and its relative error."""
        rank = self.mlp_shape(linear.in_features, linear.out_features, path)
        a, b, error = low_rank(linear.weight, rank)
        pair = LowRankLinear(linear.in_features, rank, linear.out_features, bias=linear.bias is not None).double()
        weights = {"0.weight": b, "1.weight": a}
        pair.load_state_dict(weights if linear.bias is None else weights | {"1.bias": linear.bias.detach()})
        return pair, error


def values(heads: Heads, rank: int) -> BlockTerms:
    """The value-output tensor, head by head (TruncAtt, as in all rows of table 1)."""
    return truncated_svd(heads.vo, rank)


def factored(terms: BlockTerms, vo: BlockTerms, bias: Tensor, sizes: Sizes, *, fused: bool) -> FactoredAttention:
    """The layer of these terms, heads in the order of falling rank."""
    order = sorted(range(len(terms.ranks)), key=lambda h: -terms.ranks[h])
    module = FactoredAttention(
        sizes.dim,
        [terms.ranks[h] for h in order],
        [vo.ranks[h] for h in order],
        sizes.scale,
        fused=fused,
        heads=order,
        **sizes.rest,
    ).double()
    left, right = (torch.cat([side[h] for h in order], -1) for side in (terms.left, terms.right))
    fill(module, left, right, torch.cat([vo.left[h] for h in order], -1), torch.cat([vo.right[h] for h in order], -1))
    with torch.no_grad():
        module.proj.bias.copy_(bias)
        if module.fusion is not None:
            module.fusion.copy_(terms.fusion[order][:, order])
    return module


@torch.no_grad()
def fill(module: FactoredAttention | SlimAttention, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
    """Weights in columns: query (F + 1, R), key (F, R), value (F, P), output (F', P)."""
    module.qkv.weight.copy_(torch.cat([query[:-1], key, value], -1).T)
    module.query_bias.copy_(query[-1])
    module.proj.weight.copy_(output)


def even(total: int, heads: int) -> list[int]:
    """A total shared out as evenly as can be, the larger shares first."""
    return [total // heads + (h < total % heads) for h in range(heads)]
