"""Tensor product attention whose keys and values share their token factors."""

import torch
from torch import Tensor

from ..positional import Layout
from .cache import Buffers, FactorSegment
from .contextual import TPA
from .factors import Block, Factors


class TPASharedB(TPA):
    """TPA whose keys and values share their token factors, which are rotated for keys alone (TPA paper, section 3.5).

    Cache: (R_K + R_V) h + R D elements per token: the unrotated factor, which a step rotates as it reads it.
    Arguments are those of `TPA`.
    """

    has_kernel = False

    def _token_blocks(self) -> list[Block]:
        blocks = super()._token_blocks()
        return [block for i, block in enumerate(blocks) if i % 3 < 2]  # of queries and of keys

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        head, token = super()._split(y)[:2]
        return Factors(head, torch.cat((token, token[..., self.q_rank :, :]), -2))

    def layout(self) -> Layout:
        return {name: shape for name, shape in super().layout().items() if name != "value_token"}

    def _held(self, f: Factors) -> Buffers:
        counts = [self.q_rank + self.rank, self.rank]
        return super()._held(f) | {"key_token": f.token.split(counts, -2)[1].transpose(1, 2)}

    def _keys(self, segment: FactorSegment) -> tuple[Tensor, Tensor]:
        head, token = super()._keys(segment)
        angles = segment.angles(0, segment.size)
        return head, self._rotate(token.transpose(1, 2), angles, self.rank).transpose(1, 2)

    def _values(self, segment: FactorSegment) -> tuple[Tensor, Tensor]:
        return segment.buffers["value_head"], segment.buffers["key_token"]
