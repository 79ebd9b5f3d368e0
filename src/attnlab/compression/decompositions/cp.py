"""Canonical polyadic decomposition: alternating least squares, and the error-preserving correction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .slices import TINY, Slices
from .svd import global_svd

Factors = tuple[Tensor, Tensor, Tensor]
Watch = Callable[[int, int], None]  # sweeps done, sweeps at most
ROUNDING = 1e-7  # relative errors below this are rounding: they come from a difference of squares


@dataclass(frozen=True)
class CP:
    """Y ~ sum_r a_r o b_r o c_r.

    Args:
        a, b, c: (I, R), (J, R), (H, R).
        history: relative errors, one of each sweep, the start first.
        costs: of the correction's objective, in the same order; empty after plain least squares.
    """

    a: Tensor
    b: Tensor
    c: Tensor
    history: list[float]
    costs: list[float]

    @property
    def factors(self) -> Factors:
        return self.a, self.b, self.c

    @property
    def rank(self) -> int:
        return self.a.shape[-1]

    @property
    def error(self) -> float:
        return self.history[-1]


def cp_als(
    tensor: Slices,
    rank: int,
    *,
    start: Literal["svd", "random"] | Factors = "svd",
    sweeps: int = 200,
    tolerance: float = 1e-5,
    seed: int = 0,
    watch: Watch | None = None,
) -> CP:
    """Alternating least squares. The error never rises; the result depends on the start.

    Args:
        start: "svd": the largest singular triplets over all heads, a CP decomposition with a fusion of 0 and 1, so
            that the result is never worse than `global_svd`; "random", from `seed`; or factors.
        tolerance: a sweep that lowers the relative error by less than this times the error is the last one.

    Raises:
        ValueError: a rank below 1, or with start="svd" a rank below H or above H D.
    """
    if rank < 1:
        raise ValueError(f"rank {rank}: expected at least 1")
    factors = _start(tensor, rank, start, seed)
    square = tensor.square()
    history = [float(tensor.error(*factors))]
    for sweep in range(sweeps):
        if history[-1] <= ROUNDING:
            break
        new = factors
        for mode in range(3):
            new = _replaced(new, mode, _least_squares(tensor, new, mode))
        error = float(_error(tensor, square, new))
        if watch:
            watch(sweep + 1, sweeps)
        if error > history[-1]:
            break
        factors = balance(*new)
        history.append(error)
        if history[-2] - error <= tolerance * error:
            break
    history[-1] = float(tensor.error(*factors))
    return CP(*factors, history, [])


def cp_epc(
    tensor: Slices,
    start: CP,
    *,
    objective: Literal["norm", "sensitivity"] = "norm",
    bound: float | None = None,
    slack: float = 1.02,
    sweeps: int = 100,
    tolerance: float = 1e-4,
    watch: Watch | None = None,
) -> CP:
    """Error-preserving correction (Phan et al. 2020): the least `cost` with the relative error within `bound`.

    One factor at a time, with G its MTTKRP, Gamma the Hadamard product of the other Grams and w the weights of its
    columns in the cost:

        X = G (Gamma + mu diag w)^-1,   the largest mu >= 0 within the bound,

    by bisection, because the error grows with mu; where mu = 0 exceeds the bound, by a step of plain least squares. A
    start within the bound never ends with a higher cost.

    Args:
        bound: of the relative error; None: `slack` times that of `start`.
        tolerance: a sweep that changes the cost by less than this times the cost is the last one.
    """
    square = tensor.square()
    factors = rescale(start.factors, tensor.sizes, objective)
    limit = slack * start.error if bound is None else bound
    delta2 = limit**2 * square
    history, costs = [float(tensor.error(*factors))], [float(cost(factors, tensor.sizes, objective))]
    for sweep in range(sweeps if limit > ROUNDING and square > 0 else 0):
        new = factors
        for mode in range(3):
            new = _replaced(new, mode, _corrected(tensor, new, mode, objective, square, delta2))
        new = rescale(new, tensor.sizes, objective)
        error, price = float(_error(tensor, square, new)), float(cost(new, tensor.sizes, objective))
        if watch:
            watch(sweep + 1, sweeps)
        most = limit * (1 + 1e-9)
        better = error <= most and price <= costs[-1] if history[-1] <= most else error <= history[-1]
        if not better:
            break
        factors = new
        history.append(error)
        costs.append(price)
        if abs(costs[-2] - price) <= tolerance * price:
            break
    history[-1] = float(tensor.error(*factors))
    return CP(*factors, history, costs)


def cost(factors: Factors, sizes: tuple[int, int, int], objective: Literal["norm", "sensitivity"]) -> Tensor:
    """norm: sum_r |a_r|^2 |b_r|^2 |c_r|^2. sensitivity: I sum |b|^2 |c|^2 + J sum |a|^2 |c|^2 + H sum |a|^2 |b|^2.

    `factors` (I, R), (J, R) and (H, R), float64; `sizes` I, J, H.
    """
    a, b, c = (factor.square().sum(-2) for factor in factors)
    if objective == "norm":
        return (a * b * c).sum(-1)
    i, j, h = sizes
    return (i * b * c + j * a * c + h * a * b).sum(-1)


def rescale(factors: Factors, sizes: tuple[int, int, int], objective: Literal["norm", "sensitivity"]) -> Factors:
    """The scaling of each term's three columns with the least cost: equal norms, or norms^2 in proportion to sizes.

    `factors` and `sizes` as in :func:`cost`.
    """
    weights = (1.0, 1.0, 1.0) if objective == "norm" else tuple(float(size) for size in sizes)
    return balance(*factors, weights=weights)


def balance(a: Tensor, b: Tensor, c: Tensor, weights: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Factors:
    """The same terms, a (I, R), b (J, R) and c (H, R), with |a_r|^2 : |b_r|^2 : |c_r|^2 as `weights`."""
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
        noise = (torch.randn(size, rank, generator=generator, dtype=torch.float64) for size in tensor.sizes)
        a, b, c = (x / x.norm(dim=0) for x in (part.to(tensor.left) for part in noise))
        return balance(a * (tensor.square() / rank).sqrt(), b, c)
    return balance(*global_svd(tensor, rank).columns())


def _replaced(factors: Factors, mode: int, new: Tensor) -> Factors:
    a, b, c = factors
    return [(new, b, c), (a, new, c), (a, b, new)][mode]


def _gram(factors: Factors, mode: int) -> Tensor:
    """The Hadamard product of the Grams of the two factors beside `mode`."""
    first, second = (factor for i, factor in enumerate(factors) if i != mode)
    return (first.mT @ first) * (second.mT @ second)


def _least_squares(tensor: Slices, factors: Factors, mode: int) -> Tensor:
    """The least-squares step from the current factor: directions in the null space of the Gram do not change."""
    values, vectors = torch.linalg.eigh(_gram(factors, mode))
    inverse = torch.where(values > 1e-12 * values[-1], 1 / values.clamp_min(TINY), 0.0)
    residual = tensor.mttkrp(mode, *factors) - factors[mode] @ _gram(factors, mode)
    return factors[mode] + (residual @ vectors) * inverse @ vectors.mT


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
    values, vectors = torch.linalg.eigh(scale[:, None] * _gram(factors, mode) * scale)
    values = values.clamp_min(0)
    product = (tensor.mttkrp(mode, *factors) * scale) @ vectors
    energy = product.square().sum(-2)

    def error2(mu: Tensor) -> Tensor:
        return square - (energy * (values + 2 * mu) / (values + mu).square().clamp_min(TINY)).sum()

    top = values[-1].clamp_min(TINY)
    low, high = torch.full_like(top, -16.0), torch.full_like(top, 16.0)  # powers of ten, of the largest eigenvalue
    for _ in range(60):
        middle = (low + high) / 2
        within = error2(top * 10**middle) <= delta2
        low, high = torch.where(within, middle, low), torch.where(within, high, middle)
    mu = top * 10**low
    if error2(mu) <= delta2:
        return (product / (values + mu)) @ vectors.mT * scale
    return _least_squares(tensor, factors, mode)


def _error(tensor: Slices, square: Tensor, factors: Factors) -> Tensor:
    """The relative error from inner products: cheap, exact to about ROUNDING."""
    inner = (tensor.mttkrp(2, *factors) * factors[2]).sum()
    norm = (_gram(factors, 2) * (factors[2].mT @ factors[2])).sum()
    return ((square - 2 * inner + norm).clamp_min(0) / square.clamp_min(TINY)).sqrt()
