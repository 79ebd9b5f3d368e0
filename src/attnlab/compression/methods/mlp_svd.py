"""Truncated SVD of MLP matrices; attention stays dense (IrrAtt, table 1, "Original" with an MLP rank)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.compression.decompositions.svd import low_rank
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
    counts_what,
    fitted_pair,
    pair,
)
from attnlab.config.bounds import Rank
from attnlab.errors import ConfigError
from attnlab.pretrained.base import Layer, Projection


@dataclass(eq=False)
class MLPSVD(Method):
    """Each matrix of every MLP as a product of two.

    Args:
        mlp_rank: the rank of each matrix, at most its smaller side; None: `keep` chooses it.
        keep_of: "parameters": of all MLPs together; the rank is then chosen for each MLP by its singular values.
            "multiply_adds": of each MLP alone, the largest rank that allows it (IrrAtt, section 3.4).

    Raises:
        ConfigError: not exactly one of `mlp_rank` and `keep`, or `keep_of` without `keep`.
    """

    mlp_rank: Rank | None = None
    keep: Share | None = None
    keep_of: KeepOf = "parameters"

    def __post_init__(self) -> None:
        counts_what(self.keep, self.keep_of)
        if (self.mlp_rank is None) == (self.keep is None):
            raise ConfigError("compress.keep chooses the ranks; give it, or compress.mlp_rank (rank=)")

    def units(self, model: nn.Module, layers: Sequence[Layer]) -> list[Unit]:
        if self.chosen is None:
            assert self.mlp_rank is not None
            return mlp_units(model, layers, self.mlp_rank)
        return [
            unit
            for layer in layers
            if layer.mlp is not None and (rank := value_of(self.chosen, layer.mlp)[1]) is not None
            for unit in mlp_units(model, [layer], rank)
        ]

    def _mlps(self, model: nn.Module, layers: Sequence[Layer]) -> Iterator[tuple[str, list[Projection]]]:
        """The path and the matrices of each MLP."""
        mlp_units(model, layers, 1)  # raises ConfigErrors
        for layer in layers:
            if layer.mlp is not None:
                yield layer.mlp, [layer.projections[name] for name in layer.matrices]

    def ladders(self, model: nn.Module, layers: Sequence[Layer]) -> list[Ladder]:
        return [
            matrix_ladder(model, path, matrices, min(min(matrix.shape) for matrix in matrices))
            for path, matrices in self._mlps(model, layers)
        ]

    def rated(self, model: nn.Module, layers: Sequence[Layer]) -> dict[str, Any]:
        assert self.keep is not None
        ranks = {}
        for path, matrices in self._mlps(model, layers):
            shapes = [matrix.shape for matrix in matrices]
            dense, least = sum(map(math.prod, shapes)), sum(map(sum, shapes))
            if least > self.keep * dense:
                share = f"{least / dense:.4f} to 1 of its multiply-adds"
                raise ConfigError(f"compress.keep={self.keep}: {path} can keep {share}")
            ranks[path] = min(int(self.keep * dense / least), *map(min, shapes))
        return ranks

    def rank_of(self, report: Mapping[str, Any]) -> int | None:
        return int(report["ranks"]) if self.keep is None else None


def matrix_ladder(model: nn.Module, path: str, matrices: Sequence[Projection], most: int) -> Ladder:
    """Ranks 1 to `most` of several matrices together, each as two factors."""
    lost = [lost_squares(matrix.read(model)) for matrix in matrices]
    count = sum(sum(matrix.shape) for matrix in matrices)
    steps = [Step(rank * count, sum(float(errors[rank]) for errors in lost), rank) for rank in grid(most)]
    return Ladder(path, sum(math.prod(matrix.shape) for matrix in matrices), steps)


def lost_squares(weight: Tensor) -> Tensor:
    """The relative squared error of weight (out, in) at ranks 0, 1, 2, ...; on meta of equal singular values."""
    if weight.is_meta:
        squares = torch.ones(min(weight.shape), dtype=torch.float64, device="cpu")
    else:
        squares = torch.linalg.svdvals(weight.double()).square().cpu()
    return 1 - torch.nn.functional.pad(squares.cumsum(0), (1, 0)) / squares.sum().clamp_min(1e-300)


def mlp_units(model: nn.Module, layers: Sequence[Layer], rank: int) -> list[Unit]:
    """A unit for each MLP. ConfigError: no MLP, unknown matrices, or a rank out of bounds."""
    units = []
    for layer in layers:
        if layer.mlp is None:
            continue
        if reason := layer.refusals.get("mlp"):
            raise ConfigError(reason)
        matrices = [layer.projections[name] for name in layer.matrices]
        for matrix in matrices:
            out_dim, dim = matrix.shape
            if rank > (most := min(dim, out_dim)):
                raise ConfigError(f"compress.mlp_rank={rank}: {matrix.path} ({dim} x {out_dim}) takes 1 to {most}")
        settings = {"method": MLPSVD.__name__, "rank": rank}
        fit, outline = partial(_fit, model, layer, rank), partial(_outline, layer, rank)
        units.append(Unit(layer.mlp, [matrix.path for matrix in matrices], settings, fit, outline))
    if not units:
        raise ConfigError(f"{type(model).__name__} has no MLP; leave compress.mlp_rank out")
    return units


def _outline(layer: Layer, rank: int) -> Change:
    return Change(projections={(layer.path, name): pair(layer.projections[name], rank) for name in layer.matrices})


def _fit(model: nn.Module, layer: Layer, rank: int, watch: Watch) -> Change:
    pairs, errors = {}, {}
    for name in layer.matrices:
        matrix = layer.projections[name]
        a, b, errors[f"{name}_error"] = low_rank(matrix.read(model), rank)
        pairs[layer.path, name] = fitted_pair(model, matrix, a, b)
    return Change(projections=pairs, report={"ranks": rank, **errors})
