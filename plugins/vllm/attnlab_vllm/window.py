"""Mechanisms that read a window of newest positions, over the pages of the engine's KV cache."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.config import VllmConfig

from attnlab.attention import Attention, MTLAWindow
from attnlab.attention.positional import PositionalAttention
from attnlab.attention.sliding_window import Windowed
from attnlab.export import serving
from attnlab_vllm.cache import PagedAttention, Pages, Part


def paged(layers: Sequence[Attention], prefix: str, engine: VllmConfig) -> list[PagedAttention]:
    """The paged form of each layer. ValueError: the engine would keep all positions."""
    groups, forms = serving.groups(layers), list[PagedAttention]()
    if any(groups) and engine.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ValueError("--disable-hybrid-kv-cache-manager: attnlab-vllm frees old positions; leave it out")
    pages, before = {seen: Pages(f"{prefix}pages.{seen}", engine, groups, seen) for seen in groups}, Counter[int]()
    for layer in layers:
        assert isinstance(layer, PositionalAttention)
        own = serving.shares(layer)
        first, *newest = [(pages[seen], before[seen]) for seen in own]
        before.update([*own])
        if isinstance(layer, MTLAWindow):
            forms.append(PagedWindow(layer, engine, *first, *newest[0]))
        else:
            forms.append((PagedSliding if isinstance(layer, Windowed) else PagedAttention)(layer, engine, *first))
    return forms


class PagedSliding(PagedAttention):
    """A mechanism with a sliding window, over pages that the engine frees behind it.

    Each page has the sinks of its request too, as far as they are not behind it, so that none needs an older page.
    """

    def _extend(self, x: Tensor, part: Part) -> Tensor:
        cache, memory, place, table = self._cache(), self.memory, part.positions, part.table.long()
        window, sinks = self.pages.window, cache.kept
        size, before = memory.shape[1] - sinks, place[:, :1]
        columns = window + x.shape[1] - 1  # of a ring in which nothing is overwritten that a new position reads
        rows = torch.arange(len(x), device=x.device)[:, None]
        first = torch.arange(sinks, device=x.device)
        old = before - torch.arange(1, window, device=x.device)
        seen = memory.new_zeros(len(x), sinks + columns, memory.shape[2])
        newest = table.gather(1, (before - 1).clamp(min=0) // size)
        # others may have left anything where nothing is written yet
        seen[:, :sinks] = memory[newest, first].masked_fill((first >= before)[..., None], 0.0)
        given = memory[table.gather(1, old.clamp(min=0) // size), sinks + old.clamp(min=0) % size]
        seen[rows, sinks + (old - sinks) % columns] = given.masked_fill((old < sinks)[..., None], 0.0)
        cache.open(self._buffers(seen), sinks + columns, before[:, 0] if part.cached is None else part.cached)
        out = self.attention.extend(x, cache)
        memory[table.gather(1, place // size), sinks + place % size] = seen[rows, cache.place(place)[0]]
        touched = torch.cat((place[:, ::size], place[:, -1:]), 1) // size
        memory[table.gather(1, touched)[..., None], first] = seen[:, None, :sinks]
        cache.text = {}  # the copies of all layers would be a second cache
        return out


class PagedWindow(PagedAttention):
    """`MTLAWindow` over its parts of two kinds of pages.

    A page of B positions has B / s slots. The slot of position p belongs to the chunk that p completes, which is W
    positions after the chunk's last, so that a page depends on no position behind its own. Slots that nothing is merged
    into have the first F positions, with `spare` ones before them in each page, if these are too few.

    Args:
        newest: pages of the newest positions, unmerged.
        rank: number of layers before it in these.
        Others are those of `PagedAttention`.
    """

    def __init__(
        self, attention: MTLAWindow, engine: VllmConfig, pages: Pages, number: int, newest: Pages, rank: int
    ) -> None:
        super().__init__(attention, engine, pages, number)
        self.newest, self.rank, self.spare = newest, rank, serving.spare_slots(attention)
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
        s, first, spare, merged_from = a.stride, a.first, self.spare, self.merged_from
        merged, newest = self.memory, self.newest.part(self.rank)
        size, recent = merged.shape[1] - spare, newest.shape[1]
        place, before = part.positions, part.positions[:, :1]
        rows, device = torch.arange(len(x), device=x.device)[:, None].expand_as(place), x.device
        pages = part.table[:, : -(-part.length // (size * s))].long()
        count = max(0, -(-part.length // s) - merged_from)
        ring = torch.arange(a.recent + s, device=device)
        old = before - 1 - (before - 1 - ring) % len(ring)  # newest position of each column
        columns = merged[pages]  # (B, pages, slots, elements), a copy
        text = torch.cat((
            columns[:, 0, :first],
            newest[table.gather(1, old.clamp(min=0) // recent), old.clamp(min=0) % recent],
            columns[:, :, spare:].flatten(1, 2)[:, merged_from : merged_from + count],
        ), 1)  # as in `WindowedCache`  # fmt: skip
        early, late = torch.arange(first, device=device), torch.arange(count, device=device)
        written = torch.cat((early < before, old >= 0, late < a._finished(before)), 1)
        text[~written] = 0.0  # other requests may have left anything there
        cache.open({"slots": text}, text.shape[1], before[:, 0] if part.cached is None else part.cached)
        out = a.extend(x, cache)
        cache.text = {}
        new = a._entries(x, (cache.cos[place], cache.sin[place]))["slots"]
        newest[table.gather(1, place // recent), place % recent] = new.to(newest.dtype)
        kept = (place < first) | (place // s >= merged_from)
        column = torch.where(place < first, place, a.raw + place // s - merged_from)
        slot = torch.where(place < first, place, spare + place // s % size)
        merged[pages.gather(1, place // (size * s))[kept], slot[kept]] = text[rows[kept], column[kept]]
        return out
