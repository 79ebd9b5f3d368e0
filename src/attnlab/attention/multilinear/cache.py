"""Caches of multi-linear attention: states of a fixed size, and windows of keys and values."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base import Cache, rows_of

if TYPE_CHECKING:
    from .absolute import AbsoluteMultiLinear
    from .base import MultiLinear


class StateCache(Cache):
    """What is held has the same size at any length: `text` (B, ...) of each row, `prefix` (N, R, V), the mean P.

    Args:
        attention: the mechanism whose `state_shape` and `prefix_shape` the buffers have.
        batch: rows B.
        capacity: text positions that a row may have; the state's size does not depend on it.
        prefix_capacity: positions that a prefix may have; the size of P does not depend on it.
        beam: rows that share one prefix; it divides B.
        like: an empty tensor of the buffers' dtype and device; a state that accumulates is float32 or wider.
    """

    def __init__(
        self, attention: "MultiLinear", batch: int, capacity: int, prefix_capacity: int, beam: int, like: Tensor
    ) -> None:
        self.beam, self.capacity, self.prefix_capacity = beam, capacity, prefix_capacity
        self.text = like.new_zeros(batch, *attention.state_shape, dtype=attention.state_dtype(like.dtype))
        self.prefix = like.new_zeros(batch // beam, *attention.prefix_shape)
        self.prefix_size: int | Tensor = 0  # positions; (N,) where prefixes differ in length

    def buffers(self) -> list[Tensor]:
        return [self.text, self.prefix]

    @property
    def can_be_static(self) -> bool:
        return True

    def make_static(self) -> None:
        super().make_static()
        if not isinstance(self.prefix_size, Tensor):
            self.prefix_size = torch.full((len(self.prefix),), self.prefix_size, device=self.prefix.device)

    def reorder(self, rows: Tensor) -> None:
        self.text.copy_(self.text[rows])

    def select(self, prefixes: Tensor) -> None:
        self.text, self.prefix = self.text[rows_of(prefixes, self.beam)], self.prefix[prefixes]
        if isinstance(self.prefix_size, Tensor):
            self.prefix_size = self.prefix_size[prefixes]

    def crop(self, length: int) -> None:
        self._check_crop(length)
        if length not in (0, self.length):
            raise ValueError(
                f"cannot crop to {length} positions: the state is a sum over all {self.length}; crop to 0 and feed "
                "the rest again"
            )
        if not length:
            self.text.zero_()
        self.length = length


class SlotCache(StateCache):
    """[key | value] of each place of the window; zero where nothing was read.

    Arguments are those of `StateCache`; a `capacity` beyond the window is refused.
    """

    def __init__(
        self, attention: "AbsoluteMultiLinear", batch: int, capacity: int, prefix_capacity: int, beam: int, like: Tensor
    ) -> None:
        attention.check_room(capacity)
        super().__init__(attention, batch, capacity, prefix_capacity, beam, like)

    def crop(self, length: int) -> None:
        self._check_crop(length)
        self.text[:, length:] = 0
        self.length = length


class LagCache(StateCache):
    """[key | value] of the newest n positions, the newest last; zero before the first position."""

    def crop(self, length: int) -> None:
        self._check_crop(length)
        window, dropped = self.text.shape[1], self.length - length
        if dropped and length and self.length > window:
            raise ValueError(
                f"cannot crop to {length} positions: of {self.length} the newest {window} are held, and older ones "
                "would be seen again; crop to 0 and feed the rest again"
            )
        if dropped:
            self.text.copy_(torch.cat((torch.zeros_like(self.text[:, :dropped]), self.text[:, :-dropped]), 1))
        self.length = length
