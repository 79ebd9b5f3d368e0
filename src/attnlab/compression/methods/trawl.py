"""TRAWL: CP or Tucker of a stack of matrices of one or more layers (Luo et al., 2024; code MIT)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from attnlab.compression.decompositions.cp import cp_als
from attnlab.compression.decompositions.slices import Slices
from attnlab.compression.decompositions.tucker import truncation_errors, tucker
from attnlab.compression.keep import even, value_of
from attnlab.compression.methods.base import (
    Change,
    Ladder,
    Method,
    Place,
    Share,
    Step,
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
from attnlab.compression.modules.base import Replacement
from attnlab.config.bounds import Rank
from attnlab.errors import ConfigError
from attnlab.pretrained.base import ATTENTION, Layer, Projection

SPAN = ("model", "layer", "thirds")  # of modes 1 to 3, attention, and of modes 4 to 6, the MLP
DOWN = ("fc_out", "down", "fc2")  # matrices of an MLP that are transposed in the stack
SHARE = 10  # the default rank is the smaller side divided by this


@dataclass(frozen=True)
class MatrixStack:
    """Matrices of one shape, stacked to a tensor."""

    name: str  # in reports
    matrices: Mapping[Place, Projection]
    turned: frozenset[Place]  # the matrices that are transposed in the stack
    shape: tuple[int, int]  # I, J of each matrix in the stack

    def read(self, model: nn.Module) -> Tensor:
        """The tensor (matrices, I, J), float64."""
        parts = [
            matrix.read(model).T if place in self.turned else matrix.read(model)
            for place, matrix in self.matrices.items()
        ]
        return torch.stack([part.double() for part in parts])


@dataclass(eq=False)
class TRAWL(Method):
    """Approximate the matrices of a stack by matrices of rank R with common row and column spaces.

    The matrices of a layer are q, k, v and o as stored, (out, in), without heads; or those of the MLP, with the down
    projection transposed. A matrix becomes two factors where these take fewer multiply-adds than the dense product, and
    otherwise their dense product; the report names the dense ones.

    Args:
        mode: the stacks. 1: q, k, v, o of all layers together; 2: of each layer; 3: of each third of the layers (the
            first thirds are larger: 10, 9 and 9 of GPT-J's 28). 4, 5, 6: the same of the MLP.
        layers: numbers of the layers, from 0, or negative from the end; None: all.
        method: "cp": W_i = sum_r a_ir b_r c_r^T. "tucker": W_i = B (sum_s a_is G_s) C^T.
        rank: R; None: a tenth of the smaller side.
        stack_rank: of "tucker", the rank of the mode over the matrices; None: not reduced. The released code has 2 (3
            for LLaMA2's MLP), which for q, k, v and o leaves two combinations of the four.
        start: of "cp": "svd", the largest singular triplets, or "random", as released. A rank below the number of
            matrices always starts at random.
        seed: of a random start; the released code sets none.
        keep: the remaining share of the matrices' parameters; R is then chosen for each stack by the singular values of
            its unfoldings, and a stack may stay dense.

    Raises:
        ValueError: both `rank` and `keep`, or a `stack_rank` of CP.
    """

    mode: Annotated[int, Ge(1), Le(6)] = 5
    layers: list[int] | None = None
    method: Literal["cp", "tucker"] = "cp"
    rank: Rank | None = None
    stack_rank: Rank | None = None
    start: Literal["svd", "random"] = "svd"
    sweeps: Annotated[int, Ge(1)] = 100
    tolerance: Annotated[float, Ge(0)] = 1e-5
    seed: Annotated[int, Ge(0)] = 0
    keep: Share | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.rank is not None:
            raise ValueError(f"rank={self.rank} and keep={self.keep}: give only one of rank and keep")
        if self.method == "cp" and self.stack_rank is not None:
            raise ValueError(f"stack_rank={self.stack_rank}: belongs to method=tucker; CP has one rank")

    def units(self, model: nn.Module, layers: Sequence[Layer]) -> list[Unit]:
        units = []
        for stack in self.stacks(model, layers):
            compressed, chosen = value_of(self.chosen, stack.name)
            if not compressed:
                continue
            rank = self.rank_for(stack) if chosen is None else int(chosen)
            settings = settings_of(self, "mode", "layers") | {
                "kind": self.method,
                "rank": rank,
                "turned": [place in stack.turned for place in stack.matrices],
            }
            reads = list(dict.fromkeys(matrix.path for matrix in stack.matrices.values()))
            fit, outline = partial(self._fit, model, stack, rank), partial(_outline, stack, rank)
            units.append(Unit(stack.name, reads, settings, fit, outline))
        return units

    def ladders(self, model: nn.Module, layers: Sequence[Layer]) -> list[Ladder]:
        choices = []
        for stack in self.stacks(model, layers):
            dense, most, count = math.prod(stack.shape), largest_rank(stack.shape), len(stack.matrices)
            if next(model.parameters()).is_meta:
                lost = [1 - rank * rank / dense for rank in range(most + 1)]
            else:
                lost = truncation_errors([stack.read(model)[:, None]], [self.stack_rank]).diagonal().tolist()
            steps = [Step(rank * count * sum(stack.shape), lost[rank], rank) for rank in range(1, most + 1)]
            choices.append(Ladder(stack.name, count * dense, steps))
        return choices

    def stacks(self, model: nn.Module, layers: Sequence[Layer]) -> list[MatrixStack]:
        """The stacks of the mode. ConfigError: unknown or compressed matrices, or matrices of several shapes."""
        chosen = chosen_layers(layers, self.layers)
        span = SPAN[(self.mode - 1) % 3]
        count = {"model": 1, "layer": len(chosen), "thirds": min(3, len(chosen))}[span]
        starts = list(itertools.accumulate(even(len(chosen), count), initial=0))
        return [self._stack(model, chosen[first:end]) for first, end in itertools.pairwise(starts)]

    def _stack(self, model: nn.Module, layers: Sequence[Layer]) -> MatrixStack:
        attention = self.mode <= 3
        matrices: dict[Place, Projection] = {}
        for layer in layers:
            if reason := layer.refusals.get("attention" if attention else "mlp"):
                raise ConfigError(reason)
            names = ATTENTION if attention else layer.matrices
            if not names or any(name not in layer.projections for name in names):
                raise ConfigError(
                    f"compress.mode={self.mode}: {layer.path} has no {'attention' if attention else 'MLP'}"
                )
            matrices |= {(layer.path, name): layer.projections[name] for name in names}
        for matrix in matrices.values():
            refuse_compressed(model, matrix.path)
        down = () if attention else DOWN
        turned = frozenset(place for place in matrices if place[1] in down)
        shapes = {p: (m.shape[1], m.shape[0]) if p in turned else m.shape for p, m in matrices.items()}
        if len(set(shapes.values())) > 1:
            shown = ", ".join(f"{name} {shape[0]} x {shape[1]}" for (_, name), shape in list(shapes.items())[:4])
            raise ConfigError(
                f"compress.mode={self.mode}: matrices of one shape are stacked; {layers[0].path} has {shown}"
            )
        what = layers[0].attention if attention else layers[0].mlp
        name = f"{what} and {len(layers) - 1} more" if len(layers) > 1 else str(what)
        return MatrixStack(name, matrices, turned, next(iter(shapes.values())))

    def rank_for(self, stack: MatrixStack) -> int:
        """R of a stack. ConfigError: larger than its smaller side."""
        most = min(stack.shape)
        rank = max(1, most // SHARE) if self.rank is None else self.rank
        if rank > most:
            raise ConfigError(f"compress.rank={rank}: {stack.name} has matrices {stack.shape[0]} x {stack.shape[1]}, "
                              f"which take 1 to {most}")  # fmt: skip
        if self.stack_rank is not None and self.stack_rank > len(stack.matrices):
            raise ConfigError(f"compress.stack_rank={self.stack_rank}: {stack.name} takes 1 to {len(stack.matrices)}")
        return rank

    def rank_of(self, report: Mapping[str, Any]) -> int | None:
        return int(report["ranks"]) if self.keep is None else None

    @torch.no_grad()
    def _fit(self, model: nn.Module, stack: MatrixStack, rank: int, watch: Watch) -> Change:
        tensor = stack.read(model)
        left, right, history = self._decomposed(tensor, rank, watch)
        changes: dict[Place, Replacement | Tensor] = {}
        errors = {}
        for i, (place, matrix) in enumerate(stack.matrices.items()):
            a, b = (right[i], left[i]) if place in stack.turned else (left[i], right[i])  # W = a @ b.T
            norm = tensor[i].norm().clamp_min(1e-300)
            errors[".".join(place)] = float((tensor[i] - left[i] @ right[i].T).norm() / norm)
            changes[place] = fitted_pair(model, matrix, a, b.T) if saves(matrix, rank) else a @ b.T
        dense = [".".join(place) for place, new in changes.items() if isinstance(new, Tensor)]
        report = {"ranks": rank, "error": history[-1], "errors": errors, "dense": dense, "history": history}
        return Change(projections=changes, report=report)

    def _decomposed(self, tensor: Tensor, rank: int, watch: Watch) -> tuple[Tensor, Tensor, list[float]]:
        """left (n, I, R) and right (n, J, R) with W_i ~ left[i] @ right[i].T, and the relative errors of the sweeps."""
        count = len(tensor)
        if self.method == "cp":
            start = self.start if count <= rank <= count * tensor.shape[-1] else "random"
            solution = cp_als(
                Slices.of(tensor.movedim(0, -1)),
                rank,
                start=start,
                sweeps=self.sweeps,
                tolerance=self.tolerance,
                seed=self.seed,
                watch=partial(watch, "CP"),
            )
            return solution.a * solution.c[:, None], solution.b.expand(count, -1, -1), solution.history
        core = tucker(
            [tensor[:, None]],
            (rank, rank),
            [self.stack_rank],
            sweeps=self.sweeps,
            tolerance=self.tolerance,
            seed=self.seed,
            watch=partial(watch, "Tucker"),
        )
        middle = core.cores[0][:, 0] if core.u3[0] is None else torch.tensordot(core.u3[0], core.cores[0][:, 0], 1)
        return core.u1 @ middle, core.u2.expand(count, -1, -1), core.history


def _outline(stack: MatrixStack, rank: int) -> Change:
    pairs = {place: pair(matrix, rank) for place, matrix in stack.matrices.items() if saves(matrix, rank)}
    return Change(projections=pairs)
