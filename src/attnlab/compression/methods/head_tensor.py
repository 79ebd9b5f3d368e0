"""The tensor of one layer that TensorLLM decomposes: its matrices, sizes and ranks, and how it is read from a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attnlab.errors import ConfigError, DataError
from attnlab.pretrained.base import Projection


@dataclass(frozen=True)
class Stack:
    """Matrices with the same number of heads."""

    names: tuple[str, ...]  # of q, k, v and o
    heads: int  # h
    rank: int | None  # R3; None: no factor between the matrices


@dataclass(frozen=True)
class Sizes:
    """The tensor of one layer and its ranks."""

    places: Mapping[str, Projection]  # in the order of q, k, v, o; their axis is the one that the heads are cut from
    dim: int  # d, the length of the first mode
    width: int  # dv, the length of the second mode
    ranks: tuple[int, int]  # R1, R2
    stacks: tuple[Stack, ...]  # the matrices by number of heads

    @property
    def original(self) -> int:
        """Parameters of the matrices."""
        return sum(place.shape[0] * place.shape[1] for place in self.places.values())

    def parameters(self, absorbed: bool = False) -> int:
        """Of the factors: sum of h R1 R2 R3, d R1, dv R2, n R3 (the denominator of the paper's rate)."""
        first, second = self.ranks
        columns = sum((stack.rank or len(stack.names)) * stack.heads * second for stack in self.stacks)
        small = self.width * second + sum(len(stack.names) * (stack.rank or 0) for stack in self.stacks)
        return small + (self.dim * columns if absorbed else (columns + self.dim) * first)


def named(sizes: Sizes, errors: Sequence[Tensor]) -> dict[str, float]:
    """Errors by name of the matrix.

    Args:
        errors: for each stack those of its matrices, (n,).
    """
    matrices = {
        name: float(error)
        for stack, values in zip(sizes.stacks, errors, strict=True)
        for name, error in zip(stack.names, values, strict=True)
    }
    return {name: matrices[name] for name in sizes.places}


def read_blocks(model: nn.Module, sizes: Sizes) -> list[Tensor]:
    """The tensor of each stack, (n, h, d, dv), in float64. DataError: a weight is not finite."""
    for place in sizes.places.values():
        if not place.read(model).isfinite().all():
            raise DataError(
                f"{place.path}: its weight has values that are not numbers or not finite; it cannot be used"
            )
    return [
        torch.stack([sizes.places[name].split(sizes.places[name].read(model)).double() for name in stack.names])
        for stack in sizes.stacks
    ]


def modes(place: Projection) -> tuple[int, int]:
    """Length of the mode that is not cut into heads, and width of a head."""
    return place.shape[1 if place.axis == "out" else 0], place.width


def turned(place: Projection, where: str) -> Projection:
    """The same matrix with its other axis cut into as many parts as it has heads: the released code's layout."""
    if place.shape[0] != place.shape[1]:
        out, width = place.shape
        raise ConfigError(
            f"compress.layout=released: {where} has a projection of {out} x {width}; the published code needs square "
            "ones (no grouped queries, heads that fill the model's width)"
        )
    return replace(place, axis="in" if place.axis == "out" else "out")
