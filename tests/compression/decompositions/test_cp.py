import numpy
import pytest
import tensorly
import torch
from tensorly.decomposition import parafac

from attnlab.compression.decompositions.cp import CP, cost, cp_als, cp_epc, rescale
from attnlab.compression.decompositions.slices import Slices
from attnlab.compression.decompositions.svd import global_svd
from tests.compression.decompositions.planted import RANKS, falls, planted, products

TOTAL = sum(RANKS)


@pytest.mark.parametrize("sweeps", [1, 4])
def test_sweeps_are_those_of_tensorly(sweeps: int) -> None:
    tensor = Slices.of(torch.randn(6, 5, 4, dtype=torch.float64))
    start = tuple(torch.randn(size, 3, dtype=torch.float64) for size in tensor.sizes)
    result = cp_als(tensor, 3, start=start, sweeps=sweeps, tolerance=0)  # type: ignore[arg-type]
    with tensorly.backend_context("numpy"):
        init = (numpy.ones(3), [factor.numpy() for factor in start])
        reference = parafac(tensor.dense().numpy(), 3, n_iter_max=sweeps, init=init, tol=0)
        want = torch.from_numpy(tensorly.cp_to_tensor(reference))
    result_factor = torch.einsum("ir,jr,hr->ijh", *result.factors)
    torch.testing.assert_close(result_factor, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("mixing", "noise", "error"),
    [
        (0.15, 0.001, 0.0008),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 0.001, 0.0008), (0.15, 0.1, 0.076))),
    ],
)
def test_planted_terms_are_found(mixing: float, noise: float, error: float) -> None:
    tensor = planted(mixing, noise)
    result = cp_als(tensor, TOTAL, sweeps=1500, tolerance=1e-6)
    assert result.error == pytest.approx(error, rel=0.06)
    assert result.error <= global_svd(tensor, TOTAL).error
    assert falls(result.history)
    corrected = cp_epc(tensor, result)
    assert result.error < corrected.error <= 1.02 * result.error * (1 + 1e-9)


@pytest.mark.parametrize("objective", ["norm", "sensitivity"])
@pytest.mark.parametrize("slack", [1.0, 1.5])
def test_the_correction_never_costs_more(objective: str, slack: float) -> None:
    tensor = planted(0.15, 0.1, 1)
    plain = cp_als(tensor, TOTAL, sweeps=60)
    result = cp_epc(tensor, plain, objective=objective, slack=slack, sweeps=20)  # type: ignore[arg-type]
    before = cost(rescale(plain.factors, tensor.sizes, objective), tensor.sizes, objective)  # type: ignore[arg-type]
    assert falls(result.costs)
    assert result.costs[-1] <= before
    assert result.error <= slack * plain.error * (1 + 1e-9)
    if slack > 1:
        assert result.costs[-1] < 0.9 * before
    # the number in `costs` is that of the factors
    assert float(cost(result.factors, tensor.sizes, objective)) == pytest.approx(result.costs[-1])  # type: ignore[arg-type]


def test_the_published_formulas_of_cost() -> None:
    a, b, c = (torch.randn(size, 3, dtype=torch.float64) for size in (5, 4, 2))
    norm = sensitivity = 0.0
    for r in range(3):
        x, y, z = (float(f[:, r].square().sum()) for f in (a, b, c))
        norm += x * y * z
        sensitivity += 5 * y * z + 4 * x * z + 2 * x * y
    assert float(cost((a, b, c), (5, 4, 2), "norm")) == pytest.approx(norm)
    assert float(cost((a, b, c), (5, 4, 2), "sensitivity")) == pytest.approx(sensitivity)
    best = rescale((a, b, c), (5, 4, 2), "sensitivity")
    torch.testing.assert_close(torch.einsum("ir,jr,hr->ijh", *best), torch.einsum("ir,jr,hr->ijh", a, b, c))
    least = cost(best, (5, 4, 2), "sensitivity")
    for x, y in ((1.1, 1.0), (1.0, 0.9), (1.2, 0.8)):
        assert cost((best[0] * x, best[1] * y, best[2] / x / y), (5, 4, 2), "sensitivity") > least


def border(size: int = 4) -> tuple[Slices, CP]:
    """A tensor of rank 3 that terms of rank 2 approach without limit, growing against each other: its border rank."""
    x, y = torch.eye(size, dtype=torch.float64)[:2]

    def outer(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.einsum("i,j,h->ijh", a, b, c)

    tensor = Slices.of(outer(x, x, y) + outer(x, y, x) + outer(y, x, x))
    return tensor, cp_als(tensor, 2, start="random", seed=3, sweeps=4000, tolerance=1e-6)


def test_the_last_factor_of_a_correction_is_the_best_within_the_bound() -> None:
    """By Lagrange: the gradients of cost and error, by the factor, are proportional; the bound is met."""
    tensor = planted(0.15, 0.1, 1)
    plain = cp_als(tensor, TOTAL, sweeps=60)
    result = cp_epc(tensor, plain, objective="norm", slack=1.5, sweeps=3)
    a, b, c = (factor.requires_grad_() for factor in result.factors)
    norms = a.square().sum(0) * b.square().sum(0) * c.square().sum(0)
    error = (tensor.dense() - torch.einsum("ir,jr,hr->ijh", a, b, c)).square().sum()
    of_cost, of_error = (torch.autograd.grad(value, c, retain_graph=True)[0] for value in (norms.sum(), error))
    ratio = of_error / of_cost
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-4, atol=0)
    assert float(ratio.mean()) < 0 and result.error == pytest.approx(1.5 * plain.error, rel=1e-6)


@pytest.mark.slow
def test_terms_that_grow_against_each_other_are_tamed_by_a_wider_bound() -> None:
    tensor, plain = border()
    assert plain.error < 0.02
    before = float(cost(plain.factors, tensor.sizes, "norm"))
    same = cp_epc(tensor, plain, slack=1.0)
    wider = cp_epc(tensor, plain, bound=0.05, sweeps=300, tolerance=1e-6)
    assert same.costs[-1] > 0.9 * before
    assert wider.costs[-1] < 0.5 * before
    assert wider.error <= 0.05 * (1 + 1e-9)


@pytest.mark.slow
def test_a_bound_below_the_error_is_approached_by_least_squares() -> None:
    tensor = planted(0.15, 0.001)
    rough = cp_als(tensor, TOTAL, sweeps=3)
    result = cp_epc(tensor, rough, bound=rough.error / 2, sweeps=200, tolerance=0)
    assert result.error <= rough.error / 2 * (1 + 1e-9)


def test_ranks_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        cp_als(products(), 0)
    with pytest.raises(ValueError, match=r"expected 3 \(one"):
        cp_als(products(), 2)
