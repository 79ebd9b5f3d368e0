"""Tensor product attention of which head factors (A) or token factors (B) are learned, whatever the input."""

from typing import Unpack

from torch import Tensor

from ..bounds import Rank, Size
from ..positional import Layout
from .cache import FactorSegment
from .contextual import TPA
from .factors import Block, FactorOptions, Factors, Init, learned_factors


class TPANonContextualA(TPA):
    """TPA with learned head factors, a_r in R^h (TPA paper, section 3.4). Cache: (R_K + R_V) D elements per token.

    MHA is this with R = h and a_i = h e_i, MQA with R = 1 and a = (1, ..., 1), GQA with R = G and a_g = G on group g.
    Arguments are those of `TPA`.
    """

    def _head_blocks(self) -> list[Block]:
        return []

    def _learn(self, init: Init) -> None:
        self.head_factors = learned_factors(super()._head_blocks(), self.d_model, init)

    def _compact(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.factors(x), self.head_factors

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        return Factors(more[0].to(y.dtype)[None, None], self._tokens(y))

    def layout(self) -> Layout:
        return {name: shape for name, shape in super().layout().items() if name.endswith("token")}

    def _heads_of(self, rank: int, like: Tensor) -> Tensor:
        """R head factors from number `rank` on, (1, R, h, 1)."""
        return self._activate(self.head_factors[rank : rank + self.rank]).to(like.dtype)[None, :, :, None]

    def _keys(self, segment: FactorSegment) -> tuple[Tensor, Tensor]:
        token = segment.buffers["key_token"]
        return self._heads_of(self.q_rank, token), token

    def _values(self, segment: FactorSegment) -> tuple[Tensor, Tensor]:
        token = segment.buffers["value_token"]
        return self._heads_of(self.q_rank + self.rank, token), token


class TPANonContextualB(TPA):
    """TPA with learned token factors, b_r in R^D, rotated by position (TPA paper, section 3.5).

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

    def _compact(self, x: Tensor) -> tuple[Tensor, ...]:
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
