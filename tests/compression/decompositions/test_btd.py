import pytest
import torch

from attnlab.compression.decompositions.btd import btd, fusion_ranks, terms_from_cp
from attnlab.compression.decompositions.cp import cp_als, cp_epc
from attnlab.compression.decompositions.fusion import fusion_penalty
from attnlab.compression.decompositions.slices import Slices
from attnlab.compression.decompositions.svd import BlockTerms, global_svd, truncated_svd
from tests.compression.decompositions.planted import RANKS, falls, planted, products

TOTAL = sum(RANKS)


@pytest.mark.parametrize(
    ("mixing", "noise", "error"),
    [(0, 0.001, 0.0008), (0.15, 0.001, 0.0008), pytest.param(0.15, 0.1, 0.0813, marks=pytest.mark.slow)],
)
def test_planted_ranks_and_terms_are_found(mixing: float, noise: float, error: float) -> None:
    tensor = planted(mixing, noise)
    corrected = cp_epc(tensor, cp_als(tensor, TOTAL, sweeps=1500, tolerance=1e-6), sweeps=50)
    start = terms_from_cp(tensor, corrected.factors)
    assert start.ranks == RANKS
    result = btd(tensor, start)
    assert result.ranks == RANKS
    assert result.error == pytest.approx(error, rel=0.06)
    assert result.error == pytest.approx(float(tensor.error(*result.columns())), rel=1e-9)
    assert falls(result.history)
    torch.testing.assert_close(result.fusion.diagonal(), torch.ones(6, dtype=torch.float64))  # its own head the most


@pytest.mark.parametrize("seed", range(3))
def test_the_error_never_rises_and_ends_below_that_of_the_start(seed: int) -> None:
    tensor = planted(0.3, 0.1, seed)
    for start in (global_svd(tensor, TOTAL), truncated_svd(tensor, 6)):
        result = btd(tensor, start, sweeps=8, tolerance=0)
        assert falls(result.history)
        assert result.error < start.error and result.ranks == start.ranks


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_one_head_is_a_truncated_svd(rank: int) -> None:
    """There are no other terms to subtract, and the best term is the truncated SVD."""
    tensor = Slices(torch.randn(1, 7, 4), torch.randn(1, 6, 4))
    best = truncated_svd(tensor, rank)
    noisy = BlockTerms([t + 0.1 for t in best.left], [t - 0.1 for t in best.right], best.fusion, [])
    for start in ([rank], noisy):
        result = btd(tensor, start, sweeps=100, tolerance=0)
        assert result.ranks == [rank] and result.fusion.tolist() == [[1.0]]
        assert result.error == pytest.approx(best.error, rel=1e-6, abs=1e-12)


def test_algorithm_1_keeps_what_the_owners_hold() -> None:
    tensor = products()
    a, b, c = (torch.randn(size, 6, dtype=torch.float64) for size in tensor.sizes)
    terms = terms_from_cp(tensor, (a, b, c))
    owner, largest = fusion_ranks(c, 4)
    for head in range(3):
        of_head = owner == head
        torch.testing.assert_close(terms.left[head] @ terms.right[head].T, (a * largest)[:, of_head] @ b[:, of_head].T)
    assert terms.ranks == torch.bincount(owner, minlength=3).tolist()


def test_a_head_that_owns_nothing_gets_the_column_that_loses_least() -> None:
    fusion = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.9, 0.1, 0.0], [0.0, 0.95, 0.2, 0.3]])
    owner, largest = fusion_ranks(fusion, 4)
    assert sorted(torch.bincount(owner, minlength=3).tolist()) == [1, 1, 2]
    assert owner[1] == 2 and owner[2] == 1 and largest[2] == pytest.approx(0.1)


def test_a_head_has_no_more_columns_than_its_matrices_have_rank() -> None:
    owner, _ = fusion_ranks(torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.1, 0.9, 0.2, 0.3]]), 2)
    assert torch.bincount(owner).tolist() == [2, 2]
    assert owner.tolist() == [0, 1, 0, 1]
    for rank in (1, 9):
        with pytest.raises(ValueError, match="one for each head"):
            fusion_ranks(torch.ones(2, rank), 4)


def test_the_penalty_is_zero_for_disjoint_heads_alone() -> None:
    fusion = torch.zeros(2, 5)
    fusion[0, :2] = 0.5**0.5
    fusion[1, 2:] = 3**-0.5
    assert float(fusion_penalty(fusion)) == pytest.approx(0, abs=1e-12)
    assert float(fusion_penalty(-fusion)) == pytest.approx(float(fusion.square().sum()) / 2)
    assert float(fusion_penalty(2 * fusion)) == pytest.approx(9)
    overlapping = fusion.clone()
    overlapping[1, 0] = 0.3
    assert float(fusion_penalty(overlapping)) > 0.01
