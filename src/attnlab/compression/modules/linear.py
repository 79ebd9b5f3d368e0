"""Replacements of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.compression.modules.base import Dense, Replacement, build, describe


class LowRankLinear(Replacement, nn.Sequential):
    """A linear layer as two, y = B (A x) + b: (..., dim) -> (..., rank) -> (..., out_dim)."""

    kind = "linear"

    def __init__(self, dim: int, rank: int, out_dim: int, *, bias: bool = True) -> None:
        super().__init__(nn.Linear(dim, rank, bias=False), nn.Linear(rank, out_dim, bias=bias))
        self.in_features, self.rank, self.out_features = dim, rank, out_dim

    def layout(self) -> dict[str, Any]:
        bias = self.get_submodule("1").bias is not None
        return {"dim": self.in_features, "rank": self.rank, "out_dim": self.out_features, "bias": bias}

    def multiply_adds(self, tokens: int) -> int:
        return tokens * self.rank * (self.in_features + self.out_features)

    def dense(self) -> tuple[Dense, float]:
        first, second = self[0], self[1]
        assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
        return {"": (second.weight.double() @ first.weight.double(), second.bias)}, 0.0


class Fused(Replacement):
    """A part for each projection of a fused linear layer (timm's qkv).

    (..., in) -> (..., out): output i of part p is output rows[p][i] of the layer.

    Args:
        parts: a Replacement or nn.Linear for each projection, or its layout; that of an nn.Linear is
            {"kind": "dense", "dim", "out_dim", "bias"}.
        rows: the layer's outputs that each part computes; each output once.
    """

    kind = "fused"

    def __init__(self, parts: Sequence[nn.Module | dict[str, Any]], rows: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part if isinstance(part, nn.Module) else _part(part) for part in parts)
        self.rows = [list(part) for part in rows]
        order = [row for part in self.rows for row in part]
        if sorted(order) != list(range(len(order))):
            raise ValueError("rows: expected every output of the fused layer exactly once")
        first: Any = self.parts[0]
        self.in_features, self.out_features = first.in_features, len(order)
        self.inverse = None if order == sorted(order) else sorted(range(len(order)), key=order.__getitem__)

    def layout(self) -> dict[str, Any]:
        return {"parts": [_layout(part) for part in self.parts], "rows": self.rows}

    @property
    def weight(self) -> Tensor:
        parts: list[Any] = list(self.parts)
        weight = torch.cat([part.weight for part in parts])
        return weight if self.inverse is None else weight[self.inverse]

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([part(x) for part in self.parts], -1)
        return y if self.inverse is None else y[..., self.inverse]

    def multiply_adds(self, tokens: int) -> int:
        parts: list[Any] = list(self.parts)
        return sum(
            part.multiply_adds(tokens) if isinstance(part, Replacement) else tokens * part.weight.numel()
            for part in parts
        )

    def dense(self) -> tuple[Dense, float]:
        weights, biases, error = [], [], 0.0
        for part in self.parts:
            if isinstance(part, Replacement):
                matrices, lost = part.dense()
                weight, bias = matrices[""]
                error = max(error, lost)
            else:
                assert isinstance(part, nn.Linear)
                weight, bias = part.weight.double(), part.bias
            weights.append(weight)
            biases.append(weight.new_zeros(len(weight)) if bias is None else bias.double())
        weight, bias = torch.cat(weights), torch.cat(biases)
        if self.inverse is not None:
            weight, bias = weight[self.inverse], bias[self.inverse]
        return {"": (weight, bias)}, error

    def bind(self, model: nn.Module, path: str) -> None:
        for i, part in enumerate(self.parts):
            if isinstance(part, Replacement):
                part.bind(model, f"{path}.parts.{i}")


def _part(layout: dict[str, Any]) -> nn.Module:
    if layout["kind"] == "dense":
        return nn.Linear(layout["dim"], layout["out_dim"], bias=layout["bias"])
    return build(layout)


def _layout(part: nn.Module) -> dict[str, Any]:
    if isinstance(part, Replacement):
        return describe(part)
    assert isinstance(part, nn.Linear)
    return {"kind": "dense", "dim": part.in_features, "out_dim": part.out_features, "bias": part.bias is not None}
