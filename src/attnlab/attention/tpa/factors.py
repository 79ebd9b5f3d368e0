"""Factors of tensor products: layout, initialisation, and the cache of the factors of keys and values."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..bounds import PositiveFloat, Rate
from ..ops.quantised import BLOCK, SCRATCH, Coded
from ..positional import Angles, PositionalCache

Init = Literal["paper_merged", "paper_per_rank", "released"]
Nonlinearity = Literal["none", "sigmoid", "softmax"]
TILE = 2048  # cached positions that are read at a time
ALIGNED = 16  # positions

Span = Callable[[int, int], Angles]  # (first, last) -> angles of positions first ... last - 1
Buffers = dict[str, Tensor]  # key_head, value_head (B, R, h, positions), key_token, value_token (B, R, positions, w)


class FactorOptions(TypedDict, total=False):
    """Keyword arguments of all tensor product attention; `TPA` documents them and has their defaults."""

    nonlinearity: Nonlinearity
    output_norm: bool
    init: Init
    dropout: Rate
    rope_theta: PositiveFloat | None


class Factors(NamedTuple):
    """Factors of T positions, with ranks of queries, keys and values in this order. Learned factors have B = T = 1.

    Args:
        head: head factors, (B, T, ranks, h).
        token: token factors, (B, T, ranks, w); those of queries and keys are rotated.
        query: queries, (B, T, h, D), if they are not factorised; None: queries have factors.
    """

    head: Tensor
    token: Tensor
    query: Tensor | None = None


class Block(NamedTuple):
    """A part of the factor projection: the head or token factors of queries, of keys, or of values.

    Args:
        width: components of a factor: h for head factors, D or a divisor of D for token factors.
    """

    kind: Literal["head", "token"]
    ranks: int
    width: int

    def bound(self, d_model: int, init: Init) -> float:
        """Bound of the uniform distribution of its initial weights.

        The paper: Xavier, for the matrix of one rank or of all ranks merged (section 3.1 states both). The released
        code: Xavier for a view with three axes, of which torch treats the last as a receptive field.
        """
        if init == "released":
            inner, outer = (self.ranks, self.width) if self.kind == "head" else (self.width, self.ranks)
            return math.sqrt(6 / (inner * (outer + d_model)))
        return math.sqrt(6 / (d_model + self.width * (self.ranks if init == "paper_merged" else 1)))


def learned_factors(blocks: list[Block], d_model: int, init: Init) -> nn.Parameter:
    """Learned factors (ranks, width), with the initial spread of projected factors of an x of variance one.

    Args:
        blocks: parts of the parameter, in order, with the same width.
    """
    factors = nn.Parameter(torch.empty(sum(block.ranks for block in blocks), blocks[0].width))
    for part, block in zip(factors.detach().split([block.ranks for block in blocks]), blocks, strict=True):
        bound = block.bound(d_model, init) * math.sqrt(d_model)
        nn.init.uniform_(part, -bound, bound)
    return factors


class FactorCache(PositionalCache):
    """Factors of keys and values that depend on the position.

    Positions are stored along the rows of a step's matrix products. A static cache allocates a multiple of `ALIGNED`
    positions, of which it uses `capacity`, so that the kernel reads head factors in full loads (see
    `ops.kernels.factor`).
    """

    def make_static(self) -> None:
        super().make_static()
        self.text, self.prefix = self._aligned(self.text), self._aligned(self.prefix)
        missing = self.prefix_capacity + self._slots - len(self.cos)  # angles of padding
        self.cos, self.sin = (F.pad(table, (0, 0, 0, missing)) for table in (self.cos, self.sin))

    @property
    def _slots(self) -> int:
        """Number of allocated text positions."""
        return self.capacity + (-self.capacity % ALIGNED if self.is_static else 0)

    def _aligned(self, buffers: "Buffers") -> "Buffers":
        """Copies that are padded with zeros to a multiple of `ALIGNED` positions."""
        aligned = {}
        for name, buffer in buffers.items():
            missing, axis = -buffer.shape[self.axes[name]] % ALIGNED, self.axes[name]
            aligned[name] = F.pad(buffer, (0, 0) * (buffer.dim() - 1 - axis) + (0, missing)) if missing else buffer
        return aligned

    def text_segment(self, size: int | Tensor) -> "FactorSegment":
        """The first `size` positions of each row's text; masked if `size` is on the device, (1,)."""
        if isinstance(size, Tensor):
            most, _ = self.reads(size)
            exists = torch.arange(most, device=size.device) < size
            return FactorSegment(span(self.text, 0, most), most, self.angles, exists.unsqueeze(0))
        sealed = self.sealed
        newest = FactorSegment(span(self.text, 0, size - sealed), size - sealed, self.angles)
        return newest._replace(angles=partial(newest._shifted, sealed)) if sealed else newest

    def coded_segments(self) -> list["FactorSegment"]:
        """The text positions that are codes, in parts that stay in the cache of a CPU; each read gives numbers."""
        parts, sealed = [], self.sealed
        if sealed:
            wide = max(len(coded) * math.prod(coded.rows.shape[1:-3]) * coded.width for coded in self.coded.values())
            size = max(BLOCK, SCRATCH // max(wide, 1) // BLOCK * BLOCK)
            parts = [*FactorSegment(_Decoded(self.coded, 0, sealed), sealed, self.angles).tiles(size)]
        return parts

    def prefix_segment(self) -> "FactorSegment":
        """The prefixes, each shared by `beam` rows."""
        size = self.prefix_size if self.prefix_reads is None else self.prefix_reads.shape[0]
        return FactorSegment(span(self.prefix, 0, size), size, self.prefix_angles, self.prefix_mask, self.beam)


class FactorSegment(NamedTuple):
    """Cached positions: the text of a row, or a prefix that several rows share.

    Args:
        buffers: factors of these positions, by name.
        angles: called with (first, last), counted from the start of the segment, returns cos and sin.
        mask: (N or 1, size) bool, true where a position exists; None: all exist.
        beam: number of rows that share the segment.
    """

    buffers: Buffers
    size: int
    angles: Span
    mask: Tensor | None = None
    beam: int = 1

    @property
    def like(self) -> Tensor:
        """One of the buffers, for its number of rows and dtype."""
        return next(iter(self.buffers.values()))

    @property
    def rows(self) -> int:
        """Number of rows or prefixes."""
        buffers = self.buffers
        return len(next(iter(buffers.coded.values())) if isinstance(buffers, _Decoded) else self.like)

    def tiles(self, size: int) -> Iterator["FactorSegment"]:
        for first in range(0, self.size, size):
            last = min(first + size, self.size)
            mask = None if self.mask is None else self.mask[:, first:last]
            yield FactorSegment(
                span(self.buffers, first, last), last - first, partial(self._shifted, first), mask, self.beam
            )

    def _shifted(self, by: int, first: int, last: int) -> Angles:
        return self.angles(by + first, by + last)


class _Decoded(dict[str, Tensor]):
    """Positions first ... last - 1 of coded buffers, as numbers, which are computed at each access."""

    def __init__(self, coded: Mapping[str, Coded], first: int, last: int) -> None:
        self.coded, self.first, self.last = coded, first, last

    def __getitem__(self, name: str) -> Tensor:
        return self.coded[name].read(self.first, self.last)


def span(buffers: Buffers, first: int, last: int) -> Buffers:
    """Slice buffers to positions first ... last - 1: the last axis of head factors, the third of token factors."""
    if isinstance(buffers, _Decoded):
        return _Decoded(buffers.coded, buffers.first + first, buffers.first + last)
    return {
        name: factor[..., first:last] if name.endswith("head") else factor[:, :, first:last]
        for name, factor in buffers.items()
    }
