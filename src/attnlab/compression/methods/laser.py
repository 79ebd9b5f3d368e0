"""LASER: low rank for chosen matrices of chosen layers (Sharma, Ash and Misra, ICLR 2024; code MIT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from torch import Tensor, nn

from attnlab.compression.decompositions.svd import low_rank, randomised_low_rank
from attnlab.compression.methods.base import (
    Change,
    Ladder,
    Method,
    Place,
    Share,
    Unit,
    Watch,
    chosen_layers,
    fitted_pair,
    largest_rank,
    pair,
    refuse_compressed,
    saves,
    settings_of,
)
from attnlab.compression.methods.mlp_svd import matrix_ladder
from attnlab.compression.modules.base import Replacement
from attnlab.config.bounds import Rank
from attnlab.errors import ConfigError
from attnlab.pretrained.base import ATTENTION, Layer, Projection

RHO = 0.1  # the default of rank, rho and rate
ALIASES = {"fc_in": ("fc1", "gate"), "fc_up": ("up",), "fc_out": ("fc2", "down")}  # the families' names by LASER's


@dataclass(eq=False)
class LASER(Method):
    """The best approximation of a lower rank for each chosen matrix; biases stay.

    A matrix becomes two factors where these take fewer multiply-adds than the dense product (k (in + out) < in * out),
    and otherwise their dense product; the report names the dense ones.

    Args:
        layers: numbers of the layers, from 0, or negative from the end; None: all.
        matrices: names of matrices. q, k, v, o; the family's names in the MLP (Llama: gate, up, down); LASER's names
            fc_in, fc_up and fc_out (for Llama gate, up and down); or the groups mlp, attn and all. Names must be
            equal: the released code compares ends of names, so that in RoBERTa its group mlp includes the output
            projection of attention.
        rank: k of every matrix.
        rho: the share of the largest possible rank: k = floor(min(in, out) rho).
        rate: `rho` in the unit of the released scripts, rho = (10 - rate) 0.1, computed in this order for the same
            floor. At most one of `rank`, `rho` and `rate`; all None: rho = 0.1.
        compat: "none": the exact singular value decomposition, in float64. "randomised": as released,
            torch.svd_lowrank(q=k) in float32 without oversampling, here with a seed; its error is larger.
        iterations: power iterations of compat="randomised"; released: 2, for RoBERTa 20.
        factorised: False: always the dense product, as released.
        keep: the remaining share of the matrices' parameters; the rank is then chosen for each matrix, and a matrix
            may stay dense.

    Raises:
        ValueError: more than one of `rank`, `rho`, `rate` and `keep`, or `keep` with factorised=False, which saves
            nothing.
    """

    layers: list[int] | None = None
    matrices: Annotated[list[str], MinLen(1)] | str = "mlp"
    rank: Rank | None = None
    rho: Annotated[float, Gt(0), Le(1)] | None = None
    rate: Annotated[float, Ge(0), Lt(10)] | None = None
    compat: Literal["none", "randomised"] = "none"
    iterations: Annotated[int, Ge(0)] = 2
    seed: Annotated[int, Ge(0)] = 0
    factorised: bool = True
    keep: Share | None = None

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in ("rank", "rho", "rate", "keep")}
        stated = [f"{name}={value}" for name, value in values.items() if value is not None]
        if len(stated) > 1:
            raise ValueError(f"{' and '.join(stated)}: give only one of rank, rho, rate and keep")
        if self.keep is not None and not self.factorised:
            raise ValueError("keep chooses ranks of factors; with factorised=false nothing would become smaller")
        self.matrices = [self.matrices] if isinstance(self.matrices, str) else list(self.matrices)

    def units(self, model: nn.Module, layers: Sequence[Layer]) -> list[Unit]:
        units = []
        for layer in chosen_layers(layers, self.layers):
            modules: dict[str, dict[str, Projection]] = {}  # fused projections share one
            for name in named(layer, self.matrices):
                matrix = layer.projections[name]
                refuse_compressed(model, matrix.path)
                if self.chosen is None or self.chosen[place_of(layer, name)] is not None:
                    modules.setdefault(matrix.path, {})[name] = matrix
            for path, matrices in modules.items():
                ranks = {name: self._rank(layer, name) for name in matrices}
                random = () if self.compat == "randomised" else ("iterations", "seed")
                settings = settings_of(self, "layers", "matrices", "rank", "rho", "rate", *random) | {"ranks": ranks}
                fit = partial(self._fit, model, layer, matrices, ranks)
                units.append(Unit(path, [path], settings, fit, partial(self._outline, layer, matrices, ranks)))
        return units

    def ladders(self, model: nn.Module, layers: Sequence[Layer]) -> list[Ladder]:
        self.units(model, layers)  # raises ConfigErrors
        choices = []
        for layer in chosen_layers(layers, self.layers):
            for name in named(layer, self.matrices):
                matrix = layer.projections[name]
                choices.append(matrix_ladder(model, place_of(layer, name), [matrix], largest_rank(matrix.shape)))
        return choices

    def _rank(self, layer: Layer, name: str) -> int:
        return self.rank_for(layer.projections[name]) if self.chosen is None else self.chosen[place_of(layer, name)]

    def rank_for(self, matrix: Projection) -> int:
        """k of a matrix. ConfigError: 0, or larger than its smaller side."""
        most = min(matrix.shape)
        if self.rank is not None:
            key, rank = f"compress.rank={self.rank}", self.rank
        elif self.rate is not None:
            key, rank = f"compress.rate={self.rate}", int(most * ((10 - self.rate) * 0.1))
        else:
            key, rank = f"compress.rho={self.rho or RHO}", int(most * (self.rho or RHO))
        if not 1 <= rank <= most:
            out_dim, dim = matrix.shape
            raise ConfigError(f"{key}: rank {rank} for {matrix.path} ({dim} x {out_dim}), which takes 1 to {most}")
        return rank

    def rank_of(self, report: Mapping[str, Any]) -> int | None:
        ranks = set(report["ranks"].values())
        return int(ranks.pop()) if len(ranks) == 1 and self.keep is None else None

    def _outline(self, layer: Layer, matrices: Mapping[str, Projection], ranks: Mapping[str, int]) -> Change:
        factored = {name: matrix for name, matrix in matrices.items() if self.factorised and saves(matrix, ranks[name])}
        return Change(projections={(layer.path, name): pair(matrix, ranks[name]) for name, matrix in factored.items()})

    def _fit(
        self,
        model: nn.Module,
        layer: Layer,
        matrices: Mapping[str, Projection],
        ranks: Mapping[str, int],
        watch: Watch,
    ) -> Change:
        changes: dict[Place, Replacement | Tensor] = {}
        errors, dense = {}, []
        for done, (name, matrix) in enumerate(matrices.items(), 1):
            weight, rank = matrix.read(model), ranks[name]
            if self.compat == "none":
                a, b, error = low_rank(weight, rank)
            else:
                a, b, error = randomised_low_rank(weight, rank, iterations=self.iterations, seed=self.seed)
            errors[f"{name}_error"] = error
            if self.factorised and saves(matrix, rank):
                changes[layer.path, name] = fitted_pair(model, matrix, a, b)
            else:
                dense.append(name)
                changes[layer.path, name] = a @ b
            watch("SVD", done, len(matrices))
        return Change(projections=changes, report={"ranks": dict(ranks), **errors, "dense": dense})


def place_of(layer: Layer, name: str) -> str:
    """The name of a matrix in a budget."""
    return f"{layer.path}.{name}"


def named(layer: Layer, names: Sequence[str]) -> list[str]:
    """The projections of a layer by their names, LASER's names, or the groups attn, mlp and all; each once.

    ConfigError: an unknown name, or a matrix that cannot be compressed.
    """
    groups = {"mlp": layer.matrices, "attn": list(ATTENTION), "all": [*ATTENTION, *layer.matrices]}
    chosen: list[str] = []
    for name in names:
        aliases = [] if name in layer.projections else ALIASES.get(name, ())
        wanted = groups.get(name) or next(([alias] for alias in aliases if alias in layer.projections), [name])
        subjects = {"attention": name in ("attn", "all", *ATTENTION), "mlp": name not in ("attn", *ATTENTION)}
        for subject, meant in subjects.items():
            if meant and (reason := layer.refusals.get(subject)):
                raise ConfigError(reason)
        if missing := [other for other in wanted if other not in layer.projections]:
            known = ", ".join([*layer.projections, *groups])
            raise ConfigError(f"compress.matrices: {layer.path} has no {missing[0]}; expected one of {known}")
        chosen += wanted
    return list(dict.fromkeys(chosen))
