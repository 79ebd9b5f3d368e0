"""Base class of methods that decompose the query-key tensor of attention layers."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from attnlab.compression.decompositions.slices import Slices
from attnlab.compression.decompositions.svd import BlockTerms, global_svd, spectrum, truncated_svd
from attnlab.compression.keep import grid, value_of
from attnlab.compression.methods.base import (
    Change,
    KeepOf,
    Ladder,
    Method,
    Share,
    Step,
    Unit,
    Watch,
    already_compressed,
    counts_what,
    settings_of,
)
from attnlab.compression.methods.mlp_svd import mlp_units
from attnlab.compression.modules.attention import CompressedAttention, FactoredAttention, SlimAttention
from attnlab.config.bounds import Rank
from attnlab.errors import ConfigError
from attnlab.pretrained import family_of
from attnlab.pretrained.base import ATTENTION, Layer

ValueRanks = Literal["truncatt", "irratt"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of an attention layer."""

    dim: int  # F, width of inputs
    heads: int  # H
    width: int  # D, of a head
    out_dim: int  # F', width of outputs
    scale: float  # factor of the logits
    attn_drop: float = 0.0
    proj_drop: float = 0.0

    @classmethod
    def of(cls, layer: Layer) -> Sizes:
        """ConfigError: products of the layer's weights do not determine its output, or heads share keys."""
        if reason := layer.refusals.get("attention") or layer.refusals.get("products"):
            raise ConfigError(reason)
        q, k, o = (layer.projections[name] for name in "qko")
        if q.heads != k.heads:
            raise ConfigError(f"{layer.attention}: {q.heads} heads share {k.heads} keys: no query-key tensor of heads")
        return cls(q.shape[1], q.heads, q.width, o.shape[0], layer.scale, *layer.dropout)

    @property
    def rest(self) -> dict[str, Any]:
        """The arguments common to all modules."""
        return {"out_dim": self.out_dim, "attn_drop": self.attn_drop, "proj_drop": self.proj_drop}


@dataclass(frozen=True)
class Heads:
    """An attention layer's weights by head, in float64, with its biases in two places.

    Args:
        query: (H, F + 1, D), the last row its bias: the homogeneous coordinate.
        key: (H, F, D), without its bias, which adds the same number to all logits of a query.
        value: (H, F, D), without its bias, which is in `bias`: attention weights sum to 1.
        output: (H, F', D).
        bias: of the output, (F').
        scale: factor of the logits.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    bias: Tensor
    scale: float

    @classmethod
    def of(cls, model: nn.Module, layer: Layer) -> Heads:
        """Read a layer's projections."""
        places = [layer.projections[name] for name in ATTENTION]
        query, key, value, output = (place.split(place.read(model).double()) for place in places)
        biases = {name: layer.projections[name].read_bias(model) for name in "qvo"}
        heads, _, width = query.shape
        first = query.new_zeros(heads, 1, width) if biases["q"] is None else biases["q"].double().view(heads, 1, width)
        folded = output.new_zeros(output.shape[1])
        if (carried := biases["v"]) is not None:
            folded = torch.einsum("hod,hd->o", output, carried.double().view(heads, -1))
        if (last := biases["o"]) is not None:
            folded = folded + last.double()
        return cls(torch.cat([query, first], 1), key, value, output, folded, layer.scale)

    @property
    def qk(self) -> Slices:
        """Y^QK: X' Y_h X are head h's logits, where X' has a column of ones (IrrAtt, section 2.3)."""
        return Slices(self.query, self.key)

    @property
    def vo(self) -> Slices:
        """Y^VO: X Y_h is head h's output of each position, before the weighted sum."""
        return Slices(self.value, self.output)

    @property
    def width(self) -> int:
        """D, of a head."""
        return self.key.shape[-1]


Fit = tuple[CompressedAttention, dict[str, Any]]  # the layer in float64, and plain values for the report


@dataclass(eq=False)
class QueryKeyMethod(Method):
    """A low-rank form of the query-key tensor of every layer; values and outputs, and on request MLPs, by SVD.

    Args:
        rank: of the query-key tensor; None: half of the exact rank, at least one for each head.
        vo_rank: of each head's value-output matrix; None: half the head's width.
        mlp_rank: of both matrices of an MLP; None: MLPs stay dense.
        keep: the remaining share of `keep_of`.
        vo: "truncatt": the value-output matrices of all heads have the same rank, as in table 1; "irratt": ranks differ
            between heads, `vo_rank` on average (table 2): those of the largest singular values over all heads.
        keep_of: "parameters": `keep` of all layers' q, k, v and o remain; `rank` and `vo_rank` are chosen for each
            layer, by the singular values of both tensors, and a layer may stay dense. "multiply_adds": section 3.4:
            each layer alone keeps at most this share of its multiply-adds, at `vo_rank` and the largest `rank` that
            allows it, so that layers of equal sizes have equal ranks.

    Attributes:
        per_head: `rank` is that of each head, not of all heads together.

    Raises:
        ConfigError: `keep` beside a rank that it chooses.
    """

    rank: Rank | None = None
    vo_rank: Rank | None = None
    mlp_rank: Rank | None = None
    keep: Share | None = None
    vo: ValueRanks = "truncatt"
    keep_of: KeepOf = "parameters"

    per_head: ClassVar[bool] = False

    def __post_init__(self) -> None:
        counts_what(self.keep, self.keep_of)
        of_parameters = self.keep_of == "parameters"
        if self.keep is not None and (self.rank is not None or (self.vo_rank is not None and of_parameters)):
            free = "rank= and compress.vo_rank" if of_parameters else "rank="
            raise ConfigError(f"compress.keep chooses the ranks; give it, or {free}")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a unit."""
        return settings_of(self, "mlp_rank")

    @abstractmethod
    def outline(self, sizes: Sizes) -> CompressedAttention:
        """A layer of the sizes of a fit, with evenly distributed ranks and any weights."""

    @abstractmethod
    def fit(self, heads: Heads, sizes: Sizes, watch: Watch) -> Fit:
        """Decompose a layer, in float64."""

    def units(self, model: nn.Module, layers: Sequence[Layer]) -> list[Unit]:
        attentions = [(layer, layer.attention) for layer in layers if layer.attention is not None]
        if not attentions:
            raise ConfigError(f"{type(model).__name__} has no attention with a qkv projection: nothing to compress")
        units = [
            (self if value is None else self._at(value))._unit(model, layer, path)
            for layer, path in attentions
            for compressed, value in [value_of(self.chosen, path)]
            if compressed
        ]
        return units + ([] if self.mlp_rank is None else mlp_units(model, layers, self.mlp_rank))

    def ladders(self, model: nn.Module, layers: Sequence[Layer]) -> list[Ladder]:
        self.units(model, layers)  # raises ConfigErrors
        return [self._ladder(model, layer, layer.attention) for layer in layers if layer.attention is not None]

    def _ladder(self, model: nn.Module, layer: Layer, path: str) -> Ladder:
        sizes = Sizes.of(layer)
        shape = sizes.heads, sizes.width
        if next(model.parameters()).is_meta:
            qk = vo = torch.ones(shape, dtype=torch.float64, device="cpu")
        else:
            heads = Heads.of(model, layer)
            qk, vo = (spectrum(tensor).values.square().cpu() for tensor in (heads.qk, heads.vo))
        steps = []
        for rank in grid(sizes.width):
            value = [rank if self.per_head else rank * sizes.heads, rank]
            with torch.device("meta"):
                module = self._at(value).outline(sizes)
            count = sum(p.numel() for name, p in module.named_parameters() if not name.endswith("bias"))
            lost = _lost(qk, rank, self.per_head) + _lost(vo, rank, self.vo == "truncatt")
            steps.append(Step(count, lost, value))
        return Ladder(path, sum(math.prod(layer.projections[name].shape) for name in ATTENTION), steps)

    def rated(self, model: nn.Module, layers: Sequence[Layer]) -> dict[str, Any]:
        tokens = family_of(model).tokens(model)
        if tokens is None:
            raise ConfigError(
                f"compress.keep_of=multiply_adds: {type(model).__name__} reads texts of any length, on which the share "
                "depends; give keep_of=parameters"
            )
        plain = self._at((None, self.vo_rank))
        plain.units(model, layers)  # raises ConfigErrors
        return {
            layer.attention: plain._rated(self.keep or 1.0, layer, tokens)
            for layer in layers
            if layer.attention is not None
        }

    def _rated(self, keep: float, layer: Layer, tokens: int) -> list[int]:
        """The largest query-key rank at which a layer keeps its share of multiply-adds, and the value-output rank."""
        sizes = Sizes.of(layer)
        least, most = (1, sizes.width) if self.per_head else (sizes.heads, sizes.heads * sizes.width)
        vo_rank = self.ranks(sizes, str(layer.attention))[1]
        low, high = (self._cost((rank, vo_rank), sizes, tokens) for rank in (least, most))
        dense = layer.attention_multiply_adds(tokens)
        if low > keep * dense:
            raise ConfigError(
                f"compress.keep={keep}: {layer.attention} can keep {math.ceil(1e4 * low / dense) / 1e4:.4f} to "
                f"{math.ceil(1e4 * min(high, dense) / dense) / 1e4:.4f} of its multiply-adds, at vo_rank {vo_rank}; "
                "expected a share between, or another compress.vo_rank"
            )
        slope = max(1, (high - low) // max(1, most - least))  # the cost is linear in the rank
        return [min(most, least + int((keep * dense - low) // slope)), vo_rank]

    def _cost(self, value: Sequence[int], sizes: Sizes, tokens: int) -> int:
        """Multiply-adds of a layer with these ranks."""
        with torch.device("meta"):
            return self._at(value).outline(sizes).multiply_adds(tokens)

    def _at(self, value: Sequence[int | None]) -> QueryKeyMethod:
        """The method with these ranks, and without a budget."""
        method = copy.copy(self)
        (method.rank, method.vo_rank), method.keep, method.chosen = value, None, None
        return method

    def _unit(self, model: nn.Module, layer: Layer, path: str) -> Unit:
        module = model.get_submodule(path)
        if isinstance(module, CompressedAttention):
            return self.again(module, path)
        sizes = Sizes.of(layer)
        self.ranks(sizes, path)
        return self.unit(
            path, lambda: self.outline(sizes), lambda watch: self.fit(Heads.of(model, layer), sizes, watch)
        )

    def unit(self, path: str, outline: Callable[[], CompressedAttention], fit: Callable[[Watch], Fit]) -> Unit:
        """The unit of one attention module."""

        def fitted(watch: Watch) -> Change:
            module, report = fit(watch)
            return Change({path: module}, report=report)

        return Unit(path, [path], self.settings, fitted, lambda: Change({path: outline()}))

    def again(self, module: CompressedAttention, path: str) -> Unit:
        """The unit of a compressed module. ConfigError, except for methods that continue from it."""
        raise already_compressed(path)

    def values(self, heads: Heads, rank: int, report: dict[str, Any]) -> BlockTerms:
        """Decompose the value-output tensor; `report` gets the relative error, and with vo="irratt" the ranks.

        Args:
            rank: of each head's matrix; with vo="irratt" on average.
        """
        if self.vo == "truncatt":
            factors = truncated_svd(heads.vo, rank)
        else:
            factors = global_svd(heads.vo, rank * len(heads.value))
            report["vo_ranks"] = factors.ranks
        report["vo_error"] = factors.error
        return factors

    def ranks(self, sizes: Sizes, path: str = "attention") -> tuple[int, int]:
        """The query-key and value-output ranks of a layer. ConfigError: out of bounds for its sizes."""
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

    def rank_of(self, report: Mapping[str, Any]) -> int | None:
        if self.keep is not None and self.keep_of == "parameters":
            return None
        ranks = report["ranks"]
        total = sum(ranks) if isinstance(ranks, list) else int(ranks)
        return total // len(ranks) if self.per_head else total


def _lost(squares: Tensor, rank: int, uniform: bool) -> float:
    """The relative squared error at a rank of each head, or on average; squares: of singular values, (H, D)."""
    largest = squares[:, :rank] if uniform else squares.flatten().topk(rank * len(squares)).values
    return float(1 - largest.sum() / squares.sum())


def factored(terms: BlockTerms, vo: BlockTerms, bias: Tensor, sizes: Sizes, *, fused: bool) -> FactoredAttention:
    """The layer of these terms, with heads by falling rank.

    Args:
        bias: of the output, (F').
        fused: use the terms' fusion; False: the identity.
    """
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
    """Set the weights: query (F + 1, R), whose last row is the bias, key (F, R), value (F, P), output (F', P)."""
    module.qkv.weight.copy_(torch.cat([query[:-1], key, value], -1).T)
    module.query_bias.copy_(query[-1])
    module.proj.weight.copy_(output)
