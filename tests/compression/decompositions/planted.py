"""Tensors whose structure is known."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from attnlab.compression.decompositions.slices import Slices

RANKS = [2, 3, 5, 7, 9, 10]


def planted(mixing: float, noise: float, seed: int = 0, size: int = 32) -> Slices:
    """Heads that are sums of six matrices of RANKS, each mostly of one of them; `noise` relative to the whole."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    identity = torch.eye(len(RANKS), dtype=torch.float64)
    fusion = identity + mixing * normal(len(RANKS), len(RANKS)) * (1 - identity)
    terms = torch.stack([normal(size, rank) @ normal(rank, size) for rank in RANKS], -1)
    dense = terms @ fusion.T
    error = normal(*dense.shape)
    return Slices.of(dense + noise * dense.norm() / error.norm() * error)


def falls(history: Sequence[float], tolerance: float = 1e-9) -> bool:
    """Whether no number is above the one before it, but for this relative rounding."""
    return all(late <= early * (1 + tolerance) for early, late in pairwise(history))


def assert_orthonormal(*factors: Tensor | None) -> None:
    """The columns of each."""
    for factor in factors:
        assert factor is not None
        torch.testing.assert_close(factor.T @ factor, torch.eye(factor.shape[1]).double(), rtol=0, atol=1e-12)


def svd_error(matrix: Tensor, rank: int) -> float:
    """The relative error of the best approximation of a rank."""
    values = torch.linalg.svdvals(matrix)
    return float(values[rank:].norm() / values.norm())


def products(heads: int = 3, rows: int = 9, columns: int = 8, width: int = 4) -> Slices:
    return Slices(torch.randn(heads, rows, width), torch.randn(heads, columns, width))
