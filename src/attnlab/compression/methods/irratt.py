"""IrrAtt: block terms of different ranks, from a CP decomposition's fusion (IrrAtt, sections 3.1 and 3.2)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from attnlab.compression.decompositions.btd import btd, fusion_ranks, terms_from_cp
from attnlab.compression.decompositions.slices import Slices
from attnlab.compression.decompositions.svd import BlockTerms, global_ranks, global_svd, spectrum, truncated_svd
from attnlab.compression.keep import even
from attnlab.compression.methods.base import Unit, Watch
from attnlab.compression.methods.cp_slimatt import FromCP
from attnlab.compression.methods.query_key import Fit, Heads, Sizes, factored
from attnlab.compression.modules.attention import CompressedAttention, FactoredAttention, SlimAttention


@dataclass(eq=False)
class IrrAtt(FromCP):
    """BTD-(L, L, 1) of the query-key tensor; ranks differ between heads.

    A model compressed by CP SlimAtt is continued, with algorithm 1 on its trained layers: the ranks are those after
    training, `rank` has no effect, and values and outputs stay.

    Args:
        rank: of all heads together; None: half of the exact rank.
        vo: "truncatt": values and outputs have the same rank in each head (table 1); "irratt": block terms of
            different ranks with the identity as fusion (table 2), from the same `start`.
        start: source of the ranks, at which the first terms are the best without mixing. "random": a CP decomposition
            from a random start, then algorithms 1 and 3, which take the ranks from the weights. "cp": the same from the
            largest singular triplets over all heads; each belongs to one head, so that the ranks are mostly those of
            "global". "global": the largest singular values, without a CP decomposition.
        fusion: "free", an H x H matrix that mixes the heads' logits, as table 1 counts it; "identity": no mixing,
            which fused kernels run, each head fitted again at its rank. Eq. 7 leaves an H x H fusion nothing but the
            order of the heads, so that "identity" is its constrained form.
        Others are those of `QueryKeyMethod`.
    """

    start: Literal["random", "global", "cp"] = "cp"
    fusion: Literal["free", "identity"] = "free"

    def outline(self, sizes: Sizes) -> FactoredAttention:
        rank, vo_rank = self.ranks(sizes)
        return self._module(even(rank, sizes.heads), [vo_rank] * sizes.heads, sizes)

    def _module(self, ranks: list[int], value_ranks: list[int], sizes: Sizes) -> FactoredAttention:
        fused = self.fusion == "free"
        return FactoredAttention(sizes.dim, ranks, value_ranks, sizes.scale, fused=fused, **sizes.rest)

    def fit(self, heads: Heads, sizes: Sizes, watch: Watch) -> Fit:
        rank, vo_rank = self.ranks(sizes)
        terms, history, starts = self._terms(heads.qk, rank, self.fusion == "free", watch)
        report: dict[str, Any] = {
            "ranks": terms.ranks,
            "global_ranks": global_ranks(spectrum(heads.qk).values, rank),
            "qk_error": terms.error,
            "history": history,
        }
        if self.start == "random":
            report["starts"] = starts
        if self.vo == "irratt":
            vo, _, _ = self._terms(heads.vo, vo_rank * sizes.heads, False, lambda what, *n: watch(f"VO {what}", *n))
            report |= {"vo_error": vo.error, "vo_ranks": vo.ranks}
        else:
            vo = self.values(heads, vo_rank, report)
        return factored(terms, vo, heads.bias, sizes, fused=self.fusion == "free"), report

    def _terms(
        self, tensor: Slices, rank: int, free: bool, watch: Watch
    ) -> tuple[BlockTerms, list[float], list[dict[str, Any]]]:
        """The best block terms over all starts, their history of errors, and the result of each random start."""
        if self.start == "global":
            return *self._refined(tensor, global_svd(tensor, rank), free, watch), []
        solutions = [
            self._refined(tensor, terms_from_cp(tensor, cp.factors), free, named)
            for cp, named in self.decompositions(tensor, rank, watch)
        ]
        starts = [
            {"seed": self.start_seed + i, "error": terms.error, "ranks": terms.ranks}
            for i, (terms, _) in enumerate(solutions)
        ]
        return *min(solutions, key=lambda solution: solution[0].error), starts

    def _refined(self, tensor: Slices, first: BlockTerms, free: bool, watch: Watch) -> tuple[BlockTerms, list[float]]:
        """Algorithm 3; with the identity as fusion the best terms of these ranks."""
        best = truncated_svd(tensor, first.ranks)  # no unmixed terms of these ranks have a smaller error
        if not free:
            return best, [first.error, *best.history]
        terms = btd(tensor, best, sweeps=self.sweeps, tolerance=self.tolerance, watch=partial(watch, "BTD"))
        return terms, [first.error, *terms.history]

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
        """Algorithm 1 on a trained layer: a column loses its weights in other heads, small after a fusion penalty."""
        slim = copy.deepcopy(slim).double()
        query, key, value = slim.qkv.weight.split([slim.rank, slim.rank, slim.value_rank])
        a = torch.cat([query.T, slim.query_bias[None]])
        fusion = slim.weights
        owner, largest = fusion_ranks(fusion, slim.qkv.in_features)
        root = largest.abs().sqrt()
        a, b = a * root * largest.sign(), key.T * root
        columns = [owner == h for h in range(slim.num_heads)]
        identity = torch.eye(slim.num_heads).to(a)
        terms = BlockTerms([a[:, of] for of in columns], [b[:, of] for of in columns], identity, [])
        split = slim.value_ranks
        vo = BlockTerms(list(value.T.split(split, -1)), list(slim.proj.weight.split(split, -1)), identity, [])
        module = factored(terms, vo, slim.proj.bias, sizes, fused=self.fusion == "free")
        dropped = (fusion - torch.zeros_like(fusion).scatter(0, owner[None], largest[None])).norm()
        return module, {"ranks": terms.ranks, "fusion_dropped": float(dropped / fusion.norm())}
