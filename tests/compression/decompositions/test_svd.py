from itertools import product

import pytest
import torch

from attnlab.compression.decompositions.slices import Slices
from attnlab.compression.decompositions.svd import BlockTerms, global_ranks, global_svd, low_rank, truncated_svd
from tests.compression.decompositions.planted import RANKS, planted, products


def dense(terms: BlockTerms) -> torch.Tensor:
    a, b, c = terms.columns()
    return torch.einsum("ir,jr,hr->ijh", a, b, c)


def test_each_slice_is_its_truncated_svd() -> None:
    tensor = products()
    y = tensor.dense()
    result = truncated_svd(tensor, [1, 2, 3])
    assert result.ranks == [1, 2, 3]
    for h, rank in enumerate(result.ranks):
        u, s, vh = torch.linalg.svd(y[..., h])
        torch.testing.assert_close(result.left[h] @ result.right[h].T, u[:, :rank] * s[:rank] @ vh[:rank])
        torch.testing.assert_close(result.left[h].norm(dim=0), result.right[h].norm(dim=0))
    assert result.error == pytest.approx(float(tensor.error(*result.columns())))
    exact = truncated_svd(tensor, 4)
    assert exact.error < 1e-15
    torch.testing.assert_close(dense(exact), y, rtol=0, atol=1e-13)


def test_global_ranks_are_the_best_of_all() -> None:
    """Against every way to share the total among three heads."""
    values = torch.rand(3, 4, dtype=torch.float64).sort(descending=True)[0]
    for total in range(3, 13):
        ranks = global_ranks(values, total)
        assert sum(ranks) == total and min(ranks) >= 1
        energies = [sum(values[h, :r].square().sum() for h, r in enumerate(ranks))]
        every = [
            sum(values[h, :r].square().sum() for h, r in enumerate(other))
            for other in product(range(1, 5), repeat=3)
            if sum(other) == total
        ]
        assert float(energies[0]) == pytest.approx(float(max(every)))
    assert global_ranks(torch.tensor([[9.0, 8.0, 7.0], [0.0, 0.0, 0.0]]), 4) == [3, 1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mixing", [0.0, 0.15])
def test_global_ranks_are_never_worse_than_uniform_ones(mixing: float, seed: int) -> None:
    tensor = planted(mixing, 0.1, seed)
    result = global_svd(tensor, 36)
    assert result.error <= truncated_svd(tensor, 6).error
    assert sum(result.ranks) == 36


def test_planted_ranks_are_found() -> None:
    tensor = planted(0, 0.001)
    result = global_svd(tensor, sum(RANKS))
    assert result.ranks == RANKS
    assert result.error == pytest.approx(0.0008, abs=0.00005)
    assert truncated_svd(tensor, 6).error > 100 * result.error


def test_a_matrix() -> None:
    matrix = torch.randn(7, 5)
    a, b, error = low_rank(matrix, 3)
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    torch.testing.assert_close(a @ b, u[:, :3] * s[:3] @ vh[:3])
    assert error == pytest.approx(float(s[3:].norm() / s.norm()))
    assert low_rank(matrix, 5)[2] < 1e-15


@pytest.mark.parametrize("rank", [0, 5])
def test_ranks_that_cannot_be(rank: int) -> None:
    tensor = Slices(torch.randn(3, 9, 4), torch.randn(3, 8, 4))
    with pytest.raises(ValueError, match="expected 3 of 1 to 4"):
        truncated_svd(tensor, rank)
    with pytest.raises(ValueError, match=r"expected 3 \(one for each head\) to 12"):
        global_svd(tensor, 13 if rank else 2)
    with pytest.raises(ValueError, match="expected 1 to 4"):
        low_rank(torch.randn(4, 6), rank)
