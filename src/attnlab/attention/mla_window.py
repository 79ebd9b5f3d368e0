"""Multi-head latent attention over a sliding window of the newest positions."""

from typing import Unpack

import torch
from torch import Tensor

from .base import Cache, length_mask
from .bounds import Size, SizeOrZero
from .mla import MLA, LatentCache, LatentOptions
from .sliding_window import BLOCK, WindowCache, Windowed

WIDEST = 256  # queries per kernel call, at most: kernels for values narrower than keys materialise their logits


class LatentWindowCache(WindowCache, LatentCache):
    """[latent | rotary key] of the first `sinks` text positions and of the newest `window`."""


class MLAWindow(Windowed, MLA):
    r"""Multi-head latent attention to the newest `window` text positions and to the prefix.

    .. math:: o_{ih} = U^v_h \textstyle\sum_j P_{ihj} c_j, \quad P_{ihj} = 0 \text{ unless } i - \text{window} < j \le i
        \text{ or } j < \text{sinks}

    for text positions i and j, as in `SlidingWindow` (Mistral 7B, section 2; StreamingLLM, section 3.1).
    With a window of at least the text's length this is `MLA`. Cache: r + d_r elements per position for at most sinks +
    window text positions, none for others; prefixes are cached in full.

    Args:
        window: number of newest text positions that a position sees, including itself, at least 1.
        sinks: number of first text positions that every position sees besides.
        Others are those of `MLA`.

    ValueError: `window` is below 1, `sinks` is below 0, or as for `MLA`.
    """

    cache_type = LatentWindowCache
    native_layer = MLA.native_layer

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        *,
        window: Size = 128,
        sinks: SizeOrZero = 0,
        **options: Unpack[LatentOptions],
    ) -> None:
        super().__init__(d_model, num_heads, **options)
        self._slide(window, sinks)

    @property
    def block(self) -> int:
        return min(max(self.window, BLOCK), WIDEST)

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        if x.shape[1] <= self.sinks + self.window:
            return super()._forward(x, prefix, lengths, prefix_lengths)
        angles, before = self._angles(x, prefix, prefix_lengths)
        mask = None if prefix is None or prefix_lengths is None else length_mask(prefix_lengths, prefix.shape[1])
        past = None if prefix is None else (*self._halves(self._expand(*self._latents(prefix, before))), mask)
        text = self._halves(self._expand(*self._latents(x, angles)))
        return self._joined(self._queries(x, angles), text, past, self.dropout if self.training else 0.0)

    def _joined(
        self,
        q: Tensor,
        text: tuple[Tensor, Tensor],
        prefix: tuple[Tensor, Tensor, Tensor | None] | None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Queries (B, n, H, D) -> outputs (B, n, d); other arguments as in `_read`."""
        return self.out(self._read(q.transpose(1, 2), *text, prefix, dropout).transpose(1, 2).flatten(2))

    def _halves(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Packed (B, K, H, d_v + D) -> keys (B, H, K, D) and values (B, H, K, d_v)."""
        value, key = packed.transpose(1, 2).split([self.head_dim, self.head_dim + self.rope_dim], -1)
        return key, value

    def _encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Every position sees the sinks, and those less than `window` away from it, on both sides."""
        angles, _ = self._angles(x, None, None)
        q, packed = self._queries(x, angles), self._expand(*self._latents(x, angles))
        dropout = self.dropout if self.training else 0.0
        return self.out(self._dense(q, packed, self._near(lengths, x.shape[1]), dropout).flatten(2))

    def _extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, LatentWindowCache)
        new, start, size = x.shape[1], cache.start, cache.prefix_size
        inside = not isinstance(start, Tensor) and start + new <= self.sinks + self.window  # all are seen
        if inside or new == 1 and not cache.coded:
            return super()._extend(x, cache)
        angles = cache.angles(start, start + new)
        q, entries = self._queries(x, angles), self._entries(x, angles)
        slots = torch.cat((cache.before()["slots"].to(q.dtype), entries["slots"]), 1)
        past = None
        if size:
            packed = self._stored(cache.prefix["slots"][:, :size], q.dtype).packed.repeat_interleave(cache.beam, 0)
            mask = None if cache.prefix_mask is None else cache.prefix_mask.repeat_interleave(cache.beam, 0)
            past = *self._halves(packed), mask
        out = self._joined(q, self._halves(self._stored(slots, q.dtype).packed), past)
        cache.keep(entries)
        return out

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        read = prefix + min(context - prefix, self.sinks + self.window)
        return super().multiply_adds(1) + (read - 1) * self.num_heads * (2 * self.latent_dim + self.rope_dim)
