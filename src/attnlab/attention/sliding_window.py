"""Base classes for sliding windows of the newest positions, and multi-head attention over such a window."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Cache, length_mask
from .bounds import PositiveFloat, Rate, Rotary, Size, SizeOrZero
from .mha import MHA, Projection
from .ops.backends import Backend, choose, dense_attention
from .ops.flex import windowed
from .ops.quantised import BLOCK as CODED
from .ops.quantised import Sealing
from .ops.rope import Llama3Scaling
from .positional import PositionalAttention, PositionalCache

BLOCK = 64  # queries per kernel call, at least; a wider window uses as many as its width


class WindowCache(PositionalCache):
    """Entries of the first `sinks` text positions and of the newest `window`.

    Position t is in slot t at first, and after sinks + window positions in slot sinks + (t - sinks) mod window.

    Arguments are those of `PositionalCache`.
    """

    fixed = False

    def __init__(self, attention: "Windowed", *sizes: Any) -> None:
        super().__init__(attention, *sizes)
        self.window = attention.window
        self.reached = 0  # longest text before a crop, which has overwritten older positions

    @property
    def size(self) -> int:
        """Number of text positions that are stored, at most."""
        if self.coded:
            return self.capacity  # slots have the numbers of their positions; old codes are overwritten
        name, buffer = next(iter(self.text.items()))
        return buffer.shape[self.axes[name]]

    def slots_up_to(self, length: int) -> int:
        return min(length, self.size)

    def _slot(self, position: Any) -> Any:
        """Slot of a text position, an integer or a tensor of any shape."""
        moving = self.kept + (position - self.kept) % max(self.size - self.kept, 1)
        if isinstance(position, Tensor):
            return torch.where(position < self.kept, position, moving)
        return position if position < self.kept else moving

    def place(self, position: Any) -> tuple[Any, bool, Any]:
        after = position + 1
        read = after.clamp(max=self.size) if isinstance(after, Tensor) else min(after, self.size)
        return self._slot(position), True, read

    def crop(self, length: int) -> None:
        self._check_crop(length)
        reached = max(self.reached, self.length)
        first = max(0, length - self.window + 1)  # the next position reads first ... length - 1
        oldest = reached - (self.size - self.kept)
        for coded in self.coded.values():
            oldest = self.kept + self.sealing(reached) - coded.rows.shape[-3]
        if length < self.length and max(first, self.kept) < min(length, oldest):
            raise ValueError(
                f"cannot crop to {length} positions: of {reached} the newest {reached - oldest} are cached, and the "
                f"next position would read from number {first} on; crop to 0 and feed the rest again"
            )
        self._cut(length)
        self.reached = reached if length else 0

    def before(self) -> dict[str, Tensor]:
        """Entries that the next text position reads besides its own, oldest first, by the names of `text`."""
        entries, first, sealed = {}, max(0, self.length - self.window + 1), self.sealed
        for name, buffer in self.text.items():
            if self.coded:
                axis, final = self.axes[name], self.kept + sealed
                start = max(first, self.kept)
                sinks = buffer.narrow(axis, 0, min(self.kept, self.length))
                codes = self.coded[name].read(min(start, final) - self.kept, sealed)
                start = max(start, final)
                newest = buffer.narrow(axis, start - sealed, max(self.length - start, 0))
                entries[name] = torch.cat((sinks, codes, newest), axis)
                continue
            newest = torch.arange(first, self.length, device=buffer.device)
            positions = torch.cat((torch.arange(min(self.kept, first), device=buffer.device), newest))
            entries[name] = buffer.index_select(self.axes[name], self._slot(positions))
        return entries

    def keep(self, new: dict[str, Tensor]) -> None:
        """Write the entries of the next text positions, by the names of `text`. The newest ones remain."""
        if self.coded:
            self.write(self.text, self.length, new)
            return
        for name, values in new.items():
            buffer, axis = self.text[name], self.axes[name]
            end = self.length + values.shape[axis]
            positions = torch.arange(self.length, end, device=buffer.device)
            stay = positions[(positions < self.kept) | (positions >= end - (self.size - self.kept))]
            entries = values.index_select(axis, stay - self.length).to(buffer.dtype)
            buffer.index_copy_(axis, self._slot(stay), entries)


class Windowed(PositionalAttention):
    """Base of mechanisms whose text positions see the first `sinks`, the newest `window`, and the prefix.

    It precedes the mechanism in the bases of a class, whose `cache_type` is a `WindowCache`.

    Attributes:
        window: number of newest text positions that a position sees, including itself.
        sinks: number of first text positions that every position sees besides.
    """

    window: int
    sinks: int
    scale: float

    def _slide(self, window: int, sinks: int) -> None:
        """Set the window and the sinks. ValueError: no position would be seen, or fewer than none."""
        if window < 1:
            raise ValueError(f"window={window}: expected at least 1")
        if sinks < 0:
            raise ValueError(f"sinks={sinks}: expected at least 0")
        self.window, self.sinks, self.kept = window, sinks, sinks

    @property
    def block(self) -> int:
        """Number of queries per call of dense attention."""
        return max(self.window, BLOCK)

    def visible(self, position: int) -> Sequence[int]:
        first = max(0, position - self.window + 1)
        return [*range(min(self.sinks, first)), *range(first, position + 1)]

    def sealing(self, capacity: int) -> Sealing:
        return Sealing(1, self.sinks, capacity)

    def slots(self, capacity: int, prefix_capacity: int) -> tuple[int, int]:
        return min(capacity, self.sinks + self.window), prefix_capacity

    def text_slots(self, capacity: int, prefix_capacity: int) -> tuple[int, int]:
        if self.cache_bits is None:
            return super().text_slots(capacity, prefix_capacity)
        sealing = self.sealing(capacity)
        return min(capacity, self.sinks + sealing.open), min(sealing(capacity), -(-self.window // CODED) * CODED)

    @property
    def cache_elements_per_token(self) -> float:
        """Zero: the cache does not grow beyond the window."""
        return 0.0

    def _read(
        self, q: Tensor, key: Tensor, value: Tensor, prefix: tuple[Tensor, Tensor, Tensor | None] | None, dropout: float
    ) -> Tensor:
        """Attention of the last n of K text positions, q (B, H, n, D) -> (B, H, n, Dv), block by block.

        Keys and values of the text (B, G, K, .), the sinks first and the others without a gap, and of prefixes
        (B, G, S, .) with a mask of those that exist (B, S).
        """
        key, value = key.to(q.dtype), value.to(q.dtype)
        if prefix is not None:
            prefix = prefix[0].to(q.dtype), prefix[1].to(q.dtype), prefix[2]
        if choose("window", q, dropout=dropout, window=self.window, block=self.block) is Backend.FLEX:
            return windowed(q, key, value, self.window, self.scale, prefix, self.sinks)
        outs, total = [], key.shape[2]
        for start in range(total - q.shape[2], total, self.block):
            end, first = min(start + self.block, total), max(0, start - self.window + 1)
            i, j = (torch.arange(begin, end, device=q.device) for begin in (start, first))
            k, v = key[:, :, first:end], value[:, :, first:end]
            if sinks := min(self.sinks, first):
                j = torch.cat((torch.arange(sinks, device=q.device), j))
                k, v = (torch.cat((every[:, :, :sinks], part), 2) for every, part in ((key, k), (value, v)))
            seen = (j <= i[:, None]) & ((j > i[:, None] - self.window) | (j < self.sinks))
            if prefix is not None:
                before, values, exists = prefix
                k, v = torch.cat((before, k), 2), torch.cat((values, v), 2)
                if exists is None:
                    seen = F.pad(seen, (before.shape[2], 0), value=True)
                else:
                    rows = exists[:, None, None].expand(-1, -1, len(i), -1)
                    seen = torch.cat((rows, seen.expand(len(rows), 1, -1, -1)), -1)
            queries = q[:, :, start - total + q.shape[2] : end - total + q.shape[2]]
            outs.append(dense_attention(queries, k, v, seen, dropout=dropout, scale=self.scale))
        return torch.cat(outs, 2)

    def _near(self, lengths: Tensor, size: int) -> Tensor:
        """Mask for `encode`, (B, 1, size, size): a position sees the sinks and those less than `window` away."""
        place = torch.arange(size, device=lengths.device)
        near = ((place - place[:, None]).abs() < self.window) | (place < self.sinks)
        diagonal = torch.eye(size, dtype=torch.bool, device=lengths.device)  # padding sees itself: no empty softmax
        return near & length_mask(lengths, size)[:, None, None] | diagonal


class SlidingWindow(Windowed, MHA):
    r"""Multi-head, grouped-query or multi-query attention to the newest `window` text positions.

    .. math:: o_{ih} = \textstyle\sum_j P_{ihj} v_{jg}, \quad P_{ihj} = 0 \text{ unless } i - \text{window} < j \le i
        \text{ or } j < \text{sinks}

    for text positions i and j (Longformer, section 3.1, made causal; Mistral 7B, section 2). Every position sees the
    full prefix: the window applies to text positions only. Trained models send the attention that they do not need to
    the first positions, and lose much without these (StreamingLLM, section 3.1; its keys are rotated by places in the
    cache, and these by their positions).
    With a window of at least the text's length this is `MHA`. Cache: 2 G D elements per position for at most sinks +
    window text positions, none for others; prefixes are cached in full.

    Args:
        window: number of newest text positions that a position sees, including itself, at least 1.
        sinks: number of first text positions that every position sees besides.
        Others are those of `MHA`.

    ValueError: `window` is below 1, `sinks` is below 0, or sizes do not fit each other.
    """

    cache_type = WindowCache
    native_layer = MHA.native_layer

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        num_kv_heads: Size | None = None,
        head_dim: Size | None = None,
        window: Size = 128,
        sinks: SizeOrZero = 0,
        *,
        bias: bool | Sequence[Projection] = True,
        qk_norm: bool = False,
        dropout: Rate = 0.0,
        rope_theta: PositiveFloat | None = 10000.0,
        rope_scaling: Llama3Scaling | None = None,
        rope_dim: Rotary | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(
            d_model, num_heads, num_kv_heads, head_dim, bias=bias, qk_norm=qk_norm, dropout=dropout,
            rope_theta=rope_theta, rope_scaling=rope_scaling, rope_dim=rope_dim, norm_eps=norm_eps,
        )  # fmt: skip
        self._slide(window, sinks)

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        if prefix is None and x.shape[1] <= self.sinks + self.window:
            return super()._forward(x, None, lengths, None)
        angles, before = self._angles(x, prefix, prefix_lengths)
        mask = None if prefix is None or prefix_lengths is None else length_mask(prefix_lengths, prefix.shape[1])
        q, (key, value) = self._queries(x, angles), self._entries(x, angles).values()
        past = None
        if prefix is not None:
            old_key, old_value = self._entries(prefix, before).values()
            past = old_key, old_value, mask
        return self._join(self._read(q, key, value, past, self._dropout))

    def _extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, WindowCache)
        new, start, size = x.shape[1], cache.start, cache.prefix_size
        if new == 1 and not cache.coded:
            return super()._extend(x, cache)
        angles = cache.angles(start, start + new)
        q, entries = self._queries(x, angles), self._entries(x, angles)
        key, value = (torch.cat((old.to(q.dtype), entries[name]), 2) for name, old in cache.before().items())
        past = None
        if size:
            before, values = (t[:, :, :size].repeat_interleave(cache.beam, 0) for t in cache.prefix.values())
            mask = None if cache.prefix_mask is None else cache.prefix_mask.repeat_interleave(cache.beam, 0)
            past = before, values, mask
        out = self._join(self._read(q, key, value, past, 0.0))
        cache.keep(entries)
        return out

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        return super().multiply_adds(prefix + min(context - prefix, self.sinks + self.window))
