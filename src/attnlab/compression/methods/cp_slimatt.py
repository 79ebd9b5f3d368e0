"""CP SlimAtt: query and key projections shared by all heads; each head weights their columns (IrrAtt, section 2.4)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge

from attnlab.compression.decompositions import CP, cp_als, cp_epc
from attnlab.compression.methods.base import Rank, Share, Watch
from attnlab.compression.methods.query_key import Fit, Heads, QueryKeyMethod, Sizes, fill, values
from attnlab.compression.modules.attention import SlimAttention
from attnlab.config.bounds import bounded


@bounded
class CPSlimAtt(QueryKeyMethod):
    """CP decomposition of the query-key tensor, then the error-preserving correction.

    Args:
        rank: columns for all heads together; None: half of the exact rank.
        vo_rank: of each head's value-output matrix; None: half the head's width.
        mlp_rank: of both matrices of an MLP; None: MLPs stay as they are.
        keep: the share of the parameters of q, k, v and o that remains, in place of `rank` and `vo_rank`.
        objective: what the correction makes small; "none": no correction.
        sweeps: of the decomposition and of the correction, at most.
        tolerance: relative change of the error at which the decomposition stops; ten times that for the correction.
        fusion_penalty: weight in training of what keeps heads from sharing columns (eq. 7), so that a fine-tuned model
            can become an IrrAtt one: `compress=irratt model=<its folder>`.

    Raises:
        ValueError: a rank below 1, or a negative number of sweeps or penalty.
    """

    def __init__(
        self,
        rank: Rank | None = None,
        vo_rank: Rank | None = None,
        mlp_rank: Rank | None = None,
        objective: Literal["sensitivity", "norm", "none"] = "sensitivity",
        sweeps: Annotated[int, Ge(0)] = 200,
        tolerance: Annotated[float, Ge(0)] = 1e-4,
        fusion_penalty: Annotated[float, Ge(0)] = 0.0,
        keep: Share | None = None,
    ) -> None:
        super().__init__(rank, vo_rank, mlp_rank, keep)
        self.objective, self.sweeps, self.tolerance = objective, sweeps, tolerance
        self.fusion_penalty = fusion_penalty

    def outline(self, sizes: Sizes) -> SlimAttention:
        rank, vo_rank = self.ranks(sizes)
        return SlimAttention(sizes.dim, rank, [vo_rank] * sizes.heads, sizes.scale, **sizes.rest)

    def fit(self, heads: Heads, sizes: Sizes, watch: Watch) -> Fit:
        rank, vo_rank = self.ranks(sizes)
        cp = decompose(heads, rank, self.objective, self.sweeps, self.tolerance, watch)
        vo = values(heads, vo_rank)
        module = SlimAttention(sizes.dim, rank, vo.ranks, sizes.scale, **sizes.rest).double()
        fill(module, cp.a, cp.b, torch.cat(vo.left, -1), torch.cat(vo.right, -1))
        with torch.no_grad():
            module.proj.bias.copy_(heads.bias)
            module.fusion.copy_(cp.c)
        report = {
            "ranks": rank,
            "qk_error": float(cp.error),
            "vo_error": vo.error,
            "history": cp.history.tolist(),
            "costs": cp.costs.tolist(),
        }
        return Fit(module, report)


def decompose(
    heads: Heads,
    rank: int,
    objective: Literal["sensitivity", "norm", "none"],
    sweeps: int,
    tolerance: float,
    watch: Watch,
) -> CP:
    """Alternating least squares from the largest singular triplets, and the correction of its result.

    Args:
        heads: the layer's weights.
        rank: R, columns of the CP decomposition.
        objective: what the correction makes small; none: there is no correction.
        sweeps: of each of both, at most.
        tolerance: relative change of the error at which alternating least squares ends; the correction ends at ten
            times it.
        watch: called with the name of the part, the sweeps done, and the sweeps at most.
    """
    found = cp_als(heads.qk, rank, sweeps=sweeps, tolerance=tolerance, watch=lambda *done: watch("CP", *done))
    if objective == "none":
        return found
    return cp_epc(
        heads.qk,
        found,
        objective=objective,
        sweeps=sweeps,
        tolerance=10 * tolerance,
        watch=lambda *done: watch("correction", *done),
    )
