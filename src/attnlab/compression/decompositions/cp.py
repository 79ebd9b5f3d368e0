"""Canonical polyadic decomposition: alternating least squares, and the error-preserving correction.

Batched: the tensors of a batch go through the same sweeps; one that has converged does not change any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .slices import TINY, Slices
from .svd import global_ranks, spectrum, truncated_svd

Factors = tuple[Tensor, Tensor, Tensor]
Watch = Callable[[int, int], None]  # sweeps done, sweeps at most
ROUNDING = 1e-7  # relative errors below this are rounding: they come from a difference of squares


@dataclass(frozen=True)
class CP:
    """Y ~ sum_r a_r o b_r o c_r.

    Args:
        a: (..., I, R).
        b: (..., J, R).
        c: (..., H, R).
        history: relative errors, (sweeps + 1, ...), the start first.
        costs: of the correction's objective, (sweeps + 1, ...); empty after plain least squares.
    """

    a: Tensor
    b: Tensor
    c: Tensor
    history: Tensor
    costs: Tensor

    @property
    def factors(self) -> Factors:
        return self.a, self.b, self.c

    @property
    def rank(self) -> int:
        return self.a.shape[-1]

    @property
    def error(self) -> Tensor:
        return self.history[-1]

    def __getitem__(self, i: int) -> CP:
        costs = self.costs[:, i] if len(self.costs) else self.costs
        return CP(self.a[i], self.b[i], self.c[i], self.history[:, i], costs)


def cp_als(
    tensor: Slices,
    rank: int,
    *,
    start: Literal["svd", "random"] | Factors = "svd",
    sweeps: int = 200,
    tolerance: float = 1e-5,
    starts: int = 1,
    seed: int = 0,
    watch: Watch | None = None,
) -> CP:
    """Alternating least squares. The error never rises; where it ends depends on the start.

    Args:
        tensor: what is decomposed; leading dimensions are a batch.
        rank: R, the number of columns.
        start: "svd": the largest singular triplets over all heads, a CP decomposition with a fusion of 0 and 1, so
            that the result is never worse than `global_svd`; "random"; or factors.
        sweeps: at most.
        tolerance: a sweep that lowers the relative error by less than this times the error is the last one.
        starts: the first begins at `start`, the others at random with the seeds that follow; of each tensor of the
            batch the result with the lowest error is returned.
        watch: called after each sweep with the number of sweeps done and of sweeps at most, over all starts.

    Raises:
        ValueError: a rank or a number of starts below 1, or with start="svd" a rank below H or above H D.
    """
    if rank < 1 or starts < 1:
        raise ValueError(f"rank {rank}, {starts} starts: expected at least 1")
    best: CP | None = None
    for i in range(starts):
        factors = _start(tensor, rank, start if i == 0 else "random", seed + i)

        def counted(done: int, most: int, before: int = i) -> None:
            if watch:
                watch(before * most + done, starts * most)

        candidate = _als(tensor, factors, sweeps, tolerance, counted)
        best = candidate if best is None else _better(best, candidate)
    assert best is not None
    return best


def _als(tensor: Slices, factors: Factors, sweeps: int, tolerance: float, watch: Watch) -> CP:
    """From one start."""
    square, active = tensor.square(), torch.ones(tensor.batch, dtype=torch.bool, device=tensor.left.device)
    history = [tensor.error(*factors)]
    for sweep in range(sweeps):
        active = active & (history[-1] > ROUNDING)
        if not active.any():
            break
        new = factors
        for mode in range(3):
            new = _replaced(new, mode, _least_squares(tensor, new, mode))
        error = _error(tensor, square, new)
        better = active & (error <= history[-1])
        factors = _where(better, balance(*new), factors)
        history.append(torch.where(better, error, history[-1]))
        active = better & (history[-2] - history[-1] > tolerance * history[-1])
        watch(sweep + 1, sweeps)
    history[-1] = tensor.error(*factors)
    return CP(*factors, torch.stack(history), torch.empty(0))


def _better(first: CP, second: CP) -> CP:
    """Of each tensor of the batch the decomposition with the lower error, `first` of equal ones."""
    longest = max(len(first.history), len(second.history))
    histories = [torch.cat([cp.history, cp.history[-1:].expand(longest - len(cp.history), *cp.history.shape[1:])])
                 for cp in (first, second)]  # fmt: skip
    choose = second.error < first.error
    return CP(
        *_where(choose, second.factors, first.factors), torch.where(choose, histories[1], histories[0]), first.costs
    )


def cp_epc(
    tensor: Slices,
    start: CP,
    *,
    objective: Literal["norm", "sensitivity"] = "norm",
    bound: float | Tensor | None = None,
    slack: float = 1.02,
    sweeps: int = 100,
    tolerance: float = 1e-4,
    watch: Watch | None = None,
) -> CP:
    """Error-preserving correction (Phan et al. 2020): the least `cost` with the relative error within `bound`.

    One factor at a time, with G its MTTKRP, Gamma the Hadamard product of the other Grams and w the weights of its
    columns in the cost:

        X = G (Gamma + mu diag w)^-1,   the largest mu >= 0 that keeps the bound,

    found by bisection, because the error grows with mu. Where even mu = 0 misses the bound, a step of plain least
    squares. A start within the bound never ends with a higher cost.

    Args:
        tensor: what is decomposed.
        start: a decomposition of it.
        bound: of the relative error, a number or one for each tensor of the batch; None: `slack` times that of
            `start`.
        slack: see `bound`.
        sweeps: at most.
        tolerance: a sweep that changes the cost by less than this times the cost is the last one.
        watch: called after each sweep with the number of sweeps done and of sweeps at most.
    """
    square = tensor.square()
    factors = rescale(start.factors, tensor.sizes, objective)
    limit = torch.as_tensor(slack * start.error if bound is None else bound, dtype=torch.float64)
    limit = limit.to(square.device).expand(tensor.batch)
    delta2 = limit.square() * square
    active = (square > 0) & (limit > ROUNDING)
    history, costs = [tensor.error(*factors)], [cost(factors, tensor.sizes, objective)]
    for sweep in range(sweeps):
        if not active.any():
            break
        new = factors
        for mode in range(3):
            new = _replaced(new, mode, _corrected(tensor, new, mode, objective, square, delta2))
        new = rescale(new, tensor.sizes, objective)
        error, price = _error(tensor, square, new), cost(new, tensor.sizes, objective)
        feasible = history[-1] <= limit * (1 + 1e-9)
        within = error <= limit * (1 + 1e-9)
        better = active & torch.where(feasible, within & (price <= costs[-1]), error <= history[-1])
        factors = _where(better, new, factors)
        history.append(torch.where(better, error, history[-1]))
        costs.append(torch.where(better, price, costs[-1]))
        moving = (costs[-2] - costs[-1]).abs() > tolerance * costs[-1]
        active = better & moving
        if watch:
            watch(sweep + 1, sweeps)
    history[-1] = tensor.error(*factors)
    return CP(*factors, torch.stack(history), torch.stack(costs))


def cost(factors: Factors, sizes: tuple[int, int, int], objective: Literal["norm", "sensitivity"]) -> Tensor:
    """norm: sum_r |a_r|^2 |b_r|^2 |c_r|^2. sensitivity: I sum |b|^2 |c|^2 + J sum |a|^2 |c|^2 + H sum |a|^2 |b|^2.

    Args:
        factors: (..., I, R), (..., J, R) and (..., H, R), float64.
        sizes: I, J, H.
    """
    a, b, c = (factor.square().sum(-2) for factor in factors)
    if objective == "norm":
        return (a * b * c).sum(-1)
    i, j, h = sizes
    return (i * b * c + j * a * c + h * a * b).sum(-1)


def rescale(factors: Factors, sizes: tuple[int, int, int], objective: Literal["norm", "sensitivity"]) -> Factors:
    """The scaling of each term's three columns with the least cost: equal norms, or norms^2 in proportion to sizes.

    Args:
        factors: (..., I, R), (..., J, R) and (..., H, R), float64.
        sizes: I, J, H.
    """
    weights = (1.0, 1.0, 1.0) if objective == "norm" else tuple(float(size) for size in sizes)
    return balance(*factors, weights=weights)


def balance(a: Tensor, b: Tensor, c: Tensor, weights: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Factors:
    """The same terms, with |a_r|^2 : |b_r|^2 : |c_r|^2 as `weights`.

    Args:
        a: (..., I, R).
        b: (..., J, R).
        c: (..., H, R).
        weights: the proportion, of a, b and c.
    """
    norms = [factor.norm(dim=-2, keepdim=True) for factor in (a, b, c)]
    product = norms[0] * norms[1] * norms[2]
    mean = (product / (weights[0] * weights[1] * weights[2]) ** 0.5) ** (1 / 3)
    scaled = [f / n.clamp_min(TINY) * mean * w**0.5 for f, n, w in zip((a, b, c), norms, weights, strict=True)]
    return scaled[0], scaled[1], scaled[2]


def _start(tensor: Slices, rank: int, start: Literal["svd", "random"] | Factors, seed: int) -> Factors:
    if not isinstance(start, str):
        return start[0].double(), start[1].double(), start[2].double()
    if start == "random":
        generator = torch.Generator().manual_seed(seed)
        shapes = [(*tensor.batch, size, rank) for size in tensor.sizes]
        a, b, c = (torch.randn(shape, generator=generator, dtype=torch.float64).to(tensor.left) for shape in shapes)
        a, b, c = (x / x.norm(dim=-2, keepdim=True) for x in (a, b, c))
        return balance(a * (tensor.square() / rank).sqrt()[..., None, None], b, c)
    svd = spectrum(tensor)
    if not tensor.batch:
        return balance(*truncated_svd(svd, global_ranks(svd.values, rank)).columns())
    columns = [truncated_svd(svd[i], global_ranks(svd.values[i], rank)).columns() for i in range(tensor.batch[0])]
    a, b, c = (torch.stack(parts) for parts in zip(*columns, strict=True))
    return balance(a, b, c)


def _replaced(factors: Factors, mode: int, new: Tensor) -> Factors:
    a, b, c = factors
    return [(new, b, c), (a, new, c), (a, b, new)][mode]


def _where(condition: Tensor, new: Factors, old: Factors) -> Factors:
    a, b, c = (torch.where(condition[..., None, None], x, y) for x, y in zip(new, old, strict=True))
    return a, b, c


def _gram(factors: Factors, mode: int) -> Tensor:
    """The Hadamard product of the Grams of the two factors beside `mode`."""
    first, second = (factor for i, factor in enumerate(factors) if i != mode)
    return (first.mT @ first) * (second.mT @ second)


def _least_squares(tensor: Slices, factors: Factors, mode: int) -> Tensor:
    """The least-squares step from where the factor is: directions in the null space of the Gram do not change."""
    values, vectors = torch.linalg.eigh(_gram(factors, mode))
    inverse = torch.where(values > 1e-12 * values[..., -1:], 1 / values.clamp_min(TINY), 0.0)
    residual = tensor.mttkrp(mode, *factors) - factors[mode] @ _gram(factors, mode)
    return factors[mode] + (residual @ vectors) * inverse[..., None, :] @ vectors.mT


def _corrected(
    tensor: Slices,
    factors: Factors,
    mode: int,
    objective: Literal["norm", "sensitivity"],
    square: Tensor,
    delta2: Tensor,
) -> Tensor:
    first, second = ((i, f.square().sum(-2)) for i, f in enumerate(factors) if i != mode)
    if objective == "norm":
        weights = first[1] * second[1]
    else:
        sizes = tensor.sizes
        weights = sizes[first[0]] * second[1] + sizes[second[0]] * first[1]
    scale = weights.clamp_min(TINY).rsqrt()
    values, vectors = torch.linalg.eigh(scale[..., :, None] * _gram(factors, mode) * scale[..., None, :])
    values = values.clamp_min(0)
    product = (tensor.mttkrp(mode, *factors) * scale[..., None, :]) @ vectors
    energy = product.square().sum(-2)

    def error2(mu: Tensor) -> Tensor:
        mu = mu[..., None]
        return square - (energy * (values + 2 * mu) / (values + mu).square().clamp_min(TINY)).sum(-1)

    top = values[..., -1].clamp_min(TINY)
    low, high = torch.full_like(top, -16.0), torch.full_like(top, 16.0)  # powers of ten, of the largest eigenvalue
    for _ in range(60):
        middle = (low + high) / 2
        within = error2(top * 10**middle) <= delta2
        low, high = torch.where(within, middle, low), torch.where(within, high, middle)
    mu = top * 10**low
    ridge = (product / (values + mu[..., None])[..., None, :]) @ vectors.mT * scale[..., None, :]
    return torch.where((error2(mu) <= delta2)[..., None, None], ridge, _least_squares(tensor, factors, mode))


def _error(tensor: Slices, square: Tensor, factors: Factors) -> Tensor:
    """The relative error from inner products: cheap, exact to about ROUNDING."""
    inner = (tensor.mttkrp(2, *factors) * factors[2]).sum((-2, -1))
    norm = (_gram(factors, 2) * (factors[2].mT @ factors[2])).sum((-2, -1))
    return ((square - 2 * inner + norm).clamp_min(0) / square.clamp_min(TINY)).sqrt()
