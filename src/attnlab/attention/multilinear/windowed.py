"""Multi-linear attention with weights for each pair of positions, or of lags, in a window."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..bounds import Size
from ..ops.backends import transformed
from .base import Core, StateCache, WithPrefixReadout


class Windowed(WithPrefixReadout):
    """Base of the forms with weights for each pair in a window of n positions, whose keys and values are cached.

    Args:
        window: size n of the window, at least 1.
        Others are those of `MultiLinear`, with values as wide as keys.
    """

    def __init__(
        self,
        d_model: Size,
        rank: Size = 40,
        window: Size = 32,
        num_cores: Size = 1,
        *,
        shared_readout: bool = True,
        core: Core = "free",
        reads_prefix: bool = False,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, not {window}")
        super().__init__(d_model, rank, num_cores, shared_readout, reads_prefix, window**2, 1 / window, core)
        self.window = window

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.window, 2 * self.rank

    def _slice_multiply_adds(self) -> int:
        return self.num_readouts * self.window**2 * self.rank


class SlotCache(StateCache):
    """[key | value] of each position of the window, zero beyond the text.

    Arguments are those of `StateCache`. ValueError: `capacity` is larger than the window.
    """

    def __init__(self, attention: "AbsoluteMultiLinear", batch: int, capacity: int, *rest: Any) -> None:
        attention.check_room(capacity)
        super().__init__(attention, batch, capacity, *rest)

    def crop(self, length: int) -> None:
        self._check_crop(length)
        self.text[:, length:] = 0
        self.length = length


class AbsoluteMultiLinear(Windowed):
    r"""Each pair of positions (j, m) in a window of N has weights: the published layer, made causal.

    .. math::
        y_i = \tfrac{N}{i+1} \textstyle\sum_{j, m \le i} W_{jm} A_{ijm}, \quad A_{ijm} = \sum_r g_r q_{ir} k_{jr} v_{mr}

    Row i sums (i+1)^2 terms and is scaled by N/(i+1), so that all rows have the variance of A. A text of more than
    `window` positions is refused. Parameters 3dR + hR + C N^2 d.

    The parallel form multiplies the slices A_i.. by W, in T^3 (R + d) multiply-adds, if T (R + d) < d R. Otherwise it
    scans B_i[:,r] = sum_{j,m<=i} W[:,j,m] k_jr v_mr, y_i = B_i (g . q_i), in T^2 d R.

    Args:
        window: maximum length N of a text.
        Others are those of `MultiLinear`.

    ValueError: a size is below 1, a text is longer than `window`, or a prefix is passed without `reads_prefix`.
    """

    cache_type = SlotCache

    @property
    def max_positions(self) -> int:  # type: ignore[override]
        return self.window

    def scans(self, steps: int) -> bool:
        """Whether the scan is cheaper for this number of positions."""
        return steps * (self.rank + self.d_model) >= self.rank * self.d_model

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None, size: int | Tensor) -> Tensor:
        steps = k.shape[1]
        self.check_room(steps)
        # Blocks of R/5 rows add about a fifth to the cost of the scan; blocks of less than four need too many calls.
        block = max(4, self.rank // 5) if self.scans(steps) else steps
        return self.read_blocks(q, k, v, block) + self._read_prefix(q, prefix)

    def read_blocks(self, q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        """Queries (B, T, C, R) of the last T of K positions; k, v (B, K, R). `block` is K if T < K.

        The rows of a block read the pairs of all earlier blocks through B, and the pairs with a position in the block,
        an L-shaped strip of the (j, m) plane, through their slices. Both use the strip's products k_j v_m.
        """
        size, steps = k.shape[1], q.shape[1]
        weight = self.out.weight.unflatten(1, (self.num_readouts, self.window, self.window)).transpose(0, 1)
        # torch.func cannot transform a custom backward; dynamo always traces under a transform.
        cut = _strips if transformed() and not torch.compiler.is_compiling() else _Strips.apply
        weights: tuple[Tensor, ...] = cut(weight, size, block)
        place = torch.arange(size, device=k.device)
        keys, values = k.mT, v.mT  # (B, R, K)
        sums: Tensor | None = None  # B per read-out, (C, B, R, d)
        rows = []
        for start, strip_weight in zip(range(0, size, block), weights, strict=True):
            end = min(start + block, size)
            strip = _strip(start, end)
            pairs = torch.cat([(keys[:, :, j, None] * values[:, :, None, m]).flatten(2) for j, m in strip], -1)
            newest = torch.cat([torch.maximum(place[j, None], place[m]).flatten() for j, m in strip])
            first = max(start, size - steps)
            queries = q[:, first - size + steps : end - size + steps].transpose(1, 2)  # (B, C, rows, R)
            slices = (queries @ pairs.unsqueeze(1)) * (newest <= place[first:end, None])  # (B, C, rows, P)
            both = slices.transpose(0, 1)
            if end < size:
                both = torch.cat((both, pairs.expand(self.num_readouts, *pairs.shape)), 2)
            read = (both.flatten(1, 2) @ strip_weight.mT).unflatten(1, both.shape[1:3])  # (C, B, rows [+ R], d)
            out = read[:, :, : end - first].sum(0)
            if sums is not None:
                out = out + (queries @ sums.transpose(0, 1).to(queries.dtype)).sum(1)
            rows.append(out)
            if end < size:
                more = read[:, :, end - first :].to(torch.promote_types(read.dtype, torch.float32))
                sums = more if sums is None else sums + more
        return torch.cat(rows, 1) * self._row_scale(size - steps, steps, k)

    def _row_scale(self, first: int | Tensor, steps: int, like: Tensor) -> Tensor:
        """N/(i+1) for `steps` rows i from `first` on, (steps, 1)."""
        return self.window / (first + torch.arange(1, steps + 1, device=like.device))[:, None].to(like.dtype)

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, cache: StateCache) -> Tensor:
        start, new = cache.start, torch.cat((k, v), -1)
        if isinstance(start, Tensor):
            cache.text.index_copy_(1, start, new.to(cache.text.dtype))
        else:
            end = start + k.shape[1]
            cache.text[:, start:end] = new
            if k.shape[1] > 1:
                keys, values = cache.text[:, :end].to(k.dtype).split(self.rank, -1)
                return self.read_blocks(q, keys, values, end) + self._read_prefix(q, cache.prefix)
        keys, values = cache.text.to(k.dtype).unsqueeze(1).split(self.rank, -1)  # (B, 1, N, R); zero beyond the text
        slices = (q[:, 0].unsqueeze(2) * keys) @ values.mT  # (B, C, N, N)
        read = self.out(slices.flatten(1)).unsqueeze(1) * self._row_scale(start, 1, k)
        return read + self._read_prefix(q, cache.prefix)

    def check_room(self, size: int) -> None:
        if size > self.window:
            raise ValueError(
                f"a text of {size} positions is longer than the window of {self.window} for which this attention has "
                "weights: cut the text, use a larger window, or use the relative form, which takes any length"
            )


def _strip(start: int, end: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """The pairs (j, m) whose later position is in start ... end-1, as two rectangles."""
    return (slice(start, end), slice(0, end)), (slice(0, start), slice(start, end))


def _strips(weight: Tensor, size: int, block: int) -> tuple[Tensor, ...]:
    """Weights (C, d, N, N) -> their strips, (C, d, P) each."""
    bounds = [(start, min(start + block, size)) for start in range(0, size, block)]
    return tuple(torch.cat([weight[..., j, m].flatten(2) for j, m in _strip(*b)], 2) for b in bounds)


class _Strips(torch.autograd.Function):
    """`_strips` as one function, because autograd would fill N x N zeros per slice."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, size: int, block: int) -> tuple[Tensor, ...]:
        ctx.shape, ctx.bounds = weight.shape, [(s, min(s + block, size)) for s in range(0, size, block)]
        return _strips(weight, size, block)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        gradient = grads[0].new_zeros(ctx.shape)
        for bounds, grad in zip(ctx.bounds, grads, strict=True):
            places = [gradient[..., j, m] for j, m in _strip(*bounds)]
            for place, part in zip(places, grad.split([p[0, 0].numel() for p in places], 2), strict=True):
                place.copy_(part.unflatten(2, place.shape[2:]) if part.numel() else place)
        return gradient, None, None


class LagCache(StateCache):
    """[key | value] of the newest n positions, oldest first, zero before the first position."""

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
    r"""Each pair of lags (a, b), a, b < window, has weights.

    .. math:: y_i = \textstyle\sum_{a, b < n} W_{ab} A_{i,\,i-a,\,i-b}, \qquad A_{ijm} = \sum_r g_r q_{ir} k_{jr} v_{mr}

    Stationary, for texts of any length; W encodes relative positions. Parameters 3dR + hR + C n^2 d; T n^2 (R + d)
    multiply-adds, in memory linear in T. The last slot of W is lag 0: slot s is lag n - 1 - s. Rows are not scaled,
    because all rows i >= n - 1 have n^2 terms.

    Args:
        window: number n of lags; a position sees the newest n positions.
        Others are those of `MultiLinear`.

    ValueError: a size is below 1, or a prefix is passed without `reads_prefix`.
    """

    cache_type = LagCache

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None, size: int | Tensor) -> Tensor:
        return self._slide(q, F.pad(torch.cat((k, v), -1), (0, 0, self.window - 1, 0)), prefix)

    def _slide(self, q: Tensor, keys_values: Tensor, prefix: Tensor | None) -> Tensor:
        """Output for keys_values (B, T + n - 1, 2R), in which the window of position i is i ... i + n - 1."""
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
