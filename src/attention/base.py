"""What every attention mechanism answers: a parallel form, a cached form that equals it, and what the cache costs.

Shapes: B rows (hypotheses), T new positions, S prompt length, N prompts, d model width, H heads, D head width.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Cache(ABC):
    """Keys and values of `batch` rows, in buffers that are allocated once.

    Rows are grouped by prompt: rows `n * beam ... (n + 1) * beam - 1` read prompt `n`, which is stored once.
    `length` counts the text positions held, the same for every row; prompts may have different lengths.
    """

    length: int
    beam: int

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """The tensors that hold keys and values, of text and of prompts."""

    @property
    def nbytes(self) -> int:
        """Bytes of the key-value buffers, as allocated."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Row i continues what row `rows[i]` holds, (B,) int64.  Prompts stay: both must read the same one."""

    @abstractmethod
    def select(self, prompts: Tensor) -> None:
        """Keep these prompts, (N',) int64, and their rows; the rest is dropped."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forget the text positions from `length` on.  ValueError where the mechanism cannot go back there."""

    def _check_crop(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} positions to {length}")


class Attention(nn.Module, ABC):
    """Causal self-attention with an optional prompt of extra keys and values, which every position sees whole.

    Output dtype = input dtype; softmax statistics are float32 or wider.
    """

    d_model: int

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        prompt: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        prompt_lengths: Tensor | None = None,
    ) -> Tensor:
        """(B, T, d), (B, S, d) -> (B, T, d).

        `lengths` and `prompt_lengths`, (B,), mark right padding; a row gets what it would get alone and unpadded.
        What stands at padded output positions is unspecified.
        """

    @abstractmethod
    def new_cache(
        self,
        batch: int,
        capacity: int,
        prompt_capacity: int = 0,
        *,
        prompt_batch: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Cache:
        """Buffers for `batch` rows of `capacity` positions and `prompt_batch` prompts (default: one per row)."""

    @abstractmethod
    def read_prompt(self, prompt: Tensor, prompt_lengths: Tensor | None, cache: Cache) -> None:
        """Store a prompt, (N, S, d), as keys and values.  Once per cache, before any text."""

    @abstractmethod
    def extend(self, x: Tensor, cache: Cache) -> Tensor:
        """(B, n, d), n >= 1 -> (B, n, d): prefill, chunked prefill and a decoding step are this one method."""

    @property
    @abstractmethod
    def cache_elements_per_token(self) -> float:
        """Cached numbers per position in the limit of long sequences, as the papers count them."""

    @abstractmethod
    def cache_elements(
        self, batch: int, capacity: int, prompt_capacity: int = 0, prompt_batch: int | None = None
    ) -> int:
        """Exactly what `new_cache` with the same arguments allocates, in elements."""

    @abstractmethod
    def multiply_adds(self, context: int) -> int:
        """Multiply-adds of one cached decoding step of one row at `context` positions, projections included."""


def check_room(cache: Cache, new: int, capacity: int) -> None:
    if cache.length + new > capacity:
        raise ValueError(f"the cache has room for {capacity} positions; {cache.length} are held and {new} were given")


def check_prompt(cache: Cache, held: int, size: int, capacity: int) -> None:
    """A prompt of `size` positions may be read: it fits, and the cache holds nothing yet."""
    if cache.length or held:
        raise ValueError("a prompt is read once per cache, before any text")
    check_room(cache, size, capacity)


def rows_per_prompt(batch: int, prompt_batch: int | None) -> int:
    """The beam: how many rows share one prompt."""
    prompts = batch if prompt_batch is None else prompt_batch
    if prompts < 1 or batch % prompts:
        raise ValueError(f"{batch} rows cannot be shared out evenly over {prompts} prompts")
    return batch // prompts


def rows_of(prompts: Tensor, beam: int) -> Tensor:
    """(N',) prompt numbers -> (N' * beam,) numbers of their rows."""
    return (prompts[:, None] * beam + torch.arange(beam, device=prompts.device)).flatten()


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """(B,) -> (B, size) bool, true at the first `lengths[b]` places."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]
