"""The source of IrrAtt's ranks, value-output ranks that differ between heads, the constraint of section 3.3."""

from typing import Any

import pytest
import torch
from torch import nn

from attnlab.compression import compress, outline
from attnlab.compression.counting import multiply_adds, parameters
from attnlab.compression.methods.cp_slimatt import CPSlimAtt
from attnlab.compression.methods.irratt import IrrAtt
from attnlab.compression.methods.truncatt import GlobalSVD, TruncAtt
from attnlab.compression.modules.attention import FactoredAttention, SlimAttention
from attnlab.pretrained import family_of
from tests.compression.models import images, vit
from tests.compression.test_attention import by_head

PLANTED = [1, 5, 3]  # ranks of the heads
TOTAL = sum(PLANTED)


def low_rank_heads(names: str) -> nn.Module:
    """A ViT of one layer in float64 whose heads have the ranks PLANTED in the product of these two projections."""
    model = vit(depth=1).double()
    with torch.no_grad():
        for layer in family_of(model).layers(model):
            first, second = (layer.projections[name] for name in names)
            left, right = (place.split(place.read(model)) for place in (first, second))
            cut = torch.arange(left.shape[-1]) < torch.tensor(PLANTED)[:, None, None]
            bias = first.read_bias(model)
            assert bias is not None
            if names == "qk":  # the query's bias is a row of the tensor
                bias = (bias.view(3, 1, -1) * cut).flatten()
            first.write(model, first.join(left * cut), bias)
            second.write(model, second.join(right * cut))
    return model


def test_a_random_start_discovers_planted_ranks() -> None:
    model = low_rank_heads("qk")
    x = images().double()
    with torch.no_grad():
        expected = model(x)
        reports = compress(
            model, IrrAtt(TOTAL, 8, start="random", restarts=2, objective="none", sweeps=400, tolerance=1e-6)
        )
        assert all(report["ranks"] == PLANTED and report["qk_error"] < 1e-9 for report in reports)
        torch.testing.assert_close(model(x), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("start", ["cp", "random"])
def test_the_first_terms_are_the_best_without_mixing_at_the_discovered_ranks(start: Any) -> None:
    """By Eckart and Young, from the singular values of each head's matrix: those that its rank leaves out are lost."""
    model = vit(depth=1).double()
    (layer,) = family_of(model).layers(model)
    q, k = (layer.projections[name] for name in "qk")
    bias = q.read_bias(model)
    assert bias is not None
    query = torch.cat((q.split(q.read(model)), bias.view(3, 1, -1)), 1)  # the bias is a row of the tensor
    values = torch.linalg.svdvals(query @ k.split(k.read(model)).mT).detach()
    (report,) = compress(model, IrrAtt(9, 4, start=start, restarts=2, objective="none", sweeps=20))
    lost = sum(float(of_head[rank:].square().sum()) for of_head, rank in zip(values, report["ranks"], strict=True))
    assert report["history"][1] == pytest.approx((lost / float(values.square().sum())) ** 0.5, rel=1e-6)
    assert report["history"][0] >= report["history"][1] > report["qk_error"]


def test_random_starts_are_those_of_the_seed_and_the_best_counts() -> None:
    def first(**settings: Any) -> dict[str, Any]:
        return compress(vit(depth=1), IrrAtt(9, 4, start="random", objective="none", sweeps=8, **settings))[0]

    report = first(restarts=3, start_seed=5)
    assert [start["seed"] for start in report["starts"]] == [5, 6, 7]
    best = min(report["starts"], key=lambda start: start["error"])
    assert report["qk_error"] == best["error"] and report["ranks"] == best["ranks"]
    alone = first(restarts=1, start_seed=best["seed"])
    assert alone["qk_error"] == report["qk_error"]
    others = {first(restarts=1, start_seed=seed)["qk_error"] for seed in (5, 6, 7)}
    assert len(others) > 1  # or nothing would depend on the seed
    slim = compress(vit(depth=1), CPSlimAtt(9, 4, start="random", restarts=2, objective="none", sweeps=8))[0]
    assert slim["qk_error"] == min(start["error"] for start in slim["starts"])


def test_how_much_of_a_fusion_belongs_to_its_heads() -> None:
    """The mean over columns of the share of squared weights in the head with the largest."""
    model = vit(depth=1).double()
    settings: dict[str, Any] = {"start": "random", "restarts": 1, "objective": "none", "sweeps": 20}
    (report,) = compress(model, CPSlimAtt(9, 4, **settings))
    (module,) = (module for module in model.modules() if isinstance(module, SlimAttention))
    squares = module.weights.detach().square()
    assert torch.bincount(squares.argmax(0), minlength=3).tolist() == report["head_ranks"]
    share = float((squares.amax(0) / squares.sum(0)).mean())
    assert report["fusion_own"] == pytest.approx(share, rel=1e-6) and share < 0.99


# --- values and outputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        IrrAtt(9, 3, vo="irratt", objective="none", sweeps=5),
        IrrAtt(9, 3, vo="irratt", fusion="identity", start="global"),
        CPSlimAtt(9, 3, vo="irratt", objective="none", sweeps=5),
        CPSlimAtt(9, 3, vo="irratt", fusion="constrained", objective="none", sweeps=5),
        GlobalSVD(9, 3, vo="irratt"),
        TruncAtt(3, 3, vo="irratt"),
    ],
    ids=lambda method: f"{type(method).__name__} {getattr(method, 'fusion', '')}",
)
def test_value_ranks_that_differ(method: Any) -> None:
    """Planted ranks are exact; the module equals the equations; sizes and counts equal the outline's."""
    model, outlined = low_rank_heads("vo"), vit(depth=1)
    reports = compress(model, method)
    assert all(report["vo_ranks"] == PLANTED and report["vo_error"] < 1e-12 for report in reports)
    module: Any = model.get_submodule("blocks.0.attn")
    assert isinstance(module, FactoredAttention | SlimAttention) and len(set(module.value_ranks)) > 1
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    torch.testing.assert_close(module(x), by_head(module, x), rtol=1e-11, atol=1e-11)
    outline(outlined, method)
    assert parameters(outlined) == parameters(model)
    assert multiply_adds(outlined, (3, 32, 32)) == multiply_adds(model.float(), (3, 32, 32))
    equal: Any = type(method)(method.rank, 3, **{k: getattr(method, k) for k in ("fusion",) if hasattr(method, k)})
    outline(same := vit(depth=1), equal)
    assert parameters(same) == parameters(model)  # the ranks move columns between heads


# --- the constraint ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["global", "random"])
def test_a_constrained_fusion(start: Any) -> None:
    """Eq. 7 holds; the error is that of separate heads with its ranks: above a free fusion, at most IrrAtt's."""
    options: dict[str, Any] = {"rank": 9, "vo_rank": 4, "start": start, "restarts": 2, "sweeps": 40}
    options["objective"] = "none"
    free = compress(vit(depth=1), CPSlimAtt(**options))
    model = vit(depth=1).double()
    result = compress(model, CPSlimAtt(**options, fusion="constrained"))
    apart = compress(
        vit(depth=1), IrrAtt(**{**options, "start": "cp" if start == "global" else start}, fusion="identity")
    )
    best = compress(vit(depth=1), GlobalSVD(9, 4))
    assert free[0]["qk_error"] < result[0]["qk_error"] <= apart[0]["qk_error"] * (1 + 1e-6)
    assert result[0]["qk_error"] >= best[0]["qk_error"] * (1 - 1e-6)  # Eckart and Young
    assert free[0]["fusion_own"] < result[0]["fusion_own"] == 1
    module: Any = model.get_submodule("blocks.0.attn")
    fusion = module.weights.detach()
    assert float(fusion.min()) >= 0 and ((fusion > 0).sum(0) == 1).all()
    torch.testing.assert_close(fusion @ fusion.T, torch.eye(3).double(), rtol=0, atol=1e-12)
    assert (fusion > 0).sum(1).tolist() == result[0]["head_ranks"]


def test_a_constrained_model_trains_within_the_constraint_and_becomes_an_irregular_one_exactly() -> None:
    model = vit(depth=1).double().train()
    compress(model, CPSlimAtt(9, 4, objective="none", sweeps=5, fusion="constrained"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(images().double()).square().mean().backward()
        optimizer.step()
    slim = [module for module in model.modules() if isinstance(module, SlimAttention)]
    for module in slim:
        fusion = module.weights.detach()
        assert not torch.equal(fusion, module.fusion)  # the parameter itself is free
        assert float(fusion.min()) >= 0
        torch.testing.assert_close(fusion @ fusion.T, torch.eye(3).double(), rtol=0, atol=1e-12)
    model.eval()
    with torch.no_grad():
        expected = model(images().double())
        reports = compress(model, IrrAtt(fusion="identity"))
        torch.testing.assert_close(model(images().double()), expected, rtol=1e-9, atol=1e-9)
    assert all(report["fusion_dropped"] < 1e-12 and sum(report["ranks"]) == 9 for report in reports)
