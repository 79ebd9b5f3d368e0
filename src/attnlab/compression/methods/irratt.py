"""IrrAtt: block terms of different ranks, found from a CP decomposition's fusion (IrrAtt, sections 3.1 and 3.2)."""

from __future__ import annotations

import copy
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from attnlab.compression.decompositions import BlockTerms, btd, fusion_ranks, global_svd, terms_from_cp, truncated_svd
from attnlab.compression.methods.base import Rank, Share, Unit, Watch
from attnlab.compression.methods.cp_slimatt import decompose
from attnlab.compression.methods.query_key import Fit, Heads, QueryKeyMethod, Sizes, even, factored, values
from attnlab.compression.modules.attention import CompressedAttention, FactoredAttention, SlimAttention
from attnlab.config.bounds import bounded


@bounded
class IrrAtt(QueryKeyMethod):
    """BTD-(L, L, 1) of the query-key tensor; each head gets a rank of its own.

    A model compressed by CP SlimAtt is continued (algorithm 1 on its trained layers): ranks are then those that
    training has left, `rank` has no effect, and values and outputs stay.

    Args:
        rank: of all heads together; None: half of the exact rank.
        vo_rank: of each head's value-output matrix; None: half the head's width.
        mlp_rank: of both matrices of an MLP; None: MLPs stay as they are.
        keep: the share of the parameters of q, k, v and o that remains, in place of `rank` and `vo_rank`.
        start: where ranks and first terms come from: "cp" (algorithms 1 and 3), or "global" (the largest singular
            values, which need no CP decomposition).
        fusion: "free", an H x H matrix that mixes the heads' logits, as table 1 counts it; "identity", heads apart,
            which fused kernels run: each head is fitted again at its rank.
        objective: what the error-preserving correction of the CP decomposition makes small; "none": no correction.
        sweeps: of each decomposition, at most.
        tolerance: relative change of the error at which a decomposition stops.

    Raises:
        ValueError: a rank below 1, or a negative number of sweeps.
    """

    def __init__(
        self,
        rank: Rank | None = None,
        vo_rank: Rank | None = None,
        mlp_rank: Rank | None = None,
        start: Literal["cp", "global"] = "cp",
        fusion: Literal["free", "identity"] = "free",
        objective: Literal["sensitivity", "norm", "none"] = "sensitivity",
        sweeps: Annotated[int, Ge(0)] = 200,
        tolerance: Annotated[float, Ge(0)] = 1e-4,
        keep: Share | None = None,
    ) -> None:
        super().__init__(rank, vo_rank, mlp_rank, keep)
        self.start, self.fusion = start, fusion
        self.objective, self.sweeps, self.tolerance = objective, sweeps, tolerance

    def outline(self, sizes: Sizes) -> FactoredAttention:
        rank, vo_rank = self.ranks(sizes)
        return self._module(even(rank, sizes.heads), [vo_rank] * sizes.heads, sizes)

    def _module(self, ranks: list[int], value_ranks: list[int], sizes: Sizes) -> FactoredAttention:
        fused = self.fusion == "free"
        return FactoredAttention(sizes.dim, ranks, value_ranks, sizes.scale, fused=fused, **sizes.rest)

    def fit(self, heads: Heads, sizes: Sizes, watch: Watch) -> Fit:
        rank, vo_rank = self.ranks(sizes)
        tensor = heads.qk
        if self.start == "global":
            first = global_svd(tensor, rank)
        else:
            cp = decompose(heads, rank, self.objective, self.sweeps, self.tolerance, watch)
            first = terms_from_cp(tensor, cp.factors)
        if self.fusion == "identity":
            terms = truncated_svd(tensor, first.ranks)
        else:
            best = truncated_svd(tensor, first.ranks)  # of these ranks, unmixed: a start that costs one SVD
            start = first if first.error < best.error else best
            watched = lambda *done: watch("BTD", *done)  # noqa: E731
            terms = btd(tensor, start, sweeps=self.sweeps, tolerance=self.tolerance, watch=watched)
        vo = values(heads, vo_rank)
        report = {
            "ranks": terms.ranks,
            "qk_error": terms.error,
            "vo_error": vo.error,
            "history": [first.error, *terms.history],
        }
        return Fit(factored(terms, vo, heads.bias, sizes, fused=self.fusion == "free"), report)

    def again(self, module: CompressedAttention, path: str) -> Unit:
        if not isinstance(module, SlimAttention):
            return super().again(module, path)
        dropout = module.attn_drop.p, module.proj_drop.p
        heads, rank, value_ranks = module.num_heads, module.rank, module.value_ranks
        sizes = Sizes(module.qkv.in_features, heads, 0, module.proj.out_features, module.scale, *dropout)
        return self.unit(
            path, lambda: self._module(even(rank, heads), value_ranks, sizes), lambda watch: self.refit(module, sizes)
        )

    @torch.no_grad()
    def refit(self, slim: SlimAttention, sizes: Sizes) -> Fit:
        """Algorithm 1 on a trained layer, best with a fusion penalty: what other heads hold of a column is dropped."""
        slim = copy.deepcopy(slim).double()
        query, key, value = slim.qkv.weight.split([slim.rank, slim.rank, slim.value_rank])
        a = torch.cat([query.T, slim.query_bias[None]])
        owner, largest = fusion_ranks(slim.fusion, slim.qkv.in_features)
        root = largest.abs().sqrt()
        a, b = a * root * largest.sign(), key.T * root
        own = [owner == h for h in range(slim.num_heads)]
        terms = BlockTerms([a[:, o] for o in own], [b[:, o] for o in own], torch.eye(len(own)).to(a), [], 0.0)
        split = slim.value_ranks
        vo = BlockTerms(list(value.T.split(split, -1)), list(slim.proj.weight.split(split, -1)), terms.fusion, [], 0.0)
        module = factored(terms, vo, slim.proj.bias, sizes, fused=self.fusion == "free")
        dropped = (slim.fusion - torch.zeros_like(slim.fusion).scatter(0, owner[None], largest[None])).norm()
        return Fit(module, {"ranks": terms.ranks, "fusion_dropped": float(dropped / slim.fusion.norm())})
