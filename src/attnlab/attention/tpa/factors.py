"""Factors of tensor products: how they are laid out and initialised, and the cache of those of keys and values."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..bounds import PositiveFloat, Rate
from ..positional import Angles, PositionalCache

Init = Literal["paper_merged", "paper_per_rank", "released"]
Nonlinearity = Literal["none", "sigmoid", "softmax"]
TILE = 2048  # cached positions at a time: of their products with a query, or of their keys and values, built again
ALIGNED = 16  # positions

Span = Callable[[int, int], Angles]  # those of the positions first ... last - 1
Buffers = dict[str, Tensor]  # key_head, value_head (B, R, h, positions), key_token, value_token (B, R, positions, w)


class FactorOptions(TypedDict, total=False):
    """Keyword arguments of all tensor product attention; `TPA` has their meaning and defaults."""

    nonlinearity: Nonlinearity
    output_norm: bool
    init: Init
    dropout: Rate
    rope_theta: PositiveFloat | None


class Factors(NamedTuple):
    """Of T positions, B and T 1 where all share them; ranks of queries, then of keys, then of values.

    Args:
        head: head factors, (B, T, ranks, h).
        token: token factors, (B, T, ranks, w); those of queries and keys are rotated.
        query: queries that are not factorised and have no ranks, (B, T, h, D); None: queries have factors.
    """

    head: Tensor
    token: Tensor
    query: Tensor | None = None


class Block(NamedTuple):
    """A part of the factor projection: `ranks` factors of a width, all of queries, of keys or of values.

    Args:
        width: components of each: h of head factors, D or a divisor of D of token factors.
    """

    kind: Literal["head", "token"]
    ranks: int
    width: int

    def bound(self, d_model: int, init: Init) -> float:
        """Of the uniform distribution that its weights are drawn from.

        The paper: Xavier, of one rank's matrix or of all ranks' merged (section 3.1 writes both). The released code:
        Xavier of a view with three axes, of which torch takes the last for a receptive field.
        """
        if init == "released":
            inner, outer = (self.ranks, self.width) if self.kind == "head" else (self.width, self.ranks)
            return math.sqrt(6 / (inner * (outer + d_model)))
        return math.sqrt(6 / (d_model + self.width * (self.ranks if init == "paper_merged" else 1)))


def learned_factors(blocks: list[Block], d_model: int, init: Init) -> nn.Parameter:
    """(ranks, width) factors with the spread that projected ones have where x has variance one.

    Args:
        blocks: the parts of the parameter, in their order; all have the same width.
    """
    factors = nn.Parameter(torch.empty(sum(block.ranks for block in blocks), blocks[0].width))
    for part, block in zip(factors.detach().split([block.ranks for block in blocks]), blocks, strict=True):
        bound = block.bound(d_model, init) * math.sqrt(d_model)
        nn.init.uniform_(part, -bound, bound)
    return factors


class FactorCache(PositionalCache):
    """Factors of keys and values, where they differ from position to position.

    Positions lie as a step reads them: along the rows of its matrix products. A static cache has room for a multiple of
    `ALIGNED` positions, of which it uses `capacity`: only then does the kernel read rows of head factors in full
    loads (see `ops.kernels.factor`).
    """

    def make_static(self) -> None:
        super().make_static()
        self.text, self.prefix = self._aligned(self.text), self._aligned(self.prefix)
        missing = self.prefix_capacity + self._slots - len(self.cos)  # angles of positions that do not exist
        self.cos, self.sin = (F.pad(table, (0, 0, 0, missing)) for table in (self.cos, self.sin))

    @property
    def _slots(self) -> int:
        """Text positions that the buffers hold."""
        return self.capacity + (-self.capacity % ALIGNED if self.is_static else 0)

    def _aligned(self, buffers: "Buffers") -> "Buffers":
        """Copies with zeros behind the last position, up to a multiple of `ALIGNED`."""
        aligned = {}
        for name, buffer in buffers.items():
            missing, axis = -buffer.shape[self.axes[name]] % ALIGNED, self.axes[name]
            aligned[name] = F.pad(buffer, (0, 0) * (buffer.dim() - 1 - axis) + (0, missing)) if missing else buffer
        return aligned

    def text_segment(self, size: int | Tensor) -> "FactorSegment":
        """The first positions of each row's text; where the device alone knows how many, (1,), as many with a mask."""
        if isinstance(size, Tensor):
            most, _ = self.reads(size)
            exists = torch.arange(most, device=size.device) < size
            return FactorSegment(span(self.text, 0, most), most, self.angles, exists.unsqueeze(0))
        return FactorSegment(span(self.text, 0, size), size, self.angles)

    def prefix_segment(self) -> "FactorSegment":
        """The prefixes, each of which the rows of its beam share."""
        size = self.prefix_size if self.prefix_reads is None else self.prefix_reads.shape[0]
        return FactorSegment(span(self.prefix, 0, size), size, self.prefix_angles, self.prefix_mask, self.beam)


class FactorSegment(NamedTuple):
    """Cached positions that rows read: a row's text, or a prefix that several rows share.

    Args:
        buffers: by name, cut to these positions.
        angles: a function (first, last) -> cos and sin of these positions, counted from the segment's first.
        mask: (N or 1, size) bool, true where a position exists; None: everywhere.
        beam: rows that read each of them.
    """

    buffers: Buffers
    size: int
    angles: Span
    mask: Tensor | None = None
    beam: int = 1

    @property
    def like(self) -> Tensor:
        """One of the buffers, for its rows and dtype."""
        return next(iter(self.buffers.values()))

    def tiles(self, size: int) -> Iterator["FactorSegment"]:
        for first in range(0, self.size, size):
            last = min(first + size, self.size)
            mask = None if self.mask is None else self.mask[:, first:last]
            yield FactorSegment(
                span(self.buffers, first, last), last - first, partial(self._shifted, first), mask, self.beam
            )

    def _shifted(self, by: int, first: int, last: int) -> Angles:
        return self.angles(by + first, by + last)


def span(buffers: Buffers, first: int, last: int) -> Buffers:
    """The positions first ... last - 1.

    Args:
        buffers: by name; positions are the last axis of head factors, the third of token factors.
    """
    return {
        name: factor[..., first:last] if name.endswith("head") else factor[:, :, first:last]
        for name, factor in buffers.items()
    }
