"""Multi-head temporal latent attention: MLA whose latents are merged along time."""

from typing import Annotated, Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Cache, blank, length_mask
from .bounds import Ge, Le, Size
from .mla import MLA, LatentCache, LatentOptions, LatentStep
from .ops.backends import Backend, choose, memoized
from .ops.native import Layer
from .ops.partial_softmax import Past, expanded_attention
from .ops.quantised import Sealing
from .positional import Angles, PositionalCache

Stride = Annotated[int, Ge(1), Le(1024)]  # the cost of a step grows with it; the papers' texts are shorter


@memoized
def _sinusoid(length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """pe(k), (length, width): sin and cos of k * 10000^(-2m/width), interleaved."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * frequencies
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1).to(device, dtype)


def take(x: Tensor, places: Tensor) -> Tensor:
    """x (B, T, ...) indexed along the second axis by places (B, U) int64 -> (B, U, ...)."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1] + places
    # The backward of index_select takes a ninth of that of indexing.
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, places.shape)


class MTLACache(LatentCache):
    """One slot per `stride` positions. A slot that the prefix fills in part is stored with the text of each row.

    Positions count from the start of the prefix: text position t of a row whose prefix has length S is in slot
    floor((S + t) / s). Text slot 0 is slot floor(S / s).
    Arguments are those of `PositionalCache`.
    """

    def __init__(self, attention: "MTLA", *sizes: Any) -> None:
        super().__init__(attention, *sizes)
        self.stride = attention.stride
        self.prefix_slots = 0
        slots = (self.prefix_capacity + self.capacity + self.stride) // self.stride + 1
        self.gate_slot = attention.slot_gates(slots).detach().to(self.text["slots"].dtype)  # fc_c(pe)

    @property
    def prefix_used(self) -> int:
        return self.prefix_slots

    def place(self, position: Any) -> tuple[Any, bool, Any]:
        slot, place = divmod(position, self.stride)
        return slot, place == 0, slot + 1

    def slots_up_to(self, length: int) -> int:
        offset = self.prefix_size % self.stride if self.prefix_lengths is None else self.stride - 1
        return -(-(offset + length) // self.stride)

    def full_slots(self, lengths: Tensor) -> Tensor:
        return lengths // self.stride

    def crop(self, length: int) -> None:
        self._check_crop(length)
        if length != self.length and bool(((self.starts() + length) % self.stride != 0).any()):
            raise ValueError(
                f"cannot crop to {length} positions: they end inside a slot of {self.stride} merged positions, "
                "which cannot be separated; crop to a slot boundary and feed the rest again"
            )
        self._cut(length)

    def prefix_end(self) -> int | Tensor:
        """Length of the prefix: an int, or (B,) if prefixes differ in length."""
        return self.prefix_size if self.prefix_lengths is None else self.row_lengths()


class _OpenChunk(NamedTuple):
    """The chunk that the next positions continue. Numbers are (B,) tensors if the rows differ."""

    number: int | Tensor = 0
    bound: int = 0  # largest possible `number`
    offset: int | Tensor = 0  # positions it already contains
    carry: Tensor | None = None  # their gated sum, (B, r)


class _Prefix(NamedTuple):
    """A merged prefix: its full slots, and the chunk that it leaves open."""

    latent: Tensor  # (B, P, r)
    rotary: Tensor  # (B, P, d_r)
    mask: Tensor | None  # (B, P)
    chunk: _OpenChunk


class MTLA(MLA):
    r"""MLA with a gate and a running sum inside chunks of `stride` positions (MTLA paper, section 4).

    .. math::
        w_i = \sigma\big(\mathrm{fc}_c(\mathrm{pe}(\lfloor i/s \rfloor)) \cdot \mathrm{fc}_p(c_i)\big), \qquad
        m_i = \textstyle\sum_{j = s \lfloor i/s \rfloor}^{i} w_j c_j

    Query i reads the last m_j of every chunk before its own, and m_i. A slot's rotary key is that of its newest
    position. Gate and sum follow the released code, not eq. 13's text. Cache: (r + d_r) / s elements per token.

    In parallel, the queries at one place r of their chunk (i mod s = r) form a causal problem of size T/s whose
    diagonal is the running sum at the query: s stock causal kernels over T/s slots, merged with that diagonal.
    On a CPU in float32 one call of a kernel in C++ computes them all.

    Args:
        gate_dim: width g of the hyper-network that computes gates; None: a quarter of `latent_dim`, at least 1.
        stride: positions s that are merged into one slot of the cache; 1: positions are gated but not merged.
        Others are those of `MLA`; `latent_dim` must be even.

    ValueError: `stride` is below 1, `latent_dim` is odd, or as for `MLA`.
    """

    cache_type: type[LatentCache] = MTLACache

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        *,
        gate_dim: Size | None = None,
        stride: Stride = 2,
        **options: Unpack[LatentOptions],
    ) -> None:
        super().__init__(d_model, num_heads, **options)
        if stride < 1:
            raise ValueError(f"stride must be at least 1, not {stride}")
        if self.latent_dim % 2:
            raise ValueError(f"latent_dim must be even for the sinusoid of the gate, not {self.latent_dim}")
        self.stride = stride
        gate_dim = max(1, self.latent_dim // 4) if gate_dim is None else gate_dim
        self.gate_slot = nn.Linear(self.latent_dim, gate_dim)  # fc_c, of the slot's position
        self.gate_latent = nn.Linear(self.latent_dim, gate_dim)  # fc_p, of the latent

    def slots(self, capacity: int, prefix_capacity: int) -> tuple[int, int]:
        open_slot = self.stride - 1 if prefix_capacity else 0
        return -(-(open_slot + capacity) // self.stride), prefix_capacity // self.stride

    def sealing(self, capacity: int) -> Sealing:
        return Sealing(self.stride, 0, capacity)

    def slot_gates(self, size: int) -> Tensor:
        """fc_c(pe(k)) for slots 0 ... size-1, (size, g)."""
        weight = self.gate_slot.weight
        rounded = 1 << max(size - 1, 1).bit_length()
        return self.gate_slot(_sinusoid(rounded, self.latent_dim, weight.dtype, weight.device)[:size])

    def _merge(self, chunks: Tensor, gates: Tensor) -> Tensor:
        """Running sums of gated latents: chunks (B, A, s, r), gates (A, g) or (B, A, g) -> (B, A, s, r)."""
        return (self._gate(chunks, gates.unsqueeze(-2)) * chunks).cumsum(2).to(chunks.dtype)

    def _merge_chunks(self, chunks: Tensor, gates: Tensor, exists: Tensor | None = None) -> Tensor:
        """Slots (B, A, r) of chunks (B, A, s, r), which are zero at positions that do not exist.

        exists: (B, A, s, 1) bool, or None if all positions exist. A sum does not need it. `MTLAWindow` takes means.
        """
        return (self._gate(chunks, gates.unsqueeze(-2)) * chunks).sum(2).to(chunks.dtype)

    def _gate(self, latent: Tensor, gates: Tensor) -> Tensor:
        wide = torch.promote_types(latent.dtype, torch.float32)
        return (self.gate_latent(latent) * gates).sum(-1, keepdim=True, dtype=wide).sigmoid()

    def _slots_of(self, latent: Tensor, rotary: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """As in `MLA`; the last slot of a row merges the positions that remain."""
        s, size = self.stride, latent.shape[1]
        parts = blank(latent, lengths), length_mask(lengths, size).unsqueeze(-1)
        chunks, exists = (F.pad(t, (0, 0, 0, -size % s)).unflatten(1, (-1, s)) for t in parts)
        slots = chunks.shape[1]
        merged = self._merge_chunks(chunks, self.slot_gates(slots), exists)
        newest = (torch.arange(1, slots + 1, device=lengths.device) * s).minimum(lengths[:, None]).clamp(min=1) - 1
        return self._expand(merged, take(rotary, newest)), length_mask(-(-lengths // s), slots)

    def _read(self, prefix: Tensor, lengths: Tensor | None, angles: Angles) -> _Prefix:
        """Merge a prefix (B, S, d) with lengths (B,)."""
        s, size = self.stride, prefix.shape[1]
        finished = size // s
        latent, rotary = self._latents(prefix, angles)
        rotary = rotary[:, s - 1 :: s]
        latent = F.pad(blank(latent, lengths), (0, 0, 0, s - size % s))
        chunks = latent.unflatten(1, (-1, s))  # the last one is not full
        sums = self._merge_chunks(chunks, self.slot_gates(finished + 1))
        if lengths is None:
            chunk = _OpenChunk(finished, finished, size % s, sums[:, finished] if size % s else None)
            return _Prefix(sums[:, :finished], rotary, None, chunk)
        number = lengths // s
        carry = sums[torch.arange(len(sums), device=sums.device), number]
        chunk = _OpenChunk(number, finished, lengths % s, carry)
        return _Prefix(sums[:, :finished], rotary, length_mask(number, finished), chunk)

    def _segment(
        self, q: Tensor, latent: Tensor, rotary: Tensor, chunk: _OpenChunk, past: list[Past], dropout: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Attention of new positions, which continue `chunk`, to `past` and to each other.

        q (B, T, H, D), latent (B, T, r), rotary (B, T, d_r) -> output (B, T, H, d_v), running sums (B, T, r).
        """
        s, steps, (first, bound, offset, carry) = self.stride, latent.shape[1], chunk
        most = offset if isinstance(offset, int) else s - 1
        num_chunks = -(-(most + steps) // s)
        if isinstance(offset, Tensor):
            place = torch.arange(num_chunks * s, device=q.device) - offset[:, None]  # text position of each grid column
            inside = (place >= 0) & (place < steps)
            back = torch.arange(steps, device=q.device) + offset[:, None]
            place = place.clamp(0, steps - 1)
            latent, rotary, q = (
                take(t, place) * inside.view(*inside.shape, *[1] * (t.dim() - 2)) for t in (latent, rotary, q)
            )
        elif extra := num_chunks * s - steps:
            latent, rotary = (F.pad(t, (0, 0, offset, extra - offset)) for t in (latent, rotary))
            q = F.pad(q, (0, 0, 0, 0, offset, extra - offset))
        if isinstance(first, Tensor):
            numbers = first[:, None] + torch.arange(num_chunks, device=q.device)
            gates = self.slot_gates(bound + num_chunks)[numbers]
        else:
            gates = self.slot_gates(first + num_chunks)[first:]
        sums = self._merge(latent.unflatten(1, (num_chunks, s)), gates)
        if carry is not None:
            sums = torch.cat((sums[:, :1] + carry[:, None, None].to(sums.dtype), sums[:, 1:]), 1)
        sums = sums.flatten(1, 2)
        out = expanded_attention(
            q, sums, rotary, self._up(), self.head_dim, self.scale, stride=s, past=past, dropout=dropout
        )
        if isinstance(offset, Tensor):
            return take(out, back), take(sums, back)
        return out[:, offset : offset + steps], sums[:, offset : offset + steps]

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        angles, before = self._angles(x, prefix, prefix_lengths)
        q, (latent, rotary) = self._queries(x, angles), self._latents(x, angles)
        chunk, past = _OpenChunk(), []
        if prefix is not None:
            read = self._read(prefix, prefix_lengths, before)
            chunk = read.chunk
            if chunk.bound:
                past.append(Past(self._expand(read.latent, read.rotary), read.mask))
        dropout = self.dropout if self.training else 0.0
        return self.out(self._segment(q, latent, rotary, chunk, past, dropout)[0].flatten(2))

    def _store_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        assert isinstance(cache, MTLACache)
        size = prefix.shape[1]
        read = self._read(prefix, prefix_lengths, cache.prefix_angles(0, size))
        cache.write(cache.prefix, 0, {"slots": torch.cat((read.latent, read.rotary), -1)})
        cache.prefix_size, cache.prefix_slots, cache.prefix_lengths = size, read.latent.shape[1], prefix_lengths
        cache.prefix_mask = read.mask
        cache.prefix_counts = read.chunk.number if isinstance(read.chunk.number, Tensor) else None
        if read.chunk.carry is not None:
            cache.text["slots"][:, 0, : self.latent_dim] = read.chunk.carry.repeat_interleave(cache.beam, 0)

    def _extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, MTLACache)
        if (step := cache.step(self, x)) is not None:
            return self._cpu_step(step, x, cache)
        new, start = x.shape[1], cache.start
        angles = cache.angles(start, start + new)
        q, (latent, rotary) = self._queries(x, angles), self._latents(x, angles)
        if new > 1 and isinstance(start, int):
            return self._extend_chunk(q, latent, rotary, start, cache)
        counts = self._merge_step(latent[:, 0], rotary[:, 0], start, cache)
        if isinstance(start, Tensor):
            assert counts is not None
            return self._step(q, cache, counts)
        return self._step(
            q, cache, cache.slots_up_to(start + 1), counts=None if cache.prefix_lengths is None else counts
        )

    def _extend_chunk(self, q: Tensor, latent: Tensor, rotary: Tensor, start: int, cache: MTLACache) -> Tensor:
        """Several positions, from text position `start` on: q (B, n, H, D), (B, n, r), (B, n, d_r) -> (B, n, d)."""
        s, r, text, (batch, new) = self.stride, self.latent_dim, cache.text["slots"], q.shape[:2]
        at = (cache.starts() % s + start).expand(batch)  # first new position, counted from the start of text slot 0
        base, place = at // s, at % s
        rows = torch.arange(batch, device=q.device)[:, None]
        here = base - cache.sealed if cache.sealed else base  # place in `text`
        carry = text[rows[:, 0], here.clamp(max=text.shape[1] - 1), :r].masked_fill((place == 0).unsqueeze(-1), 0.0)
        past = []
        if cache.prefix_slots:
            past.append(self._stored(cache.prefix["slots"][:, : cache.prefix_slots], q.dtype, cache.prefix_mask))
        end = cache.prefix_end()
        if isinstance(end, int):
            before, exists = (end % s + start) // s, None
            chunk = _OpenChunk(end // s + before, cache.prefix_size // s + before, (end + start) % s, carry)
        else:
            before = (s - 1 + start) // s
            exists = length_mask(base, before)
            chunk = _OpenChunk(end // s + base, cache.prefix_size // s + before, place, carry)
        if before:
            past.append(self._stored(cache.past(before)["slots"], q.dtype, exists))
        out, sums = self._segment(q, latent, rotary, chunk, past)
        # A slot stores the newest running sum and rotary key of its chunk.
        chunks = torch.arange(-(-(s - 1 + new) // s), device=q.device)
        ends = (chunks * s + s - 1 - place[:, None]).clamp(max=new - 1)
        text[rows, here[:, None] + (ends + place[:, None]) // s] = torch.cat(
            (take(sums, ends), take(rotary.to(sums.dtype), ends)), -1
        ).to(text.dtype)
        return self.out(out.flatten(2))

    def _cpu_step(self, step: LatentStep, x: Tensor, cache: MTLACache) -> Tensor:
        """One decoding step on a CPU, (B, 1, d) -> (B, 1, d)."""
        position, counts, end, s = cache.length, None, cache.prefix_end(), self.stride
        turn = cache.turn(position)
        latent, key = step.project(x, turn)
        if isinstance(end, int):
            slot, place = divmod(end % s + position, s)
            gate = self._gate(latent, cache.gate_slot[end // s + slot])
            step.merge(slot - cache.sealed, latent, gate, key, turn, opens=place == 0)
        else:
            step.turn_into(step.row_turned, key, turn)
            counts = self._merge_rows(latent, step.row[:, self.latent_dim :], position, cache)
        return step.read(cache, cache.slots_up_to(position + 1), counts=counts)

    def native_layer(self, cache: PositionalCache, **gate: Any) -> Layer | None:
        assert isinstance(cache, MTLACache)
        g = cache.gate_slot.shape[1]
        return super().native_layer(
            cache, gate=(self.gate_latent, g, self.latent_dim), gate_slots=cache.gate_slot, gate_width=g
        )

    def _merge_step(self, latent: Tensor, rotary: Tensor, start: int | Tensor, cache: MTLACache) -> Tensor | None:
        """Merge one position, (B, r) and (B, d_r), into the slot of its row.

        -> the number of slots that each row sees, (B,) or (1,); None if all rows merge into the same slot.
        """
        s, r, text, end = self.stride, self.latent_dim, cache.text["slots"], cache.prefix_end()
        if choose("step", text, masked=True) is Backend.TRITON:
            from .ops.kernels.merge import merge_slot  # needs triton

            sealed, hidden = cache.sealed, self.gate_latent(latent)
            at, first = end % s + start - sealed * s, end // s + sealed
            counts = merge_slot(text, latent, rotary, hidden, cache.gate_slot, at, s, first)
            return counts + sealed if sealed else counts
        if isinstance(end, int) and isinstance(start, int):  # indexing by tensors would make a step 15 % slower
            number, place = (end % s + start) // s, (end % s + start) % s
            slot = slice(number - cache.sealed, number - cache.sealed + 1)  # torch.compile would specialise on an index
            gates = cache.gate_slot[end // s + number : end // s + number + 1]
            gated = (self._gate(latent, gates) * latent).unsqueeze(1)
            if place:
                text[:, slot, :r] += gated
            else:
                text[:, slot, :r] = gated
            text[:, slot, r:] = rotary.unsqueeze(1)
            return None
        return self._merge_rows(latent, rotary, start, cache)

    def _merge_rows(self, latent: Tensor, rotary: Tensor, start: int | Tensor, cache: MTLACache) -> Tensor:
        """As `_merge_step`, into a slot of each row whose number is on the device."""
        s, r, text, ends = self.stride, self.latent_dim, cache.text["slots"], cache.starts()
        at = ends % s + start
        slots, rows = at // s, torch.arange(len(text), device=at.device)
        gated = self._gate(latent, cache.gate_slot[ends // s + slots]) * latent
        here = slots - cache.sealed if cache.sealed else slots
        before = text[rows, here, :r].masked_fill((at % s == 0).unsqueeze(-1), 0.0)
        text[rows, here] = torch.cat((before + gated, rotary.to(gated.dtype)), -1).to(text.dtype)
        return slots + 1

    @property
    def cache_elements_per_token(self) -> float:
        return self.elements_per_slot / self.stride

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        slots = self.gate_slot.weight.numel()  # computed once, when the cache is created
        return super().multiply_adds(context, prefix) - slots + self.gate_latent.out_features
