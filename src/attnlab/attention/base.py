"""Base classes of attention mechanisms and of their caches.

A mechanism has a parallel form, a cached form that equals it, and counts of its cache and its multiply-adds.
Notation, here and in every mechanism:

    B   rows (sentences, or hypotheses of beam search)     H   query heads
    T   positions of the text in the parallel form         G   key-value heads
    n   new positions in one call of `extend`              D   width of a head
    S   positions of a prefix                              d   width of the model
    N   prefixes; B / N rows share each (the beam)         R   rank, r  latent width, s  stride

A prefix is a sequence of extra keys and values before the text, such as the output of an encoder.
Every text position sees all of it.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor, nn

from .documentation import arguments, complete
from .ops.backends import captured


class Cache(ABC):
    """Keys and values of B rows, in buffers that are allocated once.

    Rows are grouped by prefix: rows `n * beam ... (n + 1) * beam - 1` read prefix `n`, which is stored once.
    `copy.copy`, `copy.deepcopy`, pickle and `torch.save` copy the buffers, so that a copy is independent.

    Attributes:
        made_by: class name and width d of the mechanism that created the cache.
        length: number of cached text positions, the same for every row. Prefixes may differ in length.
        beam: number of rows that share one prefix.
        capacity: maximum number of text positions.
        prefix_capacity: maximum number of prefix positions.
        common: for each row, number of first text positions in which it equals each row of its group, (B, rows of a
            group) int64; the next `reorder` does not move these. None: not known.
        static_length: `length` on the device, (1,) int64, if the cache is static; else None.
        numbers_per_token: cached elements per position in the limit of long sequences.
        block: positions after which older slots become codes, see `Attention.cache_bits`; 0: never.
    """

    made_by: tuple[str, int] | None = None
    numbers_per_token: float = 0
    block: int = 0
    length: int = 0
    static_length: Tensor | None = None
    beam: int = 1
    capacity: int
    prefix_capacity: int = 0
    common: Tensor | None = None
    has_prefix: bool = False

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """Tensors that store keys and values of text and prefixes. The first one stores text, (B, ...)."""

    @property
    def rows(self) -> int:
        """Number of rows B."""
        return self.buffers()[0].shape[0]

    def __repr__(self) -> str:
        size = f"{self.numbers_per_token:g} numbers per token" if self.numbers_per_token else "a fixed size"
        positions = f"positions={self.length} of {self.capacity}"
        return f"{type(self).__name__}(batch={self.rows}, {positions}, {size}, {self.nbytes / 1024:,.1f} KiB)"

    def __copy__(self) -> Self:
        return copy.deepcopy(self)  # steps write in place: shared buffers would mix two continuations

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the key-value buffers."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Replace the text of row i by that of row `rows[i]`, (B,) int64. Both rows must read the same prefix."""

    @abstractmethod
    def select(self, prefixes: Tensor) -> None:
        """Keep only these prefixes, (N',) int64, and their rows. One that is named several times is copied."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Remove the text positions from `length` on.

        ValueError: `length` is negative or more than the current length, the mechanism cannot return to it, or the
        cache is static.
        """

    @property
    def start(self) -> int | Tensor:
        """Position of the next step: `length`, or `static_length` of a static cache."""
        return self.length if self.static_length is None else self.static_length

    def make_static(self) -> None:
        """Give all later steps the same shapes. They read the length from the device.

        Such a step can be captured in a CUDA graph and replayed, or compiled once for all lengths. A replayed or
        compiled step does not see `length`: its caller checks that there is room, and increases it. A static cache
        takes one position at a time and cannot be cropped. Without a kernel that reads counts, a step computes as many
        positions as `bound_reads` sets, initially the full capacity, and masks the unused ones.

        TypeError: the steps of the mechanism need the length on the host.
        """
        if not self.can_be_static:
            raise TypeError(f"{type(self).__name__}: its steps need the length on the host")
        device = self.buffers()[0].device
        self.static_length = torch.full((1,), self.length, dtype=torch.int64, device=device)

    def native(self, attention: "Attention", x: Tensor) -> Tensor | None:
        """The step of x by the C++ library, (B, 1, d) -> (B, 1, d); None: it does not compute it."""
        return None

    def seal(self) -> None:  # noqa: B027
        """Turn the slots that are now older into codes. `extend` calls it after every `block` positions."""

    def bound_reads(self, length: int) -> None:  # noqa: B027
        """Limit the steps of a static cache to its first `length` text positions, until the next call.

        For callers that know the length on the host. Without effect if the reads of a step do not depend on the length.
        """

    @property
    def can_be_static(self) -> bool:
        """Whether `make_static` is supported."""
        return False

    @property
    def is_static(self) -> bool:
        """Whether `make_static` was called."""
        return self.static_length is not None

    def _check_crop(self, length: int) -> None:
        if self.is_static:
            raise ValueError("a static cache cannot be cropped: a captured step would still read the old length")
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} positions to {length}")


NO_CODES = "has a state of fixed size, which changes at every position and cannot be stored as codes"


class Attention(nn.Module, ABC):
    """Causal self-attention with an optional prefix.

    A mechanism implements `_forward`, `_store_prefix`, `_extend` and the counts, and sets its `cache_type`. This class
    handles empty inputs, checks the room in the cache, and updates its length. An empty text gives an empty tensor, and
    an empty prefix is no prefix. The output has the dtype of the input; statistics of a softmax are float32 or wider.
    A constructor refuses a size below 1 with a ValueError that begins with the name of the argument.

    Attributes:
        max_positions: maximum length of a text; None: any length.
        reads_prefix: False if it was built without weights for a prefix and refuses one (ValueError).
        cache_type: class of its caches, called with (attention, batch, capacity, prefix_capacity, beam, like);
            `like` is an empty tensor of the cache's dtype and device.
        accumulates: whether every position is added to a state. The state is then float32 or wider in any cache,
            because a sum that is rounded at each step drifts.
        cache_bits: 8 or 4: a new cache has its older text slots as codes of so many bits, and the newest ones and
            prefixes in its dtype. Slots become codes in blocks, once, when no later position changes them. `extend`
            divides its input there: every chunking gives the same. After `crop`, slots that are codes stay codes.
            None: everything has the cache's dtype.
    """

    accumulates = False
    cache_bits: Literal[8, 4] | None = None
    d_model: int
    max_positions: int | None = None
    reads_prefix: bool = True
    cache_type: type[Cache]
    has_codes: bool = False  # whether `cache_bits` can be set

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        complete(cls)

    def extra_repr(self) -> str:
        """The arguments that the module has as attributes."""
        values = {name: vars(self)[name] for name in arguments(type(self)) if name in vars(self)}
        return ", ".join(f"{name}={value}" for name, value in values.items() if isinstance(value, int | float | str))

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
            lengths: (B,) int64: the text of row b has `lengths[b]` positions, followed by padding.
            prefix_lengths: (B,) int64, lengths of the prefixes.

        Returns:
            (B, T, d). The result of a row does not depend on other rows or on padding, which may contain NaN. Values
            at padded positions are unspecified.

        ValueError: a shape differs from the above, or a length on the CPU is negative or more than T or S.
        TypeError: an input is not a tensor, or lengths are not integers.
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
        """Self-attention without a causal mask: every position sees its entire row.

        A mechanism without an encoder form returns the mean of two causal passes with the same weights, over the row
        and over the reversed row.

        Args:
            x: (B, S, d).
            lengths: (B,) int64.

        Returns:
            (B, S, d). Padding is handled as in `forward`.

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
        """Create an empty cache.

        Args:
            prefix_batch: number of prefixes N, which must divide B; None: one per row.

        ValueError: `prefix_batch` does not divide `batch`.
        """
        if self.cache_bits is not None and not self.has_codes:
            raise ValueError(f"{type(self).__name__} {NO_CODES}")
        like = next(self.parameters()).new_empty(0, dtype=dtype, device=device)
        build: type = self.cache_type
        cache: Cache = build(self, batch, capacity, prefix_capacity, rows_per_prefix(batch, prefix_batch), like)
        cache.made_by, cache.numbers_per_token = self.makes, self.cache_elements_per_token
        return cache

    @property
    def makes(self) -> tuple[str, int]:
        """Value of `Cache.made_by` in its caches."""
        return type(self).__name__, self.d_model

    @torch.no_grad()
    def read_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        """Store a prefix, (N, S, d), with lengths (N,) or None, as keys and values.

        ValueError: the cache already contains a prefix or text, the prefix is longer than its capacity, or as for
        `forward`. TypeError: the cache is not of this mechanism and width, or as for `forward`.
        """
        self._check_cache(cache)
        prefix = self._padded("prefix", prefix, prefix_lengths)
        size = prefix.shape[1]
        _check_rows("prefix", prefix, cache.rows // cache.beam)
        if cache.length or cache.has_prefix:
            raise ValueError("a prefix is read once per cache, before any text")
        _check_room(cache, size, cache.prefix_capacity)
        cache.has_prefix = True
        if prefix_lengths is not None:  # a copy: steps in C++ read int64 where it is
            uneven = bool((prefix_lengths != size).any())
            prefix_lengths = prefix_lengths.to(torch.int64, copy=True) if uneven else None
        if prefix.numel():
            self._store_prefix(prefix, prefix_lengths, cache)

    @torch.no_grad()
    def extend(self, x: Tensor, cache: Cache) -> Tensor:
        """Continue each row, (B, n, d) -> (B, n, d): prefill, a chunk of it, or one decoding step.

        A compiled step of a static cache leaves `cache.length` to its caller, see `Cache.make_static`.

        ValueError: the cache has no room for n more positions or another number of rows, it is static and n is not 1,
        or x has another width than d. TypeError: the cache is not of this mechanism and width, or x is not a tensor.
        """
        self._check_cache(cache)
        self._check_width("x", x)
        _check_rows("x", x, cache.rows)
        new, length = x.shape[1], cache.static_length
        if length is not None and new != 1:
            raise ValueError(f"a static cache takes one position at a time, not {new}")
        on_host = length is None or not torch.compiler.is_compiling()  # else it would be specialised on one length
        if on_host:
            _check_room(cache, new, cache.capacity)
        if cache.block and 0 < (left := cache.block - cache.length % cache.block) < new:
            parts = x[:, :left], *x[:, left:].split(cache.block, 1)
            return torch.cat([self.extend(part, cache) for part in parts], 1)
        out = x.clone() if not x.numel() else cache.native(self, x)
        out = self._extend(x, cache) if out is None else out
        if length is not None:
            length += 1
        if on_host:
            cache.length += new
        if cache.block and new and cache.length % cache.block == 0:
            cache.seal()
        return out

    @torch.no_grad()
    def check_steps(self, positions: int = 20) -> None:
        """Compare `extend`, one position at a time, with `forward` on random inputs, without dropout.

        Parameters that are zero, as an output projection at its start, are random in this comparison.

        ValueError: they differ, `extend` fails, or the cache has another size than `cache_elements` says.
        """
        tried = copy.deepcopy(self).eval()
        with torch.random.fork_rng(devices=[]):
            for parameter in tried.parameters():
                if not parameter.any():
                    parameter.normal_(std=self.d_model**-0.5)
            x = torch.randn(2, positions, self.d_model).to(next(self.parameters()))
        try:
            parallel, cache = tried(x), tried.new_cache(2, positions)
            steps = torch.cat([tried.extend(one, cache) for one in x.split(1, dim=1)], 1)
            gap = float((steps - parallel).abs().max() / parallel.abs().max())
            bytes_of = cache.nbytes, tried.cache_bytes(2, positions, dtype=x.dtype)
        except Exception as error:  # of a mechanism that anyone wrote
            raise ValueError(f"{type(self).__name__}: extend fails: {type(error).__name__}: {error}") from error
        if not gap < 0.01:  # also NaN
            expected = "extend, one position at a time, should give what forward gives"
            raise ValueError(
                f"{type(self).__name__}: {expected}; it differs by {100 * gap:.1f} % of the largest output"
            )
        if bytes_of[0] != bytes_of[1]:
            raise ValueError(
                "{}: its cache has {} bytes, cache_elements gives {}".format(type(self).__name__, *bytes_of)
            )

    def visible(self, position: int) -> Sequence[int]:
        """Text positions that text position `position` sees; by default, itself and all earlier ones.

        A mechanism that does not read all of its past overrides this, and is tested against it.
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
        """Check x (B, T, d) and set its padding to zero."""
        self._check_width(name, x)
        if lengths is None:
            return x
        rows, size = x.shape[:2]
        of = "lengths" if name == "x" else f"{name}_lengths"
        _check_integers(of, lengths)
        if lengths.shape != (rows,):
            raise ValueError(f"{of}: expected shape ({rows},), one length per row, not {tuple(lengths.shape)}")
        # Reading a device tensor would synchronise; tensors that are traced, transformed or fake have no values.
        eager = not captured()
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
        """Implement `forward` for inputs that are not empty and zero in their padding."""

    def _encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Implement `encode` for an input that is not empty and zero in its padding."""
        place = torch.arange(x.shape[1], device=x.device)
        back = torch.where(length_mask(lengths, x.shape[1]), lengths[:, None] - 1 - place, place)  # an involution
        index = back.unsqueeze(-1).expand_as(x)
        ahead = self._forward(x, None, lengths, None)
        return (ahead + self._forward(x.gather(1, index), None, lengths, None).gather(1, index)) / 2

    @abstractmethod
    def _store_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        """Implement `read_prefix` for a prefix that is not empty, fits the cache, and is zero in its padding.

        Lengths are None if all equal S.
        """

    @abstractmethod
    def _extend(self, x: Tensor, cache: Cache) -> Tensor:
        """Implement `extend` for an input that is not empty and fits. `cache.length` is updated by the caller."""

    @property
    @abstractmethod
    def cache_elements_per_token(self) -> float:
        """Cached elements per position in the limit of long sequences, as the papers count them."""

    def cache_bytes_per_token(self, dtype: torch.dtype) -> float:
        """Bytes of the elements that `cache_elements_per_token` counts, in a cache of this dtype."""
        return dtype.itemsize * self.cache_elements_per_token

    @abstractmethod
    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        """Exact number of elements that `new_cache` allocates for the same arguments, codes included."""

    def cache_bytes(
        self,
        batch: int,
        capacity: int,
        prefix_capacity: int = 0,
        prefix_batch: int | None = None,
        *,
        dtype: torch.dtype,
    ) -> int:
        """Exact number of bytes that `new_cache` allocates for the same arguments."""
        return dtype.itemsize * self.cache_elements(batch, capacity, prefix_capacity, prefix_batch)

    @abstractmethod
    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        """Multiply-adds of one cached decoding step of one row, including projections.

        Args:
            context: number of positions up to the step, including the prefix.
            prefix: number of prefix positions among them, for mechanisms that do not read prefix and text alike.
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
    """Number of rows that share one prefix (the beam). ValueError: `prefix_batch` does not divide `batch`."""
    prefixes = batch if prefix_batch is None else prefix_batch
    if batch == prefixes == 0:
        return 1
    if prefixes < 1 or batch < 1 or batch % prefixes:
        raise ValueError(f"{batch} rows cannot be divided evenly among {prefixes} prefixes")
    return batch // prefixes


def rows_of(prefixes: Tensor, beam: int) -> Tensor:
    """Indices of the rows that read the given prefixes (N',) int64 -> (N' * beam,)."""
    return (prefixes[:, None] * beam + torch.arange(beam, device=prefixes.device)).flatten()


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """lengths (B,) int64 -> (B, size) bool, true at the first `lengths[b]` positions."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def blank(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x (B, S, ...) with zeros after the first lengths (B,) int64 positions; None: no padding. NaN is removed too."""
    if lengths is None:
        return x
    padding = ~length_mask(lengths, x.shape[1])
    return x.masked_fill(padding.view(*padding.shape, *[1] * (x.dim() - 2)), 0.0)


def head_width(d_model: int, num_heads: int, head_dim: int | None) -> int:
    """Width of a head: `head_dim`, or d / H if it is None.

    ValueError: a size is below 1, or `head_dim` is None and H does not divide d.
    """
    for name, size in (("d_model", d_model), ("num_heads", num_heads), ("head_dim", head_dim)):
        if size is not None and size < 1:
            raise ValueError(f"{name}={size}: expected at least 1")
    if head_dim is not None:
        return head_dim
    if d_model % num_heads:
        raise ValueError(f"num_heads={num_heads} does not divide d_model={d_model}: choose another, or set head_dim")
    return d_model // num_heads
