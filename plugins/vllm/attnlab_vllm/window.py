"""MTLA with unmerged positions over the pages of the engine's KV cache."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from vllm.config import VllmConfig

from attnlab.attention import Attention, MTLAWindow
from attnlab.export import serving
from attnlab_vllm.cache import PagedAttention, Pages, Part


def windows(layers: Sequence[Attention], prefix: str, engine: VllmConfig) -> "list[PagedWindow]":
    """The paged form of each layer. ConfigError: a layer has no window, or another one or another stride.

    ValueError: the engine would keep all positions.
    """
    serving.check_windows(layers)
    if engine.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ValueError("--disable-hybrid-kv-cache-manager: attnlab-vllm frees old positions of MTLA; leave it out")
    same = [layer for layer in layers if isinstance(layer, MTLAWindow)]
    one, ends = same[0], [0, *accumulate(layer.elements_per_slot for layer in same)]
    sizes = ends[-1], one.stride, serving.spare_slots(one), one.first
    pages = [
        Pages(f"{prefix}pages.{i}", engine, *sizes, window) for i, window in enumerate((0, one.recent + one.stride))
    ]
    return [PagedWindow(layer, slice(*ends[i : i + 2]), pages, engine) for i, layer in enumerate(same)]


class PagedWindow(PagedAttention):
    """`MTLAWindow` over its columns of two kinds of pages, which all layers share.

    A page of B positions has B / s slots. The slot of position p belongs to the chunk that p completes, which is W
    positions after the chunk's last, so that a page depends on no position behind its own. Slots that nothing is merged
    into have the first F positions, with `spare` ones before them in each page, if these are too few. A page of the
    newest positions has B / s of them.
    """

    def __init__(self, attention: MTLAWindow, columns: slice, pages: list[Pages], engine: VllmConfig) -> None:
        super().__init__(attention, "", engine, pages[0])
        self.columns, self.newest = columns, pages[1]
        self.merged_from = -(-(attention.first + attention.recent) // attention.stride)  # slot of the first chunk

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for part, newest in zip(self.pages.parts(), self.newest.parts(), strict=True):
            out[0, part.tokens] = self._read(x[0, part.tokens], part, newest.table.long())
        return out

    def _read(self, x: Tensor, part: Part, table: Tensor) -> Tensor:
        """x (B, n, d) -> (B, n, d). `table`: pages of the newest positions, (B, pages)."""
        a, cache = self.attention, self._cache()
        assert isinstance(a, MTLAWindow)
        s, first, spare, merged_from = a.stride, a.first, self.pages.spare, self.merged_from
        merged, newest = (pages.kv_cache[:, 0, :, self.columns] for pages in (self.pages, self.newest))
        size, place, before = merged.shape[1] - spare, part.positions, part.positions[:, :1]
        rows, device = torch.arange(len(x), device=x.device)[:, None].expand_as(place), x.device
        pages = part.table[:, : -(-part.length // (size * s))].long()
        count = max(0, -(-part.length // s) - merged_from)
        ring = torch.arange(a.recent + s, device=device)
        old = before - 1 - (before - 1 - ring) % len(ring)  # newest position of each column
        columns = merged[pages]  # (B, pages, slots, elements), a copy
        text = torch.cat((
            columns[:, 0, :first],
            newest[table.gather(1, old.clamp(min=0) // size), old.clamp(min=0) % size],
            columns[:, :, spare:].flatten(1, 2)[:, merged_from : merged_from + count],
        ), 1)  # as in `WindowedCache`  # fmt: skip
        early, late = torch.arange(first, device=device), torch.arange(count, device=device)
        written = torch.cat((early < before, old >= 0, late < a._finished(before)), 1)
        text[~written] = 0.0  # other requests may have left anything there
        cache.open({"slots": text}, text.shape[1], before[:, 0] if part.cached is None else part.cached)
        out = a.extend(x, cache)
        cache.text = {}
        new = a._entries(x, (cache.cos[place], cache.sin[place]))["slots"]
        newest[table.gather(1, place // size), place % size] = new.to(newest.dtype)
        kept = (place < first) | (place // s >= merged_from)
        column = torch.where(place < first, place, a.raw + place // s - merged_from)
        slot = torch.where(place < first, place, spare + place // s % size)
        merged[pages.gather(1, place // (size * s))[kept], slot[kept]] = text[rows[kept], column[kept]]
        return out
