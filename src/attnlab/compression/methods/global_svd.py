"""Truncated SVDs whose ranks are shared out among heads by singular value: the best there is for unmixed heads."""

from __future__ import annotations

from attnlab.compression.decompositions import global_svd
from attnlab.compression.methods.base import Watch
from attnlab.compression.methods.query_key import Fit, Heads, QueryKeyMethod, Sizes, even, factored
from attnlab.compression.modules.attention import FactoredAttention


class GlobalSVD(QueryKeyMethod):
    """The arguments are those of QueryKeyMethod; `rank` is that of all heads together, one each to the full width.

    The papers lack this baseline: by Eckart and Young no other ranks of this total, whatever finds them, leave a
    smaller error while the fusion is the identity; it takes one sort.
    """

    def outline(self, sizes: Sizes) -> FactoredAttention:
        rank, vo_rank = self.ranks(sizes)
        return FactoredAttention(sizes.dim, even(rank, sizes.heads), [vo_rank] * sizes.heads, sizes.scale, **sizes.rest)

    def fit(self, heads: Heads, sizes: Sizes, watch: Watch) -> Fit:
        rank, vo_rank = self.ranks(sizes)
        terms = global_svd(heads.qk, rank)
        report = {"ranks": terms.ranks, "qk_error": terms.error, "history": terms.history}
        vo = self.values(heads, vo_rank, report)
        return Fit(factored(terms, vo, heads.bias, sizes, fused=False), report)
