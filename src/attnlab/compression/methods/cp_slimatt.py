"""CP SlimAtt: query and key projections shared by all heads; each head weights their columns (IrrAtt, section 2.4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from attnlab.compression.decompositions.btd import fusion_ranks
from attnlab.compression.decompositions.cp import CP, cp_als, cp_epc
from attnlab.compression.decompositions.slices import Slices
from attnlab.compression.decompositions.svd import BlockTerms, truncated_svd
from attnlab.compression.methods.base import Watch, settings_of
from attnlab.compression.methods.query_key import Fit, Heads, QueryKeyMethod, Sizes, fill
from attnlab.compression.modules.attention import SlimAttention
from attnlab.errors import ConfigError

Objective = Literal["sensitivity", "norm", "none"]


@dataclass(eq=False)
class FromCP(QueryKeyMethod):
    """A method that begins with a CP decomposition of the query-key tensor.

    Attributes:
        start: "random": the best of `restarts` random starts with the seeds from `start_seed` on; other values: the
            largest singular triplets over all heads.
        objective: objective of the error-preserving correction; "none": no correction.
        tolerance: relative change of the error at which the decomposition ends; ten times that for the correction.
    """

    start: str = "global"
    restarts: Annotated[int, Ge(1)] = 4
    start_seed: Annotated[int, Ge(0)] = 0
    objective: Objective = "sensitivity"
    sweeps: Annotated[int, Ge(0)] = 200
    tolerance: Annotated[float, Ge(0)] = 1e-4

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self, "mlp_rank", *(() if self.start == "random" else ("restarts", "start_seed")))

    def decompositions(self, tensor: Slices, rank: int, watch: Watch) -> Iterator[tuple[CP, Watch]]:
        """The decomposition of rank R from each start, and a `watch` that names the start."""
        starts = self.restarts if self.start == "random" else 1
        for i in range(starts):

            def named(what: str, done: int, most: int, number: int = i + 1) -> None:
                watch(what if self.start != "random" else f"start {number} of {starts}, {what}", done, most)

            cp = cp_als(
                tensor,
                rank,
                start="random" if self.start == "random" else "svd",
                seed=self.start_seed + i,
                sweeps=self.sweeps,
                tolerance=self.tolerance,
                watch=partial(named, "CP"),
            )
            if self.objective != "none":
                cp = cp_epc(
                    tensor,
                    cp,
                    objective=self.objective,
                    sweeps=self.sweeps,
                    tolerance=10 * self.tolerance,
                    watch=partial(named, "correction"),
                )
            yield cp, named


@dataclass(eq=False)
class CPSlimAtt(FromCP):
    """CP decomposition of the query-key tensor, then the error-preserving correction.

    Args:
        rank: columns for all heads together; None: half of the exact rank.
        start: of the decomposition. "global": the largest singular triplets over all heads, each of which belongs to
            one head, so that the fusion begins block-diagonal; "random": blocks of the result come from the weights.
        restarts: number of random starts; the one with the lowest error is used.
        start_seed: of the first random start; the next ones follow.
        fusion: "free", or "constrained": eq. 7 holds, S >= 0 and S S' = I, after the decomposition and at every step
            of training. The first weights are those of section 3.3: each head gets as many columns as it owns in the CP
            decomposition, its largest singular triplets.
        fusion_penalty: weight in training of eq. 7 as a penalty on columns shared by heads, so that a fine-tuned model
            can become an IrrAtt one: `compress=irratt model=<its folder>`.
        Others are those of `FromCP` and `QueryKeyMethod`.

    Raises:
        ConfigError: a penalty with fusion="constrained".
    """

    start: Literal["global", "random"] = "global"
    fusion: Literal["free", "constrained"] = "free"
    fusion_penalty: Annotated[float, Ge(0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fusion == "constrained" and self.fusion_penalty:
            raise ConfigError(
                f"compress.fusion=constrained and compress.fusion_penalty={self.fusion_penalty}: the constraint makes "
                "the penalty zero; give one of them"
            )

    def outline(self, sizes: Sizes) -> SlimAttention:
        rank, vo_rank = self.ranks(sizes)
        return self._module(rank, [vo_rank] * sizes.heads, sizes)

    def _module(self, rank: int, value_ranks: list[int], sizes: Sizes) -> SlimAttention:
        constrained = self.fusion == "constrained"
        return SlimAttention(sizes.dim, rank, value_ranks, sizes.scale, constrained=constrained, **sizes.rest)

    def fit(self, heads: Heads, sizes: Sizes, watch: Watch) -> Fit:
        rank, vo_rank = self.ranks(sizes)
        solutions = [self._factors(heads, cp) for cp, _ in self.decompositions(heads.qk, rank, watch)]
        (a, b, c), report = min(solutions, key=lambda solution: solution[1]["qk_error"])
        if self.start == "random":
            report["starts"] = [
                {"seed": self.start_seed + i, "error": of_start["qk_error"], "ranks": of_start["head_ranks"]}
                for i, (_, of_start) in enumerate(solutions)
            ]
        vo = self.values(heads, vo_rank, report)
        module = self._module(rank, vo.ranks, sizes).double()
        fill(module, a, b, torch.cat(vo.left, -1), torch.cat(vo.right, -1))
        with torch.no_grad():
            module.proj.bias.copy_(heads.bias)
            module.fusion.copy_(c)
        return module, report

    def _factors(self, heads: Heads, cp: CP) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """The factors of the layer, and the report."""
        report: dict[str, Any] = {"ranks": cp.rank, "qk_error": cp.error, **ownership(cp.c, heads.width)}
        report |= {"history": cp.history, "costs": cp.costs}
        if self.fusion == "free":
            return cp.factors, report
        terms = truncated_svd(heads.qk, report["head_ranks"])
        return nonnegative(terms), report | {"qk_error": terms.error, "fusion_own": 1.0}


def ownership(fusion: Tensor, width: int) -> dict[str, Any]:
    """Measure how block-diagonal a fusion (H, R) is, for the report.

    Returns:
        `head_ranks`, the number of columns that each head owns by algorithm 1; `fusion_own`, the mean over columns of
        the share of squared weights in the owner: 1 for a block-diagonal fusion, 1/H for an evenly spread one.
    """
    owner, largest = fusion_ranks(fusion, width)
    square = fusion.square().sum(0)
    share = torch.where(square > 0, largest.square() / square.clamp_min(1e-300), 1.0)
    return {"head_ranks": torch.bincount(owner, minlength=len(fusion)).tolist(), "fusion_own": float(share.mean())}


def nonnegative(terms: BlockTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Turn truncated SVDs, with both sides scaled by the root of the singular values, into CP factors under eq. 7.

    Returns:
        (I, R), (J, R) and (H, R), whose rows are the heads' singular values divided by their norm (section 3.3).
    """
    left, right, rows = [], [], []
    for a, b in zip(terms.left, terms.right, strict=True):
        roots = a.norm(dim=0)
        values = roots.square()
        norm = values.norm().clamp_min(1e-300)
        scale = norm.sqrt() / roots.clamp_min(1e-150)
        left.append(a * scale)
        right.append(b * scale)
        rows.append(values / norm)
    return torch.cat(left, -1), torch.cat(right, -1), torch.block_diag(*(row[None] for row in rows))
