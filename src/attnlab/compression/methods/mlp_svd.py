"""Truncated SVD of MLP matrices alone; attention stays as it is (IrrAtt, table 1, "Original" with an MLP rank)."""

from __future__ import annotations

from attnlab.compression.methods.base import Fit, Method, Sizes, Watch
from attnlab.compression.modules.attention import FactoredAttention
from attnlab.pretrained.timm import Heads


class MLPSVD(Method):
    """mlp_rank: of both matrices."""

    compresses_attention = False

    def __init__(self, mlp_rank: int) -> None:
        super().__init__(None, None, mlp_rank)

    def outline(self, sizes: Sizes) -> FactoredAttention:
        raise NotImplementedError("attention stays as it is")

    def fit(self, heads: Heads, sizes: Sizes, watch: Watch) -> Fit:
        raise NotImplementedError("attention stays as it is")
