"""What every attention mechanism answers: a parallel form, a cached form that equals it, and what the cache costs.

Shapes: B rows (hypotheses), T new positions, S prefix length, N prefixes, d model width, H heads, D head width.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Cache(ABC):
    """Keys and values of `batch` rows, in buffers that are allocated once.

    Rows are grouped by prefix: rows `n * beam ... (n + 1) * beam - 1` read prefix `n`, which is stored once.
    `length` counts the text positions held, the same for every row; prefixes may have different lengths.
    """

    length: int
    beam: int
    has_prefix: bool = False

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """The tensors that hold keys and values, of text and of prefixes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the key-value buffers, as allocated."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Row i continues what row `rows[i]` holds, (B,) int64.  Prefixes stay: both must read the same one."""

    @abstractmethod
    def select(self, prefixes: Tensor) -> None:
        """Keep these prefixes, (N',) int64, and their rows; the rest is dropped."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forget the text positions from `length` on.  ValueError where the mechanism cannot go back there."""

    def _check_crop(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} positions to {length}")


class Attention(nn.Module, ABC):
    """Causal self-attention with an optional prefix of extra keys and values, which every position sees whole.

    Output dtype = input dtype; softmax statistics are float32 or wider.
    """

    d_model: int
    max_positions: int | None = None  # the longest text it takes; None: any
    reads_prefix: bool = True  # false: built without weights for a prefix, and one is refused with a ValueError

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        prefix: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> Tensor:
        """(B, T, d), (B, S, d) -> (B, T, d).

        `lengths` and `prefix_lengths`, (B,), mark right padding; a row gets what it would get alone and unpadded.
        What stands at padded output positions is unspecified.
        """

    @abstractmethod
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
        """Buffers for `batch` rows of `capacity` positions and `prefix_batch` prefixes (default: one per row)."""

    @abstractmethod
    def read_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        """Store a prefix, (N, S, d), as keys and values.  Once per cache, before any text."""

    @abstractmethod
    def extend(self, x: Tensor, cache: Cache) -> Tensor:
        """(B, n, d), n >= 1 -> (B, n, d): prefill, chunked prefill and a decoding step are this one method."""

    @property
    @abstractmethod
    def cache_elements_per_token(self) -> float:
        """Cached numbers per position in the limit of long sequences, as the papers count them."""

    @abstractmethod
    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        """Exactly what `new_cache` with the same arguments allocates, in elements."""

    @abstractmethod
    def multiply_adds(self, context: int) -> int:
        """Multiply-adds of one cached decoding step of one row at `context` positions, projections included."""


def check_room(cache: Cache, new: int, capacity: int) -> None:
    if cache.length + new > capacity:
        raise ValueError(f"the cache has room for {capacity} positions; {cache.length} are held and {new} were given")


def begin_prefix(cache: Cache, size: int, capacity: int) -> None:
    """A prefix of `size` positions comes, once per cache and before any text."""
    if cache.length or cache.has_prefix:
        raise ValueError("a prefix is read once per cache, before any text")
    check_room(cache, size, capacity)
    cache.has_prefix = True


def rows_per_prefix(batch: int, prefix_batch: int | None) -> int:
    """The beam: how many rows share one prefix."""
    prefixes = batch if prefix_batch is None else prefix_batch
    if prefixes < 1 or batch % prefixes:
        raise ValueError(f"{batch} rows cannot be shared out evenly over {prefixes} prefixes")
    return batch // prefixes


def rows_of(prefixes: Tensor, beam: int) -> Tensor:
    """(N',) prefix numbers -> (N' * beam,) numbers of their rows."""
    return (prefixes[:, None] * beam + torch.arange(beam, device=prefixes.device)).flatten()


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """(B,) -> (B, size) bool, true at the first `lengths[b]` places."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]
