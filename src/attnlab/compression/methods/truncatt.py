"""Truncated SVDs of each head's query-key matrix: TruncAtt (IrrAtt, section 2.3), and ranks by singular value."""

from __future__ import annotations

from dataclasses import dataclass

from attnlab.compression.decompositions.svd import global_svd, truncated_svd
from attnlab.compression.keep import even
from attnlab.compression.methods.base import Watch
from attnlab.compression.methods.query_key import Fit, Heads, QueryKeyMethod, Sizes, factored
from attnlab.compression.modules.attention import FactoredAttention


@dataclass(eq=False)
class TruncAtt(QueryKeyMethod):
    """The arguments are those of QueryKeyMethod; `rank` is that of each head, 1 to the head's width."""

    per_head = True

    def outline(self, sizes: Sizes) -> FactoredAttention:
        rank, vo_rank = self.ranks(sizes)
        ranks = [rank] * sizes.heads if self.per_head else even(rank, sizes.heads)
        return FactoredAttention(sizes.dim, ranks, [vo_rank] * sizes.heads, sizes.scale, **sizes.rest)

    def fit(self, heads: Heads, sizes: Sizes, watch: Watch) -> Fit:
        rank, vo_rank = self.ranks(sizes)
        terms = truncated_svd(heads.qk, rank) if self.per_head else global_svd(heads.qk, rank)
        report = {"ranks": terms.ranks, "qk_error": terms.error, "history": terms.history}
        vo = self.values(heads, vo_rank, report)
        return factored(terms, vo, heads.bias, sizes, fused=False), report


@dataclass(eq=False)
class GlobalSVD(TruncAtt):
    """The arguments are those of QueryKeyMethod; `rank` is that of all heads together, one each to the full width.

    A baseline that the papers lack: by Eckart and Young no other ranks of this total have a smaller error while the
    fusion is the identity. It takes one sort.
    """

    per_head = False
