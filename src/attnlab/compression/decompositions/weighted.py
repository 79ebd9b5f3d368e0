"""Partial Tucker that approximates the outputs of matrices instead of their entries.

The error of a matrix W is tr(dW C dW.T) / tr(W C W.T) with C the Gram matrix of its inputs: the relative squared error
of its outputs. The inputs of q, k and v run along the first mode of the tensor, those of o along the heads and the
second mode, so that no whitening makes this an ordinary decomposition: the factors are fitted in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .slices import TINY
from .tucker import Tucker, Watch

Columns = Sequence[Sequence[Tensor | None]]


def weighted_tucker(
    blocks: Sequence[Tensor],
    start: Tucker,
    rows: Tensor | None,
    columns: Columns,
    *,
    sweeps: int = 30,
    tolerance: float = 1e-4,
    steps: int = 10,
    watch: Watch | None = None,
) -> Tucker:
    """Lower the mean relative squared error of the outputs of all matrices, from a decomposition of the weights.

    Args:
        blocks: (n, h, I, J) each.
        rows: Gram matrix of the inputs of all matrices whose inputs run along I, (I, I), positive definite.
        columns: for each matrix of each block the Gram matrix of its inputs along (h J), (h J, h J), positive definite;
            None: its inputs run along I.
        sweeps: at most; each solves for U1 exactly, and takes steps for the other factors.
        steps: of conjugate gradients for each core, for U2 and for each U3.

    Returns:
        Orthonormal factors; `history` (the start first) and `errors` (of each matrix) are errors of outputs.
    """
    problem = _Problem(blocks, rows, columns)
    spectrum = None if rows is None else torch.linalg.eigh(rows.double())
    decomposition = start
    history = [_mean(problem.errors(start))]
    for sweep in range(sweeps):
        new = replace(decomposition, u1=problem.solve(decomposition, spectrum))
        reduced = problem.reduced(new.u1)
        for part in (*(("cores", i) for i in range(len(blocks))), ("u2", 0), *(("u3", i) for i in range(len(blocks)))):
            new = _descend(reduced, new, part, steps)
        error = float(reduced.loss(new).clamp_min(0).sqrt())
        if watch is not None:
            watch(sweep + 1, sweeps)
        if error > history[-1]:  # by rounding, at the minimum
            break
        decomposition = new
        history.append(error)
        if history[-2] - error < tolerance:
            break
    decomposition = orthonormal(decomposition)
    return replace(decomposition, history=history, errors=problem.errors(decomposition))


def output_errors(
    blocks: Sequence[Tensor], decomposition: Tucker, rows: Tensor | None, columns: Columns
) -> list[Tensor]:
    """The relative error of the outputs of each matrix; `blocks`, `rows` and `columns` as in `weighted_tucker`."""
    return _Problem(blocks, rows, columns).errors(decomposition)


def weight_errors(blocks: Sequence[Tensor], decomposition: Tucker) -> tuple[float, list[Tensor]]:
    """The relative error of the tensor, and of each matrix of the blocks (n, h, I, J), in the Frobenius norm."""
    lost, square = [], []
    for block, dense in zip(blocks, decomposition.dense(), strict=True):
        lost.append((block.double() - dense).square().sum((1, 2, 3)))
        square.append(block.double().square().sum((1, 2, 3)))
    errors = [(a / b.clamp_min(TINY)).sqrt() for a, b in zip(lost, square, strict=True)]
    total = sum(float(a.sum()) for a in lost) / max(sum(float(b.sum()) for b in square), TINY)
    return total**0.5, errors


def orthonormal(decomposition: Tucker) -> Tucker:
    """The same tensor with orthonormal columns in U1, U2 and U3: their triangular factors move into the cores."""
    (u1, r1), (u2, r2) = torch.linalg.qr(decomposition.u1), torch.linalg.qr(decomposition.u2)
    u3: list[Tensor | None] = []
    cores = []
    for factor, core in zip(decomposition.u3, decomposition.cores, strict=True):
        moved = r1 @ core @ r2.T
        if factor is None:
            u3.append(None)
        else:
            basis, r3 = torch.linalg.qr(factor)
            u3.append(basis)
            moved = torch.tensordot(r3, moved, 1)
        cores.append(moved)
    return replace(decomposition, u1=u1, u2=u2, u3=u3, cores=cores)


@dataclass(frozen=True)
class _Matrix:
    """One matrix of a block: weight (I, h J), its product with the metric, the metric of the columns, tr(W C W.T).

    The last is infinite instead of 0: a matrix whose outputs are zero has no weight in the loss, and no error.
    """

    block: int
    m: int
    weight: Tensor
    product: Tensor
    columns: Tensor | None
    square: float

    def wide(self, decomposition: Tucker) -> Tensor:
        """The other factor of U1, (R1, h J)."""
        core, factor = decomposition.cores[self.block], decomposition.u3[self.block]
        mixed = core[self.m] if factor is None else torch.tensordot(factor[self.m], core, 1)
        return (mixed @ decomposition.u2.T).transpose(0, 1).flatten(1)


class _Problem:
    """Matrices and metrics."""

    def __init__(self, blocks: Sequence[Tensor], rows: Tensor | None, columns: Columns) -> None:
        self.rows = None if rows is None else rows.double()
        self.matrices = []
        for b, (block, metrics) in enumerate(zip(blocks, columns, strict=True)):
            for m, (part, metric) in enumerate(zip(block, metrics, strict=True)):
                weight = part.double().transpose(0, 1).flatten(1)
                if metric is not None:
                    product = weight @ metric.double()
                elif self.rows is not None:
                    product = self.rows @ weight
                else:
                    raise ValueError("rows: expected a Gram matrix for the matrices whose inputs run along I")
                square = float((weight * product).sum())
                square = math.inf if square <= TINY else square
                metric = None if metric is None else metric.double()
                self.matrices.append(_Matrix(b, m, weight, product, metric, square))

    def errors(self, decomposition: Tucker) -> list[Tensor]:
        """Relative errors of outputs, without cancellation."""
        errors: list[list[Tensor]] = [[] for _ in decomposition.cores]
        for matrix in self.matrices:
            wide = matrix.wide(decomposition)
            if matrix.columns is None:
                assert self.rows is not None
                weighted = matrix.product - (self.rows @ decomposition.u1) @ wide
            else:
                weighted = matrix.product - decomposition.u1 @ (wide @ matrix.columns)
            lost = ((matrix.weight - decomposition.u1 @ wide) * weighted).sum()
            errors[matrix.block].append((lost.clamp_min(0) / matrix.square).sqrt())
        return [torch.stack(of_block) for of_block in errors]

    def solve(self, decomposition: Tucker, spectrum: tuple[Tensor, Tensor] | None) -> Tensor:
        """The best U1 for fixed other factors: rows U1 A + U1 B = Q, with A and B diagonalised jointly."""
        rank, size = decomposition.u1.shape[1], decomposition.u1.shape[0]
        zero = decomposition.u1.new_zeros(rank, rank)
        a, b, q = zero, zero, decomposition.u1.new_zeros(size, rank)
        for matrix in self.matrices:
            wide = matrix.wide(decomposition)
            if matrix.columns is None:
                a = a + wide @ wide.T / matrix.square
            else:
                b = b + wide @ matrix.columns @ wide.T / matrix.square
            q = q + matrix.product @ wide.T / matrix.square
        scale = torch.zeros_like(q[:, :1]) if spectrum is None else spectrum[0].clamp_min(0)[:, None]
        a, top = a * scale.mean(), scale.mean().clamp_min(TINY)  # both of one size
        both = a + b
        both = both + torch.eye(rank).to(both) * both.diagonal().mean().clamp_min(TINY) * 1e-12
        values, vectors = torch.linalg.eigh(both)
        root = vectors / values.clamp_min(TINY).sqrt()  # root.T both root = I
        share, z = torch.linalg.eigh(root.T @ a @ root)
        share = share.clamp(0, 1)
        root = root @ z
        q = q if spectrum is None else spectrum[1].T @ q
        y = (q @ root) / (scale / top * share + 1 - share).clamp_min(1e-12)
        u1 = y @ root.T
        return u1 if spectrum is None else spectrum[1] @ u1

    def reduced(self, u1: Tensor) -> _Reduced:
        """The problem of the other factors at a fixed U1."""
        gram = u1.T @ u1 if self.rows is None else u1.T @ self.rows @ u1
        return _Reduced(self.matrices, gram, u1.T @ u1, [u1.T @ matrix.product for matrix in self.matrices])


@dataclass(frozen=True)
class _Reduced:
    """U1.T C U1 for inputs along I, U1.T U1, and U1.T times the product of each matrix."""

    matrices: list[_Matrix]
    rows: Tensor
    plain: Tensor
    products: list[Tensor]

    def loss(self, decomposition: Tucker) -> Tensor:
        """The mean relative squared error of the outputs."""
        total = self.plain.new_zeros(())
        for matrix, product in zip(self.matrices, self.products, strict=True):
            wide = matrix.wide(decomposition)
            weighted = self.rows @ wide if matrix.columns is None else self.plain @ (wide @ matrix.columns)
            total = total + math.isfinite(matrix.square) + (wide * (weighted - 2 * product)).sum() / matrix.square
        return total / len(self.matrices)

    def curvature(self) -> _Reduced:
        """The problem without linear terms: the gradient of its loss is the second derivative times the factor."""
        return replace(self, products=[torch.zeros_like(product) for product in self.products])


def _descend(reduced: _Reduced, decomposition: Tucker, part: tuple[str, int], steps: int) -> Tucker:
    """Conjugate gradients for one factor; the loss is quadratic in it, and does not rise."""
    x = _part(decomposition, part)
    if x is None:
        return decomposition

    def gradient(problem: _Reduced, at: Tensor) -> Tensor:
        with torch.enable_grad():
            at = at.detach().requires_grad_()
            return torch.autograd.grad(problem.loss(_with(decomposition, part, at)), at)[0]

    curvature = reduced.curvature()  # a difference of two gradients would lose digits for a small direction
    residual = -gradient(reduced, x)
    direction, square = residual, residual.square().sum()
    least = square * 1e-20
    for _ in range(steps):
        curved = gradient(curvature, direction)
        bend = (direction * curved).sum()
        if square <= least or bend <= 0:
            break
        step = square / bend
        x, residual = x + step * direction, residual - step * curved
        now = residual.square().sum()
        direction, square = residual + now / square * direction, now
    return _with(decomposition, part, x.detach())


def _part(decomposition: Tucker, part: tuple[str, int]) -> Tensor | None:
    """A factor by its name and the number of its block."""
    name, i = part
    if name == "u2":
        return decomposition.u2
    return decomposition.cores[i] if name == "cores" else decomposition.u3[i]


def _with(decomposition: Tucker, part: tuple[str, int], value: Tensor) -> Tucker:
    """The decomposition with another factor."""
    name, i = part
    if name == "u2":
        return replace(decomposition, u2=value)
    factors: list[Any] = list(getattr(decomposition, name))
    factors[i] = value
    return replace(decomposition, u3=factors) if name == "u3" else replace(decomposition, cores=factors)


def _mean(errors: Sequence[Tensor]) -> float:
    return float(torch.cat(list(errors)).square().mean().sqrt())
