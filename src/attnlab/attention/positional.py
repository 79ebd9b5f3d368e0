"""Base classes for attention with rotary positions and one cache slot per position."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .base import Attention, Cache, length_mask, rows_of, rows_per_prefix
from .ops.backends import transformed
from .ops.native import Layer, Prefix, takes
from .ops.quantised import Coded, Codes, Sealing, coded_bytes
from .ops.rope import Llama3Scaling, Turn, rotary_table, table_of

Angles = tuple[Tensor, Tensor]  # cos and sin of positions, (B or 1, positions, pairs)
Layout = dict[str, tuple[int | None, ...]]  # shape of a row in each buffer; None: the axis of slots


class PositionalCache(Cache):
    """Cache with one slot per position, or per group of merged positions.

    The arguments are those of `Attention.cache_type`. The buffers have the dtype and device of `like`.

    Attributes:
        text: buffers (B, ...) by name. With codes: slots 0 ... kept - 1, and those from kept + sealed on.
        coded: codes of `sealed` slots between these, by name; empty: there are none.
        prefix: buffers of the prefixes, (N, ...), by name.
        prefix_size: length of the longest prefix.
        prefix_lengths: lengths (N,) if prefixes differ in length, else None.
        prefix_mask: (N, slots) bool, true where a slot exists, if prefixes differ in length, else None.
        prefix_counts: number of existing slots, (N,), which come first; None: as `prefix_mask`.
        text_reads, prefix_reads: for a static cache, empty tensors whose first size is the number of slots that a step
            reads. A compiled step treats sizes of tensors as variables, but numbers as constants.
        lean_dtype: dtype of inputs for which `is_lean` may be true; None: never.
        prefix_ends: for a static cache, length of each row's prefix, (B,), or (1,) if all are equal.
        cos, sin: rotary tables of all positions of prefix and text.
        fixed: whether a position stays in its slot.
    """

    fixed = True
    stride = 1  # positions of a slot

    def __init__(
        self, attention: "PositionalAttention", batch: int, capacity: int, prefix_capacity: int, beam: int, like: Tensor
    ) -> None:
        self.beam, self.capacity, self.prefix_capacity = beam, capacity, prefix_capacity
        layout = attention.layout()
        self.axes = {name: 1 + shape.index(None) for name, shape in layout.items()}

        def allocate(rows: int, slots: int) -> dict[str, Tensor]:
            shapes = {name: [slots if size is None else size for size in shape] for name, shape in layout.items()}
            return {name: like.new_zeros(rows, *shape) for name, shape in shapes.items()}

        (text_slots, places), (_, prefix_slots) = (
            count(capacity, prefix_capacity) for count in (attention.text_slots, attention.slots)
        )
        self.text, self.prefix = allocate(batch, text_slots), allocate(batch // beam, prefix_slots)
        self.coded: dict[str, Coded] = {}
        self.kept, self.sealing = attention.kept, attention.sealing(capacity)
        if (bits := attention.cache_bits) is not None:
            self.coded = {name: Coded(shape, batch, places, bits, like) for name, shape in layout.items()}
            self.block = self.sealing.block
        self._standing = 0  # number of slots whose codes were written and not cropped
        self.prefix_size = 0
        self.prefix_lengths: Tensor | None = None
        self.prefix_mask: Tensor | None = None
        self.prefix_counts: Tensor | None = None
        self.text_reads: Tensor | None = None
        self.prefix_reads: Tensor | None = None
        self.prefix_ends: Tensor | None = None
        self.cos, self.sin = attention.rotary_table(prefix_capacity + capacity, like)
        self._sign = torch.tensor([[-1.0], [1.0]], dtype=self.sin.dtype, device=self.sin.device)
        self.lean_dtype = like.dtype if like.device.type == "cpu" and like.dtype == self.cos.dtype else None
        self._row_lengths: tuple[Tensor, Tensor] | None = None
        self._layer: tuple[tuple[Any, ...], Layer] | None = None

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_layer": None, "_step": None}  # which refer to the buffers of this cache

    def native(self, attention: Any, x: Tensor) -> Tensor | None:
        if takes(x) is None or self.coded or "native_layer" not in vars(type(attention)) or not self.is_lean(x):
            return None
        read, layer = (attention, self.text, self.prefix, self.prefix_lengths, self.prefix_size), None
        if self._layer is not None and all(a is b for a, b in zip(self._layer[0], read, strict=True)):
            layer = self._layer[1]
        if layer is None or not layer.stands():
            try:
                layer = attention.native_layer(self)
            except TypeError:
                return None
            if layer is None or not layer.stands():
                return None
            self._layer = read, layer
        return layer(x, self.length, *self.place(self.length))

    def native_prefix(self) -> dict[str, Any]:
        """The fields of a step by the library that describe the prefixes, but their buffers."""
        lengths, (name, buffer) = self.prefix_lengths, next(iter(self.prefix.items()))
        at = None if lengths is None else lengths.data_ptr()
        return {"prefix": Prefix(at, self.prefix_size, buffer.shape[self.axes[name]], self.beam, self.stride)}

    def place(self, position: Any) -> tuple[Any, bool, Any]:
        """Slot of a text position without a prefix, whether it is the first in it, and number of slots to read.

        Where positions are not merged, prefixes change none of these.
        """
        return position, True, position + 1

    def buffers(self) -> list[Tensor]:
        return [*self.text.values(), *self.prefix.values(), *(coded.rows for coded in self.coded.values())]

    @property
    def sealed(self) -> int:
        """Number of text slots that are codes."""
        return self.sealing(self.length) if self.coded else 0

    def seal(self) -> None:
        first, last = self.sealing(self.length - self.block), self.sealing(self.length)
        if first == last:
            return
        for name, coded in self.coded.items():
            axis, old = self.axes[name], min(max(self._standing - first, 0), last - first)
            newest = self.text[name].narrow(axis, self.kept, self.text[name].shape[axis] - self.kept)
            coded.write(first + old, newest.narrow(axis, old, last - first - old))
            rest = newest.shape[axis] - (last - first)
            newest.narrow(axis, 0, rest).copy_(newest.narrow(axis, last - first, rest).clone())
        self._standing = last

    def _cut(self, length: int) -> None:
        """Set the length after a crop. Codes of slots that become the newest again are read, and kept for `seal`."""
        first, last = (self.sealing(n) if self.coded else 0 for n in (length, self.length))
        if first < last:
            for name, coded in self.coded.items():
                axis, buffer = self.axes[name], self.text[name]
                newest = buffer.narrow(axis, self.kept, buffer.shape[axis] - self.kept)
                back = min(last - first, newest.shape[axis])
                rest = newest.narrow(axis, 0, newest.shape[axis] - back)
                newest.copy_(torch.cat((coded.read(first, first + back), rest), axis))
        self._standing, self.length = min(self._standing, self.sealing.final(length)), length
        self.common = None

    def past(self, slots: int) -> dict[str, Tensor]:
        """The first text slots, by name; codes as numbers."""
        first, sealed, past = min(slots, self.kept), self.sealed, dict[str, Tensor]()
        for name, buffer in self.text.items():
            axis = self.axes[name]
            past[name] = buffer.narrow(axis, 0, slots - sealed)
            if sealed:
                head, tail = past[name].split([first, slots - sealed - first], axis)
                past[name] = torch.cat((head, self.coded[name].read(0, sealed), tail), axis)
        return past

    def older(self, key: str, value: str | None = None) -> Codes | None:
        """The text slots that are codes, see `ops.quantised.attend`; None: there are none."""
        return (self.coded[key], self.coded[value] if value else None, self.sealed) if self.sealed else None

    def used_slots(self) -> int:
        """Number of text slots in use."""
        return self.slots_up_to(self.length)

    def slots_up_to(self, length: int) -> int:
        """Largest number of text slots that `length` positions occupy in a row."""
        return length

    def full_slots(self, lengths: Tensor) -> Tensor:
        """Numbers of first text slots that belong to the first `lengths` positions alone."""
        return lengths

    @property
    def prefix_used(self) -> int:
        """Number of prefix slots in use."""
        return self.prefix_size

    def make_static(self) -> None:
        super().make_static()
        self.bound_reads(self.capacity)
        self._fix_prefix()

    def bound_reads(self, length: int) -> None:
        slots = self.slots_up_to(min(length, self.capacity))
        if self.text_reads is None or len(self.text_reads) != slots:
            self.text_reads = self.cos.new_empty(slots, 0)

    def _fix_prefix(self) -> None:
        """Set the values that static steps read about prefixes."""
        self.prefix_reads = self.cos.new_empty(self.prefix_used, 0)
        self.prefix_ends = None
        self.prefix_ends = self.starts()

    def reads(self, text: int | Tensor) -> tuple[int, int]:
        """Largest numbers of text slots and prefix slots that a step reads.

        Args:
            text: number of text slots in use. If it is on the device, the result is the bound of a static cache.
        """
        if not isinstance(text, Tensor):
            return text - self.sealed, self.prefix_used
        assert self.text_reads is not None and self.prefix_reads is not None
        return self.text_reads.shape[0], self.prefix_reads.shape[0]

    def reorder(self, rows: Tensor) -> None:
        moved: Tensor | slice = slice(None)
        if rows.device.type == "cpu" and not torch.compiler.is_compiling():  # on a GPU this would synchronise
            moved = (rows != torch.arange(len(rows))).nonzero().squeeze(1)
        common, self.common = self.common, None
        if common is not None and isinstance(moved, Tensor) and self.fixed and not self.coded:
            source = rows[moved]
            equal = self.full_slots(common[moved, source % common.shape[1]])
            row, slot = (torch.arange(self.used_slots()) >= equal[:, None]).nonzero().unbind(1)
            moved, source = moved[row], source[row]
            for name, buffer in self.text.items():
                slots = buffer.movedim(self.axes[name], 1)
                slots[moved, slot] = slots[source, slot]
            return
        for name, buffer in self.text.items():
            used = buffer.narrow(self.axes[name], 0, self.used_slots() - self.sealed)
            used[moved] = used[rows[moved]]
        for coded in self.coded.values():
            kept = max(self.sealed, self._standing)  # codes that a crop left for `seal` too
            codes = coded.rows.narrow(-3, 0, min(kept, coded.rows.shape[-3]))
            codes[moved] = codes[rows[moved]]

    def select(self, prefixes: Tensor) -> None:
        rows, self.common = rows_of(prefixes, self.beam), None
        self.text = {name: buffer[rows] for name, buffer in self.text.items()}
        for coded in self.coded.values():
            coded.take(rows)
        self.prefix = {name: buffer[prefixes] for name, buffer in self.prefix.items()}
        if self.prefix_lengths is not None and self.prefix_mask is not None:
            alike = self.prefix_counts is self.prefix_lengths  # preserved: a compiled step distinguishes the two cases
            self.prefix_lengths, self.prefix_mask = self.prefix_lengths[prefixes], self.prefix_mask[prefixes]
            if self.prefix_counts is not None:
                self.prefix_counts = self.prefix_lengths if alike else self.prefix_counts[prefixes]
        if self.is_static:
            self._fix_prefix()

    def crop(self, length: int) -> None:
        self._check_crop(length)
        self._cut(length)

    @property
    def can_be_static(self) -> bool:
        return not self.coded

    def write(self, buffers: dict[str, Tensor], first: int | Tensor, new: dict[str, Tensor]) -> None:
        """Write into `text` or `prefix` from slot `first` on, or one slot if `first` is a tensor, (1,)."""
        if buffers is self.text and isinstance(first, int):
            first -= self.sealed
        for name, values in new.items():
            axis = self.axes[name]
            if isinstance(first, Tensor):
                buffers[name].index_copy_(axis, first, values.to(buffers[name].dtype))
                continue
            buffers[name].narrow(axis, first, values.shape[axis]).copy_(values)

    def angles(self, first: int | Tensor, last: int | Tensor) -> Angles:
        """Angles of text positions first ... last - 1, or of one position if `first` is a tensor, (1,)."""
        if isinstance(first, Tensor):
            assert self.prefix_ends is not None
            positions = (first + self.prefix_ends).unsqueeze(1)
            return self.cos[positions], self.sin[positions]
        assert isinstance(last, int)
        if self.prefix_lengths is None:
            span = slice(self.prefix_size + first, self.prefix_size + last)
            return self.cos[None, span], self.sin[None, span]
        lengths = self.row_lengths()
        positions = lengths[:, None] + torch.arange(first, last, device=lengths.device)
        return self.cos[positions], self.sin[positions]

    def is_lean(self, x: Tensor) -> bool:
        """Whether the fast CPU path computes the step of x (B, n, d): one position, without autocast or tracing."""
        return (
            x.shape[1] == 1
            and self.lean_dtype == x.dtype
            and self.static_length is None
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled("cpu")
            and not transformed()
        )

    def turn(self, position: int) -> Turn:
        """Angles of a text position for `ops.rope.turn`, (P) and (2, P), or (B, 1, ., P) if prefix lengths differ."""
        if self.prefix_lengths is None:
            at = self.prefix_size + position
            return self.cos.select(0, at), self._sign * self.sin.select(0, at)
        if self._row_lengths is None or self._row_lengths[0] is not self.prefix_lengths:
            self._row_lengths = self.prefix_lengths, self.row_lengths()
        rows = self._row_lengths[1] + position
        cos, sin = (table.index_select(0, rows)[:, None, None] for table in (self.cos, self.sin))
        return cos, self._sign * sin

    def starts(self) -> Tensor:
        """Length of each row's prefix, (B,), or (1,) if all are equal."""
        if self.prefix_ends is not None:
            return self.prefix_ends
        if self.prefix_lengths is None:
            return torch.full((1,), self.prefix_size, device=self.cos.device)
        return self.row_lengths()

    def row_lengths(self) -> Tensor:
        """Length of each row's prefix, (B,), if prefixes differ in length."""
        assert self.prefix_lengths is not None
        return self.prefix_lengths.repeat_interleave(self.beam)

    def prefix_angles(self, first: int, last: int) -> Angles:
        """Angles of prefix positions first ... last - 1."""
        return self.cos[None, first:last], self.sin[None, first:last]


class PositionalAttention(Attention):
    """Attention with rotary positions, whose cache has one slot per position or per group of merged positions.

    Attributes:
        turned: number of rotated components of a head, or of the vector that all heads share.
        rope_theta: base of the rotary frequencies; None: frequencies of a pretrained or converted model, in the buffer
            `frequencies`, (turned / 2,), which is saved with the weights.
    """

    cache_type: type[PositionalCache] = PositionalCache
    has_codes = True
    kept: int = 0  # number of first text slots that never become codes
    turned: int
    rope_theta: float | None
    rope_scaling: Llama3Scaling | None = None
    frequencies: Tensor

    def _rotary(self, turned: int, theta: float | None, scaling: Llama3Scaling | None = None) -> None:
        """Set the rotary frequencies. Stored frequencies are initialised to those of theta 10000."""
        self.turned, self.rope_theta, self.rope_scaling = turned, theta, scaling
        if theta is None:
            pairs = torch.arange(0, turned, 2, dtype=torch.float64)
            self.register_buffer("frequencies", 10000.0 ** (-pairs / max(turned, 1)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PositionalAttention":
        """As in `nn.Module`, except that frequencies keep their dtype."""
        exact = self.frequencies if self.rope_theta is None else None
        super()._apply(fn, recurse)
        if exact is not None:
            self.frequencies = exact.to(self.frequencies.device)
        return self

    def native_layer(self, cache: PositionalCache) -> Layer | None:
        """Its step by the library `ops.native`; None, TypeError: the library does not compute it.

        A subclass may compute something else: only the classes named here have one.
        """
        return None

    @abstractmethod
    def layout(self) -> Layout:
        """Shape of a row in each buffer of the cache."""

    @abstractmethod
    def _entries(self, x: Tensor, angles: Angles) -> dict[str, Tensor]:
        """Cache entries of x (B, T, d), by the names of `layout`."""

    def slots(self, capacity: int, prefix_capacity: int) -> tuple[int, int]:
        """Numbers of slots for the given numbers of text and prefix positions."""
        return capacity, prefix_capacity

    def sealing(self, capacity: int) -> Sealing:
        """When text slots become codes."""
        return Sealing(1, 0, capacity)

    def text_slots(self, capacity: int, prefix_capacity: int) -> tuple[int, int]:
        """Numbers of text slots in the dtype of the cache, and of places for codes."""
        slots, _ = self.slots(capacity, prefix_capacity)
        if self.cache_bits is None:
            return slots, 0
        sealing = self.sealing(capacity)
        return self.kept + min(slots - self.kept, sealing.open), sealing(capacity)

    def rotary_table(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 ... length-1, (length, turned / 2) each, on the device of `like`."""
        if self.rope_theta is None:
            return table_of(self.frequencies, length, like.dtype)
        return rotary_table(self.turned, self.rope_theta, length, like.dtype, like.device, self.rope_scaling)

    def _angles(self, x: Tensor, prefix: Tensor | None, prefix_lengths: Tensor | None) -> tuple[Angles, Angles]:
        """Angles of the text positions and of the prefix positions."""
        steps, start = x.shape[1], 0 if prefix is None else prefix.shape[1]
        cos, sin = self.rotary_table(start + steps, x)
        before = cos[None, :start], sin[None, :start]
        if prefix_lengths is None:
            return (cos[None, start:], sin[None, start:]), before
        positions = prefix_lengths[:, None] + torch.arange(steps, device=x.device)
        return (cos[positions], sin[positions]), before

    def _store_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        assert isinstance(cache, PositionalCache)
        size = prefix.shape[1]
        cache.write(cache.prefix, 0, self._entries(prefix, cache.prefix_angles(0, size)))
        cache.prefix_size, cache.prefix_lengths, cache.prefix_counts = size, prefix_lengths, prefix_lengths
        cache.prefix_mask = None if prefix_lengths is None else length_mask(prefix_lengths, size)

    @property
    def elements_per_slot(self) -> int:
        return sum(math.prod(size for size in shape if size is not None) for shape in self.layout().values())

    @property
    def cache_elements_per_token(self) -> float:
        return float(self.elements_per_slot)

    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        slots, places = self.text_slots(capacity, prefix_capacity)
        return self._elements(batch, slots + places, prefix_capacity, prefix_batch)

    def _elements(self, batch: int, text_slots: int, prefix_capacity: int, prefix_batch: int | None) -> int:
        prefixes = batch // rows_per_prefix(batch, prefix_batch)
        return self.elements_per_slot * (batch * text_slots + prefixes * self.slots(0, prefix_capacity)[1])

    def cache_bytes(
        self,
        batch: int,
        capacity: int,
        prefix_capacity: int = 0,
        prefix_batch: int | None = None,
        *,
        dtype: torch.dtype,
    ) -> int:
        slots, places = self.text_slots(capacity, prefix_capacity)
        size = dtype.itemsize * self._elements(batch, slots, prefix_capacity, prefix_batch)
        return size + (batch * places * self._coded_bytes if places else 0)

    @property
    def _coded_bytes(self) -> int:
        """Bytes of a slot as codes, with scales and zeros."""
        assert self.cache_bits is not None
        return sum(coded_bytes(shape, self.cache_bits) for shape in self.layout().values())

    def cache_bytes_per_token(self, dtype: torch.dtype) -> float:
        if self.cache_bits is None:
            return super().cache_bytes_per_token(dtype)
        return self.cache_elements_per_token / self.elements_per_slot * self._coded_bytes
