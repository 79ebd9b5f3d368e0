"""Variants of tensor product attention (TPA paper, sections 3.4 and 3.5)."""

from typing import Unpack

import torch
from torch import Tensor, nn

from ..bounds import Rank, Size
from ..positional import Layout
from .contextual import TPA
from .factors import Block, Buffers, FactorOptions, Factors, FactorSegment, Init, learned_factors


class TPAKVOnly(TPA):
    r"""TPA of keys and values only (TPA paper, section 3.5): queries have no factors and are not divided by a rank.

    .. math:: Q_t = T_t W_Q x_t

    Args:
        bias: whether the factor projections have a bias, the part of factors that does not depend on the input.
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

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.factors(x), self.query(x)

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        return super()._split(y)._replace(query=more[0].unflatten(-1, (self.num_heads, -1)))


class TPANonContextualA(TPA):
    r"""TPA with learned head factors, a_r in R^h (TPA paper, section 3.4). Cache: (R_K + R_V) D elements per token.

    .. math::
        K_t = \tfrac{1}{R_K} \textstyle\sum_r a^K_r \otimes T_t W^K_r x_t, \qquad
        V_t = \tfrac{1}{R_V} \sum_r a^V_r \otimes W^V_r x_t

    MHA is this with R = h and a_i = h e_i, MQA with R = 1 and a = (1, ..., 1), GQA with R = G and a_g = G on group g.
    """

    def _head_blocks(self) -> list[Block]:
        return []

    def _learn(self, init: Init) -> None:
        self.head_factors = learned_factors(super()._head_blocks(), self.d_model, init)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.factors(x), self.head_factors

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        return Factors(more[0].to(y.dtype)[None, None], self._tokens(y))

    def layout(self) -> Layout:
        return {name: shape for name, shape in super().layout().items() if name.endswith("token")}

    def _heads_of(self, rank: int, like: Tensor) -> Tensor:
        """R learned head factors from index `rank` on, (1, R, h, 1)."""
        return self._activate(self.head_factors[rank : rank + self.rank]).to(like.dtype)[None, :, :, None]

    def _keys(self, segment: FactorSegment) -> tuple[Tensor, Tensor]:
        token = segment.buffers["key_token"]
        return self._heads_of(self.q_rank, token), token

    def _values(self, segment: FactorSegment) -> tuple[Tensor, Tensor]:
        token = segment.buffers["value_token"]
        return self._heads_of(self.q_rank + self.rank, token), token


class TPANonContextualB(TPA):
    r"""TPA with learned token factors, b_r in R^D, rotated by position (TPA paper, section 3.5).

    .. math::
        K_t = \tfrac{1}{R_K} \textstyle\sum_r W^K_r x_t \otimes T_t b^K_r, \qquad
        V_t = \tfrac{1}{R_V} \sum_r W^V_r x_t \otimes b^V_r

    Cache: (R_K + R_V) h elements per token. Arguments are those of `TPA`, without `third_dim`.
    """

    has_kernel = False

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        head_dim: Size | None = None,
        rank: Rank = 2,
        q_rank: Rank = 6,
        **options: Unpack[FactorOptions],
    ) -> None:
        super().__init__(d_model, num_heads, head_dim, rank, q_rank, **options)

    def _token_blocks(self) -> list[Block]:
        return []

    def _learn(self, init: Init) -> None:
        self.token_factors = learned_factors(super()._token_blocks(), self.d_model, init)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.factors(x), self.token_factors

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        return Factors(y.unflatten(-1, (self.ranks, -1)), more[0].to(y.dtype)[None, None])

    def layout(self) -> Layout:
        return {name: shape for name, shape in super().layout().items() if name.endswith("head")}

    def _keys(self, segment: FactorSegment) -> tuple[Tensor, Tensor]:
        head = segment.buffers["key_head"]
        token = self.token_factors[None, None, self.q_rank : self.q_rank + self.rank].to(head.dtype)
        return head, self._rotate(token, segment.angles(0, segment.size), self.rank).transpose(1, 2)

    def _values(self, segment: FactorSegment) -> tuple[Tensor, Tensor]:
        head = segment.buffers["value_head"]
        return head, self.token_factors[None, self.q_rank + self.rank :, None].to(head.dtype)

    def _step_costs(self) -> tuple[int, int]:
        return super()._step_costs()[0], 0

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        return super().multiply_adds(context, prefix) + self.rank * self.num_heads * self.head_dim


class TPASharedB(TPA):
    r"""TPA whose keys and values share token factors, which are rotated only for keys (TPA paper, section 3.5).

    .. math::
        K_t = \tfrac{1}{R} \textstyle\sum_r a^K_r \otimes T_t b_r, \qquad
        V_t = \tfrac{1}{R} \sum_r a^V_r \otimes b_r

    Cache: (R_K + R_V) h + R D elements per token: unrotated factors, which a step rotates when it reads them.
    """

    has_kernel = False

    def _token_blocks(self) -> list[Block]:
        blocks = super()._token_blocks()
        return [block for i, block in enumerate(blocks) if i % 3 < 2]  # queries and keys

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        head, token = super()._split(y)[:2]
        return Factors(head, torch.cat((token, token[..., self.q_rank :, :]), -2))

    def layout(self) -> Layout:
        return {name: shape for name, shape in super().layout().items() if name != "value_token"}

    def _cached(self, f: Factors) -> Buffers:
        counts = [self.q_rank + self.rank, self.rank]
        return super()._cached(f) | {"key_token": f.token.split(counts, -2)[1].transpose(1, 2)}

    def _keys(self, segment: FactorSegment) -> tuple[Tensor, Tensor]:
        head, token = super()._keys(segment)
        angles = segment.angles(0, segment.size)
        return head, self._rotate(token.transpose(1, 2), angles, self.rank).transpose(1, 2)

    def _values(self, segment: FactorSegment) -> tuple[Tensor, Tensor]:
        return segment.buffers["value_head"], segment.buffers["key_token"]
