"""Factors of tensor products: how many there are, and how wide their initial values are spread."""

import math
from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from ..bounds import PositiveFloat, Rate

Init = Literal["paper_merged", "paper_per_rank", "released"]
Nonlinearity = Literal["none", "sigmoid", "softmax"]


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
        kind: whether these are head factors or token factors.
        ranks: number of factors.
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
        d_model: width d of the input that projected factors would have.
        init: the rule for their spread, see `TPA`.
    """
    factors = nn.Parameter(torch.empty(sum(block.ranks for block in blocks), blocks[0].width))
    for part, block in zip(factors.detach().split([block.ranks for block in blocks]), blocks, strict=True):
        bound = block.bound(d_model, init) * math.sqrt(d_model)
        nn.init.uniform_(part, -bound, bound)
    return factors
