"""MTLA that leaves its newest and its first positions unmerged."""

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from .base import Cache, length_mask
from .bounds import Size, SizeOrZero
from .mla import LatentOptions
from .mtla import MTLA, MTLACache, Stride, take
from .ops.backends import memoized
from .ops.quantised import Sealing

BLOCK = 256  # queries per kernel call


class WindowedCache(MTLACache):
    """[first | ring | merged slots] of each row in one buffer, and the merged slots of prefixes.

    Position p, counted from the start of the prefix, is in column p if p < F, else in column F + p mod (W + s), where
    it stays until its chunk is merged. Text slot 0 is the first chunk that the prefix has not merged.
    Arguments are those of `PositionalCache`.
    """

    fixed = False

    def __init__(self, attention: "MTLAWindow", *sizes: Any) -> None:
        super().__init__(attention, *sizes)
        self.recent, self.first = attention.recent, attention.first
        self.reached = 0  # longest text before a crop, which has overwritten older positions

    def slots_up_to(self, length: int) -> int:
        raw = self.first + self.recent + self.stride
        return raw + text_slots(self.prefix_size, length, self.first + self.recent, self.stride)

    def crop(self, length: int) -> None:
        self._check_crop(length)
        ring, reached = self.recent + self.stride, max(self.reached, self.length)
        end = self.prefix_size + length  # in the row with the longest prefix, which has overwritten most
        oldest = max(self.first, end - ring + 1)  # first position that the next one reads or merges
        if length < self.length and oldest < end and oldest < self.prefix_size + reached - ring:
            raise ValueError(
                f"cannot crop to {length} positions: of {reached} the newest {ring} are cached unmerged, and the next "
                "position would read older ones; crop to 0 of a text without a prefix and feed the rest again"
            )
        self._cut(length)
        self.reached = reached if self.prefix_size + length else 0


def text_slots(prefix: int, length: int, unmerged: int, stride: int) -> int:
    """Largest number of slots that `length` text positions merge after a prefix of any length up to `prefix`.

    Args:
        prefix: length of the longest prefix; 0: no prefix.
        unmerged: number F + W of positions that are read unmerged.
        stride: number s of positions per slot.
    """
    return -(-length // stride) if prefix else max(0, (length - unmerged) // stride)


class MTLAWindow(MTLA):
    r"""MTLA in which every position reads the newest `recent` positions and the `first` ones unmerged.

    Chunks of s positions begin after the first F. A chunk is read as one slot once its last position is `recent` or
    more before the query, and position by position until then: an incomplete chunk is never read as a slot. Slot k is
    the mean of its latents, weighted by the gates,

    .. math::
        m_k = \textstyle\sum_j w_j c_j / \sum_j w_j, \qquad
        w_j = \sigma\big(\mathrm{fc}_c(\mathrm{pe}(k)) \cdot \mathrm{fc}_p(c_j)\big)

    with the rotary key of its newest position. With stride 1, or before any chunk is old enough, this is `MLA`.
    Positions count from the start of the prefix, as in `MTLA`.
    Cache: (r + d_r) / s elements per token, and the unmerged F + W + s positions.

    Args:
        recent: number W of newest positions that are read unmerged, including the position of the query.
        first: number F of first positions of the sequence that are never merged.
        Others are those of `MTLA`.

    ValueError: as for `MTLA`.
    """

    cache_type = WindowedCache

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        *,
        gate_dim: Size | None = None,
        stride: Stride = 2,
        recent: SizeOrZero = 8,
        first: SizeOrZero = 4,
        **options: Unpack[LatentOptions],
    ) -> None:
        super().__init__(d_model, num_heads, gate_dim=gate_dim, stride=stride, **options)
        self.recent, self.first = recent, first

    @property
    def raw(self) -> int:
        return self.first + self.recent + self.stride

    @property
    def kept(self) -> int:  # type: ignore[override]
        return self.raw

    def sealing(self, capacity: int) -> Sealing:
        return Sealing(self.stride, self.first + self.recent, capacity)

    def prefix_merged(self, size: int) -> int:
        """Number of chunks that a prefix of this size merges. Every text position reads them merged."""
        return max(0, (size + 1 - max(self.recent, 1) - self.first) // self.stride)

    def slots(self, capacity: int, prefix_capacity: int) -> tuple[int, int]:
        text = text_slots(prefix_capacity, capacity, self.recent + self.first, self.stride)
        return self.raw + text, self.prefix_merged(prefix_capacity)

    def _merge_chunks(self, chunks: Tensor, gates: Tensor, exists: Tensor | None = None) -> Tensor:
        """As in `MTLA`, but means over the existing positions, weighted by their gates."""
        weights = self._gate(chunks, gates.unsqueeze(-2))
        if exists is not None:
            weights = weights * exists
        total = weights.sum(2).clamp(min=torch.finfo(weights.dtype).tiny)
        return ((weights * chunks).sum(2) / total).to(chunks.dtype)

    def _merged(self, entries: Tensor, places: Tensor, numbers: Tensor, bound: int) -> Tensor:
        """Merge chunks of a sequence (B, P, r + d_r), given by positions (B, K, s) and numbers (B, K) below `bound`.

        -> their slots, (B, K, r + d_r); those with negative numbers are unspecified.
        """
        chunks = take(entries, places.flatten(1)).unflatten(1, places.shape[1:])
        gates = self.slot_gates(bound)[numbers.clamp(min=0)]
        latent = self._merge_chunks(chunks[..., : self.latent_dim], gates)
        return torch.cat((latent, chunks[:, :, -1, self.latent_dim :]), -1)

    def _continue(
        self,
        q: Tensor,
        new: Tensor,
        base: Tensor,
        done: Tensor,
        bound: int,
        early: Tensor | None = None,
        tail: Tensor | None = None,
        slots: Sequence[tuple[Tensor, Tensor, Tensor]] = (),
        dropout: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of new positions, q (B, n, H, D) and `new` [latent | rotary] (B, n, .).

        Args:
            base: first new position, (B,) or (1,).
            done: number of chunks merged before, (B,) or (1,).
            bound: number of positions up to the last new one, in the row that has most.
            early: first positions of the sequence, (B, F, .), valid below `base`; None: `base` is 0.
            tail: newest positions before `base`, (B, W + s, .); None: `base` is 0.
            slots: groups of (slots (B, A, .), mask of those that exist (B or 1, A), numbers of chunks (B or 1, A)).

        Returns:
            Output (B, n, H, d_v); chunks merged by these positions, (B, K, .); their numbers, (B, K), or -1 if a chunk
            is not complete.
        """
        steps, device, s = new.shape[1], new.device, self.stride
        entries = new if tail is None else torch.cat((tail.to(new.dtype), new), 1)
        before = entries.shape[1] - steps
        rows = base.expand(len(new))
        first = torch.arange(self.first, device=device).expand(len(new), -1)
        if early is None:
            early = new.new_zeros(len(new), self.first, new.shape[-1])
        at = first - rows[:, None]  # index of the first positions in `new`
        early = torch.where((at < 0)[..., None], early.to(new.dtype), take(new, at.clamp(0, steps - 1)))

        count = -(-steps // s)
        numbers = done.expand(len(new))[:, None] + torch.arange(count, device=device)
        ends = self.first + (numbers + 1) * s - 1
        places = ends[..., None] - torch.arange(s - 1, -1, -1, device=device) - (rows - before)[:, None, None]
        numbers = numbers.masked_fill(ends > (rows + steps - 1 - self.recent)[:, None], -1)
        merged = self._merged(entries, places.clamp(0, entries.shape[1] - 1), numbers, bound // s + 1)
        groups = [*slots, (merged, numbers >= 0, numbers)]

        outs = []
        for begin in range(0, steps, BLOCK):
            end = min(begin + BLOCK, steps)
            query = base[:, None] + torch.arange(begin, end, device=device)
            oldest = max(0, before + begin - self.recent - s + 2)
            key = base[:, None] - before + torch.arange(oldest, before + end, device=device)
            parts, seen = [early, entries[:, oldest : before + end]], [first[:1, None] <= query[..., None]]
            seen.append(_sees(query, key, self.first, self.recent, s))
            for stored, exists, number in groups:
                parts.append(stored.to(new.dtype))
                last = self.first + (number + 1) * s - 1
                seen.append((last[:, None] <= query[..., None] - self.recent) & exists[:, None])
            wide = max(len(mask) for mask in seen)
            mask = torch.cat([mask.expand(wide, -1, -1) for mask in seen], -1)
            outs.append(self._masked(q[:, begin:end], torch.cat(parts, 1), mask, dropout))
        return torch.cat(outs, 1), merged, numbers

    def _masked(self, q: Tensor, entries: Tensor, seen: Tensor, dropout: float) -> Tensor:
        """q (B, n, H, D), [latent | rotary] (B, k, r + d_r), seen (B or 1, n, k) -> (B, n, H, d_v)."""
        latent, rotary = entries.to(q.dtype).split([self.latent_dim, self.rope_dim], -1)
        return self._dense(q, self._expand(latent, rotary), seen[:, None], dropout)

    def _finished(self, lengths: Tensor) -> Tensor:
        """Number of chunks that are old enough to be merged, per row."""
        return ((lengths - self.recent - self.first) // self.stride).clamp(min=0)

    def _prefix_merged(self, lengths: Tensor) -> Tensor:
        """`prefix_merged` per row."""
        return ((lengths + 1 - max(self.recent, 1) - self.first) // self.stride).clamp(min=0)

    def _of_prefix(self, entries: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Prefixes [latent | rotary] (N, S, .) with lengths (N,) -> early, tail, slots, mask and numbers of slots."""
        size, device = entries.shape[1], entries.device
        early = take(entries, torch.arange(self.first, device=device).clamp(max=size - 1).expand(len(entries), -1))
        tail = lengths[:, None] - (self.recent + self.stride) + torch.arange(self.recent + self.stride, device=device)
        tail = take(entries, tail.clamp(min=0))
        count = self.prefix_merged(size)
        numbers = torch.arange(count, device=device).expand(len(entries), -1)
        places = self.first + numbers[..., None] * self.stride + torch.arange(self.stride, device=device)
        merged = self._merged(entries, places, numbers, size // self.stride + 1)
        return early, tail, merged, length_mask(self._prefix_merged(lengths), count), numbers

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        angles, before = self._angles(x, prefix, prefix_lengths)
        q, new = self._queries(x, angles), torch.cat(self._latents(x, angles), -1)
        dropout = self.dropout if self.training else 0.0
        base, size = torch.zeros(1, dtype=torch.long, device=x.device), 0 if prefix is None else prefix.shape[1]
        bound = size + x.shape[1]
        if prefix is None:
            return self.out(self._continue(q, new, base, base, bound, dropout=dropout)[0].flatten(2))
        stored = torch.cat(self._latents(prefix, before), -1)
        base = base + size if prefix_lengths is None else prefix_lengths
        early, tail, merged, exists, numbers = self._of_prefix(stored, base.expand(len(stored)))
        done, slots = self._prefix_merged(base), [(merged, exists, numbers)]
        return self.out(self._continue(q, new, base, done, bound, early, tail, slots, dropout)[0].flatten(2))

    def _store_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        assert isinstance(cache, WindowedCache)
        size, text = prefix.shape[1], cache.text["slots"]
        stored = torch.cat(self._latents(prefix, cache.prefix_angles(0, size)), -1)
        lengths = torch.full((len(stored),), size, device=stored.device) if prefix_lengths is None else prefix_lengths
        early, tail, merged, exists, _ = self._of_prefix(stored, lengths)
        cache.write(cache.prefix, 0, {"slots": merged})
        cache.prefix_size, cache.prefix_slots, cache.prefix_lengths = size, merged.shape[1], prefix_lengths
        cache.prefix_mask = None if prefix_lengths is None else exists
        cache.prefix_counts = None if prefix_lengths is None else self._prefix_merged(prefix_lengths)
        text[:, : self.first] = early.repeat_interleave(cache.beam, 0)
        ring = self.recent + self.stride
        places = (cache.starts()[:, None] + torch.arange(ring, device=text.device)) % ring  # oldest first
        rows = torch.arange(len(text), device=text.device)[:, None]
        text[rows, self.first + places] = tail.repeat_interleave(cache.beam, 0).to(text.dtype)

    def _extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, WindowedCache)
        steps, start, text = x.shape[1], cache.start, cache.text["slots"]
        if (step := cache.step(self, x)) is not None:
            turn = cache.turn(cache.length)
            latent, key = step.project(x, turn)
            used, mask = self._store(step.newest(latent, key, turn), cache.length, cache)
            assert isinstance(used, int)
            return step.read(cache, used, mask)
        angles = cache.angles(start, start + steps)
        q, new = self._queries(x, angles), torch.cat(self._latents(x, angles), -1)
        if steps == 1 or isinstance(start, Tensor):
            used, mask = self._store(new[:, 0], start, cache)
            return self._step(q, cache, used, mask)
        base = cache.starts() + start
        rows, ring = torch.arange(len(text), device=text.device)[:, None], self.recent + self.stride
        order = self.first + (base[:, None] + torch.arange(ring, device=text.device)) % ring  # columns, oldest first
        slots = []
        if cache.prefix_slots:
            merged = cache.prefix["slots"][:, : cache.prefix_slots].repeat_interleave(cache.beam, 0)
            numbers = torch.arange(cache.prefix_slots, device=text.device)[None]
            exists = numbers >= 0 if cache.prefix_mask is None else cache.prefix_mask.repeat_interleave(cache.beam, 0)
            slots.append((merged, exists, numbers))
        first_text = self._prefix_merged(cache.starts())  # number of text slot 0
        done = torch.maximum(self._finished(base), first_text)
        if stored := cache.used_slots() - self.raw:
            numbers = first_text[:, None] + torch.arange(stored, device=text.device)
            merged = cache.past(self.raw + stored)["slots"][:, self.raw :]
            slots.append((merged, numbers < done[:, None], numbers))
        out, merged, numbers = self._continue(
            q, new, base, done, cache.prefix_size + start + steps, text[:, : self.first], text[rows, order], slots
        )
        full = numbers >= 0
        columns = self.raw + numbers - first_text[:, None] - cache.sealed
        text[rows.expand_as(full)[full], columns[full]] = merged[full].to(text.dtype)
        self._store_raw(text, new, base)
        return self.out(out.flatten(2))

    def _store_raw(self, text: Tensor, new: Tensor, base: Tensor) -> None:
        """Store new positions (B, n, .), the first of which is `base`, in the unmerged columns."""
        ring, steps = self.recent + self.stride, new.shape[1]
        at = base[:, None] + torch.arange(steps, device=text.device)
        place = torch.where(at < self.first, at, self.first + at % ring).expand(len(text), -1)
        newest = (at < self.first) | (at >= base[:, None] + steps - ring)  # the others would be overwritten
        newest = newest.expand(len(text), -1)
        rows = torch.arange(len(text), device=text.device)[:, None].expand_as(newest)
        text[rows[newest], place[newest]] = new[newest].to(text.dtype)

    def _store(self, new: Tensor, start: int | Tensor, cache: WindowedCache) -> tuple[int | Tensor, Tensor]:
        """Store one position (B, r + d_r), and merge the chunk that has become old enough.

        -> number of columns to read (on the device: `start`, see `PositionalCache.reads`), and their mask, (B or 1,
        columns).
        """
        if isinstance(start, Tensor):
            columns, _ = cache.reads(start)
            return start, self._store_ragged(new, cache.starts() + start, cache, columns - self.raw)
        if cache.prefix_lengths is not None:
            slots = cache.slots_up_to(start + 1) - self.raw
            return self.raw + slots, self._store_ragged(new, cache.starts() + start, cache, slots - cache.sealed)
        text, s, ring, p = cache.text["slots"], self.stride, self.recent + self.stride, cache.prefix_size + start
        place = p if p < self.first else self.first + p % ring
        text[:, place : place + 1] = new.unsqueeze(1).to(text.dtype)  # torch.compile would specialise on an index
        first_text, old = self.prefix_merged(cache.prefix_size), p + 1 - self.recent - self.first
        number = old // s - 1
        if old % s == 0 and number >= first_text:
            begin = (self.first + number * s) % ring
            if torch.compiler.is_compiling() or begin + s > ring:
                chunk = text[:, self.first + (begin + torch.arange(s, device=text.device)) % ring]
            else:  # a view takes a third of the time
                chunk = text[:, self.first + begin : self.first + begin + s]
            merged = self._slot(chunk.to(new.dtype), cache.gate_slot[number : number + 1])
            column = self.raw + number - first_text - cache.sealed
            text[:, column : column + 1] = merged.unsqueeze(1).to(text.dtype)
        if not torch.compiler.is_compiling() and p >= self.raw:
            p = self.raw + (p - self.raw) % math.lcm(ring, s)  # the mask is periodic from here on
        return self.raw + max(0, number - first_text + 1), _columns(p, self.first, self.recent, s, text.device)

    def _slot(self, chunk: Tensor, gates: Tensor) -> Tensor:
        """Merge one chunk of [latent | rotary], (B, s, r + d_r), with gates (1 or B, g) -> (B, r + d_r)."""
        latent = self._merge_chunks(chunk[:, None, :, : self.latent_dim], gates.to(chunk.dtype).unsqueeze(1))
        return torch.cat((latent[:, 0], chunk[:, -1, self.latent_dim :]), -1)

    def _store_ragged(self, new: Tensor, base: Tensor, cache: WindowedCache, count: int) -> Tensor:
        """As `_store`, if prefixes differ in length or the length is on the device -> the mask of columns.

        `count` is the largest number of text slots that are read and no codes.
        """
        text, s, ring = cache.text["slots"], self.stride, self.recent + self.stride
        rows = torch.arange(len(text), device=text.device)
        text[rows, torch.where(base < self.first, base, self.first + base % ring)] = new.to(text.dtype)
        first_text, size = self._prefix_merged(cache.starts()), text.shape[1] - self.raw
        number = (base + 1 - self.recent - self.first) // s - 1
        if size:
            due = ((base + 1 - self.recent - self.first) % s == 0) & (number >= first_text)
            places = self.first + (self.first + number[:, None] * s + torch.arange(s, device=text.device)) % ring
            merged = self._slot(text[rows[:, None], places].to(new.dtype), cache.gate_slot[number.clamp(min=0)])
            column = self.raw + (number - first_text - cache.sealed).clamp(0, size - 1)
            text[rows, column] = torch.where(due[:, None], merged.to(text.dtype), text[rows, column])
        slots = first_text[:, None] + cache.sealed + torch.arange(count, device=text.device)
        return torch.cat((_unmerged(base, self.first, self.recent, s), slots <= number[:, None]), -1)


def _sees(query: Tensor, key: Tensor, first: int, recent: int, stride: int) -> Tensor:
    """Whether query positions (B, n) read key positions (B, k) from `first` on unmerged -> (B, n, k)."""
    query, key = query[..., None], key[:, None]
    end = key + stride - 1 - (key - first) % stride  # the last position of the key's chunk
    return (key <= query) & (key >= first) & (end > query - recent)


def _unmerged(position: Tensor, first: int, recent: int, stride: int) -> Tensor:
    """Mask of the columns [first | ring] that each row reads at its position (B,) -> (B, columns) bool."""
    position, ring = position[:, None], recent + stride
    stored = position - (position - torch.arange(ring, device=position.device)) % ring  # newest position per column
    early = torch.arange(first, device=position.device) <= position
    return torch.cat((early, _sees(position, stored, first, recent, stride)[:, 0]), -1)


@memoized
def _columns(position: int, first: int, recent: int, stride: int, device: torch.device) -> Tensor:
    """`_unmerged` for one position of all rows, (1, columns), shared by all layers."""
    return _unmerged(torch.full((1,), position, device=device), first, recent, stride)
