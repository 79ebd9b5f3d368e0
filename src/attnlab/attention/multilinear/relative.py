"""Multi-linear attention with weights for each pair of lags."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import StateCache, Windowed


class LagCache(StateCache):
    """[key | value] of the newest n positions, the newest last; zero before the first position."""

    def crop(self, length: int) -> None:
        self._check_crop(length)
        window, dropped = self.text.shape[1], self.length - length
        if dropped and length and self.length > window:
            raise ValueError(
                f"cannot crop to {length} positions: of {self.length} the newest {window} are cached, and older ones "
                "would be seen again; crop to 0 and feed the rest again"
            )
        if dropped:
            self.text.copy_(torch.cat((torch.zeros_like(self.text[:, :dropped]), self.text[:, :-dropped]), 1))
        self.length = length


class RelativeMultiLinear(Windowed):
    """Each pair of lags (a, b), a, b < window, has weights: y_i = sum_ab W[:,a,b] A_{i,i-a,i-b}.

    Stationary, of any length; position is in W. Parameters 3dR + hR + C n^2 d; T n^2 (R + d) multiply-adds, in memory
    linear in T. W's last slot is lag 0: slot s is lag n - 1 - s. Row scale: none, all rows i >= n - 1 have n^2 terms.

    Args:
        window: n, lags that are read; a position sees the newest n positions.
        Others are those of `MultiLinear`.

    ValueError: a size is below 1, or a prefix is passed without `reads_prefix`.
    """

    cache_type = LagCache

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None, size: int | Tensor) -> Tensor:
        return self._slide(q, F.pad(torch.cat((k, v), -1), (0, 0, self.window - 1, 0)), prefix)

    def _slide(self, q: Tensor, keys_values: Tensor, prefix: Tensor | None) -> Tensor:
        """keys_values (B, T + n - 1, 2R): the window of position i is i ... i + n - 1."""
        windows = keys_values.unfold(1, self.window, 1).unsqueeze(2)  # (B, T, 1, 2R, n)
        k, v = windows.split(self.rank, 3)
        slices = (q.unsqueeze(-1) * k).mT @ v  # (B, T, C, n, n)
        return self.out(slices.flatten(2)) + self._read_prefix(q, prefix)

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, cache: StateCache) -> Tensor:
        keys_values = torch.cat((cache.text[:, 1:].to(k.dtype), torch.cat((k, v), -1)), 1)
        newest = torch.cat((cache.text, keys_values[:, self.window - 1 :].to(cache.text.dtype)), 1)
        cache.text.copy_(newest[:, -self.window :])
        return self._slide(q, keys_values, cache.prefix)

    def visible(self, position: int) -> range:
        return range(max(0, position - self.window + 1), position + 1)
