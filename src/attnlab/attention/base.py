"""The interface of every attention mechanism: a parallel form, a cached form that equals it, and the cost of the cache.

Notation, here and in every mechanism:

    B   rows (sentences, or hypotheses of beam search)     H   query heads
    T   positions of the text in the parallel form         G   key-value heads
    n   new positions in one call of `extend`              D   width of a head
    S   positions of a prefix                              d   width of the model
    N   prefixes; B / N rows share each (the beam)         R   rank, r  latent width, s  stride

A prefix is a sequence of extra keys and values that stands before the text, such as the output of an encoder.
Every text position sees all of it.
"""

import copy
from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .ops.tables import transformed


class Cache(ABC):
    """Keys and values of B rows, in buffers that are allocated once.

    Rows are grouped by prefix: rows `n * beam ... (n + 1) * beam - 1` read prefix `n`, which is stored once.
    `copy.copy`, `copy.deepcopy`, pickle and `torch.save` all give a cache with separate buffers, and neither cache
    sees what the other reads from then on.

    Attributes:
        made_by: name of the class of the mechanism that made it, and its width d.
        length: text positions in the cache, the same for every row. Prefixes may differ in length.
        beam: rows that share one prefix.
        capacity: text positions that there is room for.
        prefix_capacity: prefix positions that there is room for.
        static_length: `length` on the device, (1,) int64, of a cache that is static; None: it is not.
    """

    made_by: tuple[str, int] | None = None
    length: int = 0
    static_length: Tensor | None = None
    beam: int = 1
    capacity: int
    prefix_capacity: int = 0
    has_prefix: bool = False

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """The tensors that hold keys and values, of text and of prefixes; first one of text, (B, ...)."""

    @property
    def rows(self) -> int:
        """B."""
        return self.buffers()[0].shape[0]

    def __copy__(self) -> Self:
        return copy.deepcopy(self)  # steps write in place: shared buffers would mix two continuations

    @property
    def nbytes(self) -> int:
        """Bytes of the key-value buffers, as allocated."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Row i continues what row `rows[i]` holds, (B,) int64. Prefixes stay: both rows must read the same one."""

    @abstractmethod
    def select(self, prefixes: Tensor) -> None:
        """Keep these prefixes, (N',) int64, and their rows; drop the others."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forget the text positions from `length` on.

        ValueError: `length` is negative or above the present one, the mechanism cannot return to it, or the cache is
        static.
        """

    @property
    def start(self) -> int | Tensor:
        """The position that a step adds: `length`, or on the device that of a static cache."""
        return self.length if self.static_length is None else self.static_length

    def make_static(self) -> None:
        """From here on steps have one shape whatever the length, which they read from the device.

        Such a step can be captured in a CUDA graph and replayed, or compiled once for all lengths. A replayed or
        compiled step does not see `length`: its caller checks that there is room, and increases it. A static cache
        takes one position at a time and cannot be cropped. Without a kernel that reads counts, a step computes all
        that `bound_reads` has left, the full capacity at first, and masks what is not used.

        TypeError: the mechanism's steps need the length on the host.
        """
        if not self.can_be_static:
            raise TypeError(f"{type(self).__name__}: its steps need the length on the host")
        device = self.buffers()[0].device
        self.static_length = torch.full((1,), self.length, dtype=torch.int64, device=device)

    def bound_reads(self, length: int) -> None:  # noqa: B027
        """Steps of a static cache need not read further than its first `length` text positions, until told again.

        For callers that know the length on the host; what is beyond is masked anyway. Nothing to do where the size of
        what a step reads does not depend on the length.
        """

    @property
    def can_be_static(self) -> bool:
        """Whether `make_static` is possible."""
        return False

    @property
    def is_static(self) -> bool:
        """Whether steps have one shape whatever the length."""
        return self.static_length is not None

    def _check_crop(self, length: int) -> None:
        if self.is_static:
            raise ValueError("a static cache cannot be cropped: a captured step would still read the old length")
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} positions to {length}")


class Attention(nn.Module, ABC):
    """Causal self-attention with an optional prefix.

    A mechanism implements `_forward`, `_store_prefix`, `_extend` and the counts, and names its `cache_type`. This class
    handles what is the same for all: empty inputs (an empty text gives an empty tensor, an empty prefix is no prefix),
    room in the cache, and its length. The output has the dtype of the input; statistics of a softmax are float32 or
    wider. A constructor refuses a size below 1 with a ValueError that begins with the argument's name.

    Attributes:
        max_positions: the longest text that the mechanism takes; None: any length.
        reads_prefix: False if it was built without weights for a prefix and refuses one (ValueError).
        cache_type: the class of its caches, called with (attention, batch, capacity, prefix_capacity, beam, like);
            `like` is an empty tensor of the cache's dtype and device.
        accumulates: whether every position is added to a state. The state is then float32 or wider in any cache,
            because a sum that is rounded at each step drifts.
    """

    accumulates = False
    d_model: int
    max_positions: int | None = None
    reads_prefix: bool = True
    cache_type: type[Cache]

    def forward(
        self,
        x: Tensor,
        prefix: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> Tensor:
        """All positions of a text in parallel.

        Args:
            x: text, (B, T, d).
            prefix: (B, S, d), or None.
            lengths: (B,) int64: the text of row b ends after `lengths[b]` positions, and padding follows.
            prefix_lengths: the same of the prefixes.

        Returns:
            (B, T, d). A row gets what it gets alone and unpadded, whatever padding holds, NaN included; values at
            padded positions are unspecified.

        ValueError: a shape is not as above, or, where lengths are on the CPU, a length is negative or beyond T or S.
        TypeError: not a tensor, or lengths that are not integers.
        """
        x = self._padded("x", x, lengths)
        if prefix is not None:
            prefix = self._padded("prefix", prefix, prefix_lengths)
            _check_rows("prefix", prefix, x.shape[0])
        if not x.numel():
            return x.clone()
        if prefix is None or not prefix.shape[1]:
            prefix = prefix_lengths = None
        return self._forward(x, prefix, lengths, prefix_lengths)

    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Self-attention without a causal mask: every position sees all of its row.

        The mechanism's encoder form if it has one, else the mean of two causal passes with the same weights: over
        the row, and over the reversed row.

        Args:
            x: (B, S, d).
            lengths: positions of each row, (B,) int64.

        Returns:
            (B, S, d), as `forward` with respect to padding.

        ValueError, TypeError: as for `forward`.
        """
        _check_integers("lengths", lengths)
        x = self._padded("x", x, lengths)
        return self._encode(x, lengths) if x.numel() else x.clone()

    def new_cache(
        self,
        batch: int,
        capacity: int,
        prefix_capacity: int = 0,
        *,
        prefix_batch: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Cache:
        """An empty cache.

        Args:
            prefix_batch: prefixes N, which must divide B; None: one per row.

        ValueError: `prefix_batch` does not divide `batch`.
        """
        like = next(self.parameters()).new_empty(0, dtype=dtype, device=device)
        build: type = self.cache_type
        cache: Cache = build(self, batch, capacity, prefix_capacity, rows_per_prefix(batch, prefix_batch), like)
        cache.made_by = self.makes
        return cache

    @property
    def makes(self) -> tuple[str, int]:
        """`Cache.made_by` of its caches."""
        return type(self).__name__, self.d_model

    @torch.no_grad()
    def read_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        """Store a prefix, (N, S, d), with lengths (N,) or None, as keys and values.

        ValueError: a prefix was read before, there is text in the cache, the prefix is longer than its capacity, or as
        for `forward`. TypeError: the cache is not of this mechanism and width, or as for `forward`.
        """
        self._check_cache(cache)
        prefix = self._padded("prefix", prefix, prefix_lengths)
        size = prefix.shape[1]
        _check_rows("prefix", prefix, cache.rows // cache.beam)
        if cache.length or cache.has_prefix:
            raise ValueError("a prefix is read once per cache, before any text")
        _check_room(cache, size, cache.prefix_capacity)
        cache.has_prefix = True
        if prefix_lengths is not None and not bool((prefix_lengths != size).any()):
            prefix_lengths = None
        if prefix.numel():
            self._store_prefix(prefix, prefix_lengths, cache)

    @torch.no_grad()
    def extend(self, x: Tensor, cache: Cache) -> Tensor:
        """The next positions of each row, (B, n, d) -> (B, n, d): prefill, a chunk of it, or one decoding step.

        Compiled, a step of a static cache leaves `cache.length` to its caller (`Cache.make_static`).

        ValueError: the cache has no room for n positions more or another number of rows, it is static and n is not 1,
        or x has another width than d. TypeError: the cache is not of this mechanism and width, or x is no tensor.
        """
        self._check_cache(cache)
        self._check_width("x", x)
        _check_rows("x", x, cache.rows)
        new = x.shape[1]
        if cache.static_length is not None:
            if new != 1:
                raise ValueError(f"a static cache takes one position at a time, not {new}")
            on_host = not torch.compiler.is_compiling()  # a compiled step would be bound to one length
            if on_host:
                _check_room(cache, 1, cache.capacity)
            out = self._extend(x, cache) if x.numel() else x.clone()
            cache.static_length += 1
            if on_host:
                cache.length += 1
            return out
        _check_room(cache, new, cache.capacity)
        out = self._extend(x, cache) if x.numel() else x.clone()
        cache.length += new
        return out

    def visible(self, position: int) -> range:
        """The text positions that text position `position` sees; by default, itself and all before.

        A mechanism that does not read all of its past overrides this, and the tests hold it to what it declares.
        """
        return range(position + 1)

    def _check_cache(self, cache: Cache) -> None:
        made_by = getattr(cache, "made_by", None)
        if made_by != self.makes:
            expected, what = (
                "{} of d_model={}".format(*maker) if maker else type(cache).__name__ for maker in (self.makes, made_by)
            )
            raise TypeError(f"cache: expected one of {expected}, from its new_cache, not {what}")

    def _check_width(self, name: str, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, not {type(x).__name__}")
        if x.dim() != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"{name}: expected shape (batch, positions, {self.d_model}), not {tuple(x.shape)}")

    def _padded(self, name: str, x: Tensor, lengths: Tensor | None) -> Tensor:
        """x (B, T, d), checked, with zeros in its padding."""
        self._check_width(name, x)
        if lengths is None:
            return x
        rows, size = x.shape[:2]
        of = "lengths" if name == "x" else f"{name}_lengths"
        _check_integers(of, lengths)
        if lengths.shape != (rows,):
            raise ValueError(f"{of}: expected shape ({rows},), one length per row, not {tuple(lengths.shape)}")
        # The host would wait for a device; and what is compiled, transformed or fake has no values.
        eager = not (torch.compiler.is_compiling() or transformed() or _get_current_dispatch_mode() is not None)
        if rows and eager and lengths.device.type == "cpu":
            least, most = lengths.min().item(), lengths.max().item()
            if least < 0 or most > size:
                wrong = least if least < 0 else most
                raise ValueError(f"{of}: expected 0 to the {size} positions of {name}, not {wrong}")
        return blank(x, lengths)

    @abstractmethod
    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        """`forward`, of tensors that are not empty and hold zeros in their padding."""

    def _encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        """`encode`, of a tensor that is not empty and holds zeros in its padding."""
        place = torch.arange(x.shape[1], device=x.device)
        back = torch.where(length_mask(lengths, x.shape[1]), lengths[:, None] - 1 - place, place)  # an involution
        index = back.unsqueeze(-1).expand_as(x)
        ahead = self._forward(x, None, lengths, None)
        return (ahead + self._forward(x.gather(1, index), None, lengths, None).gather(1, index)) / 2

    @abstractmethod
    def _store_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        """`read_prefix`, of a prefix that is not empty, fits, and holds zeros in its padding.

        Lengths are None unless they differ from S.
        """

    @abstractmethod
    def _extend(self, x: Tensor, cache: Cache) -> Tensor:
        """`extend`, of tensors that are not empty and fit; `cache.length` is that before x, and is updated after."""

    @property
    @abstractmethod
    def cache_elements_per_token(self) -> float:
        """Cached numbers per position in the limit of long sequences, as the papers count them."""

    @abstractmethod
    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        """Elements that `new_cache` with the same arguments allocates, exactly."""

    def cache_bytes(
        self,
        batch: int,
        capacity: int,
        prefix_capacity: int = 0,
        prefix_batch: int | None = None,
        *,
        dtype: torch.dtype,
    ) -> int:
        """Bytes that `new_cache` with the same arguments allocates, exactly."""
        return dtype.itemsize * self.cache_elements(batch, capacity, prefix_capacity, prefix_batch)

    @abstractmethod
    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        """Multiply-adds of one cached decoding step of one row, projections included.

        Args:
            context: positions before and at the step, those of a prefix included.
            prefix: how many of them are the prefix's; it matters only where prefix and text are not read alike.
        """


def _check_room(cache: Cache, new: int, capacity: int) -> None:
    if cache.length + new > capacity:
        raise ValueError(f"the cache has room for {capacity} positions; {cache.length} are cached and {new} are new")


def _check_rows(name: str, x: Tensor, rows: int) -> None:
    if x.shape[0] != rows:
        raise ValueError(f"{name}: expected {rows} rows, not {x.shape[0]}")


def _check_integers(name: str, lengths: Tensor) -> None:
    kind = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
    if kind not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"{name}: expected a tensor of integers, not {kind}")


def rows_per_prefix(batch: int, prefix_batch: int | None) -> int:
    """The beam: rows that share one prefix. ValueError: `prefix_batch` does not divide `batch`."""
    prefixes = batch if prefix_batch is None else prefix_batch
    if batch == prefixes == 0:
        return 1
    if prefixes < 1 or batch < 1 or batch % prefixes:
        raise ValueError(f"{batch} rows cannot be divided evenly among {prefixes} prefixes")
    return batch // prefixes


def rows_of(prefixes: Tensor, beam: int) -> Tensor:
    """The rows that read these prefixes: (N',) -> (N' * beam,).

    Args:
        prefixes: numbers of the prefixes, (N',) int64.
    """
    return (prefixes[:, None] * beam + torch.arange(beam, device=prefixes.device)).flatten()


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """(B,) -> (B, size) bool, true at the first `lengths[b]` places.

    Args:
        lengths: of the rows, (B,) int64, in positions.
    """
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def blank(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x with zeros in its padding. It is not multiplied by zero, which would keep NaN.

    Args:
        x: (B, S, ...).
        lengths: of the rows, (B,) int64, in positions; None: there is no padding.
    """
    if lengths is None:
        return x
    padding = ~length_mask(lengths, x.shape[1])
    return x.masked_fill(padding.view(*padding.shape, *[1] * (x.dim() - 2)), 0.0)


def head_width(d_model: int, num_heads: int, head_dim: int | None) -> int:
    """Width of a head: `head_dim`, or d / H where it is None.

    ValueError: a size is not at least 1, or `head_dim` is None and H does not divide d.
    """
    for name, size in (("d_model", d_model), ("num_heads", num_heads), ("head_dim", head_dim)):
        if size is not None and size < 1:
            raise ValueError(f"{name}={size}: expected at least 1")
    if head_dim is not None:
        return head_dim
    if d_model % num_heads:
        raise ValueError(f"num_heads={num_heads} does not divide d_model={d_model}: choose another, or set head_dim")
    return d_model // num_heads
