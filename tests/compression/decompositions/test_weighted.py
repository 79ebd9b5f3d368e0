"""Decompositions that approximate outputs: closed forms of single matrices, promises of sweeps of several."""

import pytest
import torch
from torch import Tensor

from attnlab.compression.decompositions.tucker import Tucker, tucker
from attnlab.compression.decompositions.weighted import orthonormal, output_errors, weight_errors, weighted_tucker
from tests.compression.decompositions.planted import assert_orthonormal, falls, svd_error
from tests.compression.decompositions.test_tucker import normal

D, H, WIDTH = 24, 3, 8


def gram(width: int, seed: int) -> Tensor:
    """The Gram matrix of inputs whose directions differ in size by a factor of 30."""
    basis = torch.linalg.qr(normal(width, width, seed=seed))[0]
    return basis @ torch.diag(torch.logspace(0, -3, width, dtype=torch.float64)) @ basis.T


def root(metric: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(metric)
    return vectors * values.sqrt() @ vectors.T


def test_one_matrix_whose_inputs_run_along_the_first_mode() -> None:
    """With whole heads the optimum is the truncated SVD of the whitened matrix."""
    block, rows = normal(1, H, D, WIDTH), gram(D, 1)
    start = tucker([block], (7, WIDTH))
    result = weighted_tucker([block], start, rows, [[None]], tolerance=0, sweeps=60)
    best = svd_error(root(rows) @ block[0].transpose(0, 1).flatten(1), 7)
    assert result.error == pytest.approx(best, rel=1e-6)
    assert result.history[0] > 1.2 * best


def test_one_matrix_whose_inputs_run_along_the_heads() -> None:
    block, columns = normal(1, H, D, WIDTH), gram(H * WIDTH, 1)
    start = tucker([block], (7, WIDTH))
    result = weighted_tucker([block], start, None, [[columns]], tolerance=0, sweeps=60)
    best = svd_error(block[0].transpose(0, 1).flatten(1) @ root(columns), 7)
    assert result.error == pytest.approx(best, rel=1e-6)
    with pytest.raises(ValueError, match="rows: expected a Gram matrix"):
        weighted_tucker([block], start, None, [[None]])


def test_without_weights_it_is_where_hooi_ends() -> None:
    """Identities as metrics, and matrices of one norm: nothing is left to gain."""
    block = normal(4, H, D, WIDTH)
    block = block / block.flatten(1).norm(dim=1)[:, None, None, None]
    start = tucker([block], (10, 5), [3], tolerance=1e-12, sweeps=2000)
    identity = torch.eye(D).double()
    result = weighted_tucker([block], start, identity, [[None, None, None, identity]], tolerance=0, sweeps=20)
    assert result.history[0] == pytest.approx(start.error, rel=1e-9)
    assert result.error == pytest.approx(start.error, rel=1e-4) and result.error <= start.error


@pytest.mark.parametrize("stacks", [[None, None], [1, 2]])
def test_several_matrices_with_inputs_of_both_kinds(stacks: list[int | None]) -> None:
    """Monotone, better than the start by far, and the errors are those of outputs."""
    blocks = [normal(2, H, D, WIDTH, seed=1), normal(2, 1, D, WIDTH, seed=2)]  # q and o; k and v of one head
    x, a = normal(200, D, seed=3) @ root(gram(D, 4)), normal(200, H * WIDTH, seed=5) @ root(gram(D, 6))
    rows = x.T @ x
    columns: list[list[Tensor | None]] = [[None, a.T @ a], [None, None]]
    start = tucker(blocks, (8, 4), stacks)
    result = weighted_tucker(blocks, start, rows, columns)
    assert falls(result.history, 0) and result.error < 0.9 * result.history[0]
    expected = []
    for block, dense in zip(blocks, result.dense(), strict=True):
        for m, (was, now) in enumerate(zip(block, dense, strict=True)):
            w, v = (each.transpose(0, 1).flatten(1) for each in (was, now))
            is_o = block is blocks[0] and m == 1
            y, z = (a @ w.T, a @ v.T) if is_o else (x @ w, x @ v)
            expected.append(float((y - z).norm() / y.norm()))
    assert torch.cat(result.errors).tolist() == pytest.approx(expected, rel=1e-6)
    assert torch.cat(output_errors(blocks, result, rows, columns)).tolist() == pytest.approx(expected, rel=1e-6)
    assert result.error == pytest.approx(float(torch.tensor(expected).square().mean().sqrt()), rel=1e-6)
    assert weight_errors(blocks, result)[0] >= start.error - 1e-6  # of the weights alone HOOI is better
    assert_orthonormal(result.u1)


@pytest.mark.parametrize("dead", ["weight", "rows", "columns"])
def test_a_matrix_without_outputs_has_no_weight(dead: str) -> None:
    """Zero weights, or zero inputs: the other matrices improve as usual."""
    block, rows, columns = normal(3, H, D, WIDTH), gram(D, 1), gram(H * WIDTH, 2)
    if dead == "weight":
        block[1] = 0
    metrics: list[Tensor | None] = [None, None, columns * (dead != "columns")]
    start = tucker([block], (8, 4), [2])
    result = weighted_tucker([block], start, rows * (dead != "rows"), [metrics])
    errors = result.errors[0]
    gone = {"weight": [1], "rows": [0, 1], "columns": [2]}[dead]
    assert all(errors[i] == 0 if i in gone else 0 < errors[i] < 1 for i in range(3))
    assert len(result.history) > 3 and falls(result.history, 0)
    assert result.history[-1] == pytest.approx(float(errors.square().mean().sqrt()), rel=1e-9)
    assert result.history[-1] < 0.9 * result.history[0]


def test_orthonormal_factors_of_the_same_tensor() -> None:
    oblique = Tucker(normal(D, 5), normal(WIDTH, 3), [normal(4, 2)], [normal(2, H, 5, 3)], [], [])
    result = orthonormal(oblique)
    torch.testing.assert_close(result.dense()[0], oblique.dense()[0])
    assert_orthonormal(result.u1, result.u2, result.u3[0])
