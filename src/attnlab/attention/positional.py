"""Shared code for attention with rotary positions and one cache slot per position."""

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from .base import Attention, Cache, length_mask, rows_of, rows_per_prefix
from .ops.rope import Llama3Scaling, Turn, rotary_table, table_of
from .ops.tables import transformed

Angles = tuple[Tensor, Tensor]  # cos and sin of positions, (B or 1, positions, pairs)
Layout = dict[str, tuple[int | None, ...]]  # shape of a row in each buffer; None: the axis on which slots lie


class PositionalCache(Cache):
    """Buffers of which one axis counts slots; a slot is a position, or several that a mechanism has merged.

    Made as `Attention.cache_type` says; the buffers have the dtype and device of `like`.

    Attributes:
        text: buffers (B, ...) by name, `prefix`: the same of prefixes, (N, ...).
        prefix_size: positions of the longest prefix.
        prefix_lengths: (N,) where prefixes differ in length, else None.
        prefix_mask: (N, slots) bool then: the slots that exist.
        prefix_counts: (N,) then: how many these are; they come first.
        text_reads, prefix_reads: of a static cache, tensors without elements, as long as the slots that a step reads:
            a compiled step has sizes of tensors as variables, but numbers as constants.
        lean_dtype: of the inputs whose steps on a CPU write in place (`is_lean`); None: no such steps.
        prefix_ends: of a static cache, the length of each row's prefix, (B,), or (1,) where all are alike.
        cos, sin: rotary tables of all positions of prefix and text.
    """

    def __init__(
        self, attention: "PositionalAttention", batch: int, capacity: int, prefix_capacity: int, beam: int, like: Tensor
    ) -> None:
        self.beam, self.capacity, self.prefix_capacity = beam, capacity, prefix_capacity
        layout = attention.layout()
        self.axes = {name: 1 + shape.index(None) for name, shape in layout.items()}

        def allocate(rows: int, slots: int) -> dict[str, Tensor]:
            shapes = {name: [slots if size is None else size for size in shape] for name, shape in layout.items()}
            return {name: like.new_zeros(rows, *shape) for name, shape in shapes.items()}

        text_slots, prefix_slots = attention.slots(capacity, prefix_capacity)
        self.text, self.prefix = allocate(batch, text_slots), allocate(batch // beam, prefix_slots)
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

    def buffers(self) -> list[Tensor]:
        return [*self.text.values(), *self.prefix.values()]

    def used_slots(self) -> int:
        """Text slots that hold something."""
        return self.slots_up_to(self.length)

    def slots_up_to(self, length: int) -> int:
        """Text slots that `length` positions take, in the row that takes most."""
        return length

    @property
    def prefix_used(self) -> int:
        """Slots that the prefixes take."""
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
        """What static steps know of the prefixes."""
        self.prefix_reads = self.cos.new_empty(self.prefix_used, 0)
        self.prefix_ends = None
        self.prefix_ends = self.starts()

    def reads(self, text: int | Tensor) -> tuple[int, int]:
        """How many slots of the text, and of the prefixes, a step reads at most.

        Args:
            text: how many of the text are used; the bound of a static cache holds where the device alone knows.
        """
        if not isinstance(text, Tensor):
            return text, self.prefix_used
        assert self.text_reads is not None and self.prefix_reads is not None
        return self.text_reads.shape[0], self.prefix_reads.shape[0]

    def reorder(self, rows: Tensor) -> None:
        moved: Tensor | slice = slice(None)
        if rows.device.type == "cpu" and not torch.compiler.is_compiling():  # a GPU would have to be waited for
            moved = (rows != torch.arange(len(rows))).nonzero().squeeze(1)
        for name, buffer in self.text.items():
            used = buffer.narrow(self.axes[name], 0, self.used_slots())
            used[moved] = used[rows[moved]]

    def select(self, prefixes: Tensor) -> None:
        rows = rows_of(prefixes, self.beam)
        self.text = {name: buffer[rows] for name, buffer in self.text.items()}
        self.prefix = {name: buffer[prefixes] for name, buffer in self.prefix.items()}
        if self.prefix_lengths is not None and self.prefix_mask is not None:
            alike = self.prefix_counts is self.prefix_lengths  # stays so: a compiled step distinguishes the two cases
            self.prefix_lengths, self.prefix_mask = self.prefix_lengths[prefixes], self.prefix_mask[prefixes]
            if self.prefix_counts is not None:
                self.prefix_counts = self.prefix_lengths if alike else self.prefix_counts[prefixes]
        if self.is_static:
            self._fix_prefix()

    def crop(self, length: int) -> None:
        self._check_crop(length)
        self.length = length

    @property
    def can_be_static(self) -> bool:
        return True

    def write(self, buffers: dict[str, Tensor], first: int | Tensor, new: dict[str, Tensor]) -> None:
        """Write into `text` or `prefix`, from slot `first` on; on the device (1,), one slot."""
        for name, values in new.items():
            axis = self.axes[name]
            if isinstance(first, Tensor):
                buffers[name].index_copy_(axis, first, values.to(buffers[name].dtype))
                continue
            buffers[name].narrow(axis, first, values.shape[axis]).copy_(values)

    def angles(self, first: int | Tensor, last: int | Tensor) -> Angles:
        """Of text positions first ... last - 1, on the device (1,) of one position."""
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
        """Whether a step of x (B, n, d) is computed by few kernels that write in place: on a CPU, of one position."""
        return (
            x.shape[1] == 1
            and self.lean_dtype == x.dtype
            and self.static_length is None
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled("cpu")
            and not transformed()
        )

    def turn(self, position: int) -> Turn:
        """Angles of a text position in the form that `ops.rope.turn` takes, (P) and (2, P) or (B, 1, ., P)."""
        if self.prefix_lengths is None:
            at = self.prefix_size + position
            return self.cos.select(0, at), self._sign * self.sin.select(0, at)
        if self._row_lengths is None or self._row_lengths[0] is not self.prefix_lengths:
            self._row_lengths = self.prefix_lengths, self.row_lengths()
        rows = self._row_lengths[1] + position
        cos, sin = (table.index_select(0, rows)[:, None, None] for table in (self.cos, self.sin))
        return cos, self._sign * sin

    def starts(self) -> Tensor:
        """Length of each row's prefix, (B,), or (1,) where all are alike."""
        if self.prefix_ends is not None:
            return self.prefix_ends
        if self.prefix_lengths is None:
            return torch.full((1,), self.prefix_size, device=self.cos.device)
        return self.row_lengths()

    def row_lengths(self) -> Tensor:
        """Lengths of the rows' prefixes, (B,), where these differ."""
        assert self.prefix_lengths is not None
        return self.prefix_lengths.repeat_interleave(self.beam)

    def prefix_angles(self, first: int, last: int) -> Angles:
        """Of prefix positions first ... last - 1."""
        return self.cos[None, first:last], self.sin[None, first:last]


class PositionalAttention(Attention):
    """Attention whose cache has a slot for each position (or each group of merged ones), and rotary positions.

    Attributes:
        turned: components of a head (or of what stands for it) that are rotated.
        rope_theta: base of the rotary frequencies; None: they are the buffer `frequencies`, (turned / 2,), which is
            saved with the weights: a pretrained or converted model has other frequencies.
    """

    cache_type: type[PositionalCache] = PositionalCache
    turned: int
    rope_theta: float | None
    rope_scaling: Llama3Scaling | None = None
    frequencies: Tensor

    def _rotary(self, turned: int, theta: float | None, scaling: Llama3Scaling | None = None) -> None:
        """Set what the rotary table follows; a stored table begins with the frequencies of theta 10000."""
        self.turned, self.rope_theta, self.rope_scaling = turned, theta, scaling
        if theta is None:
            pairs = torch.arange(0, turned, 2, dtype=torch.float64)
            self.register_buffer("frequencies", 10000.0 ** (-pairs / max(turned, 1)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PositionalAttention":
        """As any module's; frequencies keep their precision whatever the type of the weights becomes."""
        exact = self.frequencies if self.rope_theta is None else None
        super()._apply(fn, recurse)
        if exact is not None:
            self.frequencies = exact.to(self.frequencies.device)
        return self

    @abstractmethod
    def layout(self) -> Layout:
        """The buffers of the cache, of one row."""

    @abstractmethod
    def _entries(self, x: Tensor, angles: Angles) -> dict[str, Tensor]:
        """What the cache keeps of x (B, T, d), by the names of `layout`."""

    def slots(self, capacity: int, prefix_capacity: int) -> tuple[int, int]:
        """Slots that so many text and prefix positions take."""
        return capacity, prefix_capacity

    def rotary_table(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 ... length-1, (length, turned / 2) each, on the device of `like`."""
        if self.rope_theta is None:
            return table_of(self.frequencies, length, like.dtype)
        return rotary_table(self.turned, self.rope_theta, length, like.dtype, like.device, self.rope_scaling)

    def _angles(self, x: Tensor, prefix: Tensor | None, prefix_lengths: Tensor | None) -> tuple[Angles, Angles]:
        """Of the text's positions, and of the prefix's."""
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
        slots, prefix_slots = self.slots(capacity, prefix_capacity)
        prefixes = batch // rows_per_prefix(batch, prefix_batch)
        return self.elements_per_slot * (batch * slots + prefixes * prefix_slots)
