"""Eq. 7 as a constraint: the fusion satisfies it for any weights."""

import pytest
import torch

from attnlab.compression.decompositions.fusion import constrained_fusion, fusion_penalty


def satisfies(fusion: torch.Tensor) -> None:
    """S >= 0, S S' = I, and each column has one head."""
    assert float(fusion.min()) >= 0
    torch.testing.assert_close(fusion @ fusion.mT, torch.eye(len(fusion)).to(fusion), rtol=0, atol=1e-12)
    assert ((fusion != 0).sum(0) == 1).all()
    assert float(fusion_penalty(fusion)) < 1e-20


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("heads", "rank"), [(4, 4), (4, 9), (1, 3), (6, 40)])
def test_it_holds_for_any_weights(heads: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    free = torch.randn(heads, rank, generator=generator, dtype=torch.float64)
    for weights in (free, -free.abs(), torch.zeros_like(free), free * (torch.arange(heads) == 0)[:, None]):
        satisfies(constrained_fusion(weights))


def test_a_fusion_under_the_constraint_does_not_change() -> None:
    fusion = constrained_fusion(torch.rand(3, 8, dtype=torch.float64))
    torch.testing.assert_close(constrained_fusion(fusion), fusion, rtol=1e-14, atol=0)


def test_a_head_without_a_column_gets_its_best_one_and_no_other_head_loses_its_strongest() -> None:
    free = torch.tensor([[9.0, 8.0, 7.0], [2.0, 3.0, 4.0], [6.0, 5.0, 1.0]])
    # head 0 owns all three and keeps the first; head 1 takes the third, which leaves head 2 the second
    assert constrained_fusion(free).argmax(0).tolist() == [0, 2, 1]


def test_own_weights_have_the_gradient_of_rows_of_unit_norm() -> None:
    free = torch.rand(3, 8, dtype=torch.float64, requires_grad=True)
    fusion = constrained_fusion(free)
    weights = torch.randn_like(fusion)
    (gradient,) = torch.autograd.grad((fusion * weights).sum(), free)
    positive = fusion.detach() > 0
    clipped = free.detach().where(positive, 0).requires_grad_()
    (expected,) = torch.autograd.grad((clipped / clipped.norm(dim=-1, keepdim=True) * weights).sum(), clipped)
    torch.testing.assert_close(gradient[positive], expected[positive])
    norm = clipped.detach().norm(dim=-1, keepdim=True)
    torch.testing.assert_close(gradient[~positive], (weights / norm)[~positive])  # straight-through


def test_it_compiles_as_one_graph() -> None:
    free = torch.randn(4, 9)
    compiled = torch.compile(constrained_fusion, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(free), constrained_fusion(free))
