"""Tensor product attention of which keys and values alone have factors."""

from typing import Unpack

import torch
from torch import Tensor, nn

from ..bounds import Rank, Size
from .contextual import TPA
from .factors import FactorOptions, Factors


class TPAKVOnly(TPA):
    """TPA of keys and values alone (TPA paper, section 3.5): queries are projected whole, not divided by a rank.

    Args:
        bias: whether the factors have biases, with which they contain factors that do not depend on the input.
        Others are those of `TPA`, without `q_rank`.
    """

    factorised_queries = False

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        head_dim: Size | None = None,
        rank: Rank = 2,
        third_dim: Size | None = None,
        *,
        bias: bool = False,
        **options: Unpack[FactorOptions],
    ) -> None:
        super().__init__(d_model, num_heads, head_dim, rank, 0, third_dim, **options)
        if bias:
            self.factors.bias = nn.Parameter(torch.zeros(self.factors.out_features))
        self.query = nn.Linear(d_model, num_heads * self.head_dim, bias=False)
        nn.init.xavier_uniform_(self.query.weight)

    def _compact(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.factors(x), self.query(x)

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        return super()._split(y)._replace(query=more[0].unflatten(-1, (self.num_heads, -1)))
