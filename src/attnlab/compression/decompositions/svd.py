"""Singular values: per head, over all heads, and of a plain matrix.

With the fusion fixed to the identity the heads decouple: the best block terms of fixed ranks are each head's truncated
SVD, and the best ranks for a fixed total are those of the largest singular values over all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .slices import TINY, Slices


@dataclass(frozen=True)
class BlockTerms:
    """Y[:, :, g] ~ sum_h fusion[g, h] left[h] @ right[h].T; term h has the rank ranks[h] (BTD-(L, L, 1)).

    Args:
        left, right: of each term, (I, R_h) and (J, R_h).
        fusion: (H, H).
        history: relative errors, the start first.
    """

    left: list[Tensor]
    right: list[Tensor]
    fusion: Tensor
    history: list[float]

    @property
    def ranks(self) -> list[int]:
        return [term.shape[-1] for term in self.left]

    @property
    def error(self) -> float:
        return self.history[-1]

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same as a CP decomposition of rank sum R_h."""
        repeats = torch.tensor(self.ranks, device=self.fusion.device)
        return torch.cat(self.left, -1), torch.cat(self.right, -1), self.fusion.repeat_interleave(repeats, -1)


@dataclass(frozen=True)
class Spectrum:
    """The singular value decomposition of each slice: left (H, I, D), values (H, D), right (H, J, D)."""

    left: Tensor
    values: Tensor
    right: Tensor


def spectrum(tensor: Slices) -> Spectrum:
    """The singular values of every slice, from the D x D product of both sides' triangular factors."""
    (q, r), (p, s) = torch.linalg.qr(tensor.left), torch.linalg.qr(tensor.right)
    u, values, vh = torch.linalg.svd(r @ s.mT, full_matrices=False)
    return Spectrum(q @ u, values, p @ vh.mT)


def truncated_svd(tensor: Slices | Spectrum, ranks: int | Sequence[int]) -> BlockTerms:
    """Each slice's best approximation of its rank, with both sides scaled by the root of the singular values.

    Raises:
        ValueError: a rank below 1 or above D.
    """
    svd = spectrum(tensor) if isinstance(tensor, Slices) else tensor
    heads, width = svd.values.shape
    ranks = [ranks] * heads if isinstance(ranks, int) else list(ranks)
    if len(ranks) != heads or not all(1 <= rank <= width for rank in ranks):
        raise ValueError(f"ranks {ranks}: expected {heads} of 1 to {width}")
    roots = svd.values.sqrt()
    left = [svd.left[h, :, :r] * roots[h, :r] for h, r in enumerate(ranks)]
    right = [svd.right[h, :, :r] * roots[h, :r] for h, r in enumerate(ranks)]
    rest = sum(float(svd.values[h, r:].square().sum()) for h, r in enumerate(ranks))
    error = (rest / max(float(svd.values.square().sum()), TINY)) ** 0.5
    return BlockTerms(left, right, torch.eye(heads).to(left[0]), [error])


def global_ranks(values: Tensor, total: int) -> list[int]:
    """The number of each head's singular values among the `total` largest; at least one each.

    By Eckart and Young no other ranks of this sum have a smaller error with the fusion fixed to the identity.

    Args:
        values: singular values, (H, D), descending.

    Raises:
        ValueError: a total below H or above H D.
    """
    heads, width = values.shape
    if not heads <= total <= heads * width:
        raise ValueError(f"total rank {total}: expected {heads} (one for each head) to {heads * width}")
    first = torch.zeros_like(values, dtype=torch.bool)
    first[:, 0] = True  # before all others: one for each head
    order = torch.argsort(torch.where(first, torch.inf, values).flatten(), descending=True, stable=True)
    return torch.bincount(order[:total] // width, minlength=heads).tolist()


def global_svd(tensor: Slices, total: int) -> BlockTerms:
    """Truncated SVDs whose ranks are `global_ranks`: the optimum for an identity fusion."""
    svd = spectrum(tensor)
    return truncated_svd(svd, global_ranks(svd.values, total))


def low_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """The best approximation a @ b of a matrix (m, n) at a rank.

    Returns:
        a (m, rank) and b (rank, n) in float64, and the relative error, Frobenius norm.

    Raises:
        ValueError: a rank below 1 or above min(m, n).
    """
    if not 1 <= rank <= min(matrix.shape):
        raise ValueError(f"rank {rank}: expected 1 to {min(matrix.shape)}")
    u, values, vh = torch.linalg.svd(matrix.detach().double(), full_matrices=False)
    root = values[:rank].sqrt()
    error = values[rank:].square().sum().sqrt() / values.square().sum().sqrt().clamp_min(TINY)
    return u[:, :rank] * root, root[:, None] * vh[:rank], float(error)


def randomised_low_rank(
    matrix: Tensor, rank: int, *, iterations: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, float]:
    """An approximation a @ b of a matrix (m, n) by subspace iteration without oversampling, as LASER's released code.

    Its error is larger than that of `low_rank`, most where singular values fall slowly. In float32.

    Args:
        seed: of the random subspace; the global generator does not change.

    Returns:
        a (m, rank) and b (rank, n) in float64, and the relative error, Frobenius norm.

    Raises:
        ValueError: a rank below 1 or above min(m, n).
    """
    if not 1 <= rank <= min(matrix.shape):
        raise ValueError(f"rank {rank}: expected 1 to {min(matrix.shape)}")
    dense = matrix.detach().float()
    with torch.random.fork_rng([dense.device] if dense.is_cuda else []):
        torch.manual_seed(seed)
        u, values, v = (part.double() for part in torch.svd_lowrank(dense, q=rank, niter=iterations))
    root = values.sqrt()
    a, b = u * root, root[:, None] * v.mT
    exact = matrix.detach().double()
    return a, b, float((exact - a @ b).norm() / exact.norm().clamp_min(TINY))
