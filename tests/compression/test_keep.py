"""Ranks from a budget: on hand-made ladders, and the same key for every method."""

from functools import cache
from itertools import product
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

import pytest
import timm
import torch
from torch import nn

from attnlab.compression import Method, compress, outline
from attnlab.compression.counting import multiply_adds
from attnlab.compression.keep import allocate, grid, hull
from attnlab.compression.methods.base import Ladder, Step
from attnlab.compression.methods.cp_slimatt import CPSlimAtt
from attnlab.compression.methods.irratt import IrrAtt
from attnlab.compression.methods.laser import LASER
from attnlab.compression.methods.mlp_svd import MLPSVD
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.compression.methods.trawl import TRAWL
from attnlab.compression.methods.truncatt import GlobalSVD, TruncAtt
from attnlab.config.build import instantiate
from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.pretrained import family_of
from tests.compression.llama import llama
from tests.compression.models import vit

METHODS: dict[str, tuple[Method, str]] = {  # and the compressed part
    "truncatt": (TruncAtt(keep=0.6), "attn"),
    "global_svd": (GlobalSVD(keep=0.6), "attn"),
    "cp_slimatt": (CPSlimAtt(keep=0.6, sweeps=3), "attn"),
    "irratt": (IrrAtt(keep=0.6, sweeps=3, fusion="identity"), "attn"),
    "mlp_svd": (MLPSVD(keep=0.6), "mlp"),
    "laser": (LASER(keep=0.6), "mlp"),
    "trawl": (TRAWL(mode=5, keep=0.6), "mlp"),
    "tensorllm": (TensorLLM(keep=0.6), "attn"),
    "tensorllm with a stack rank": (TensorLLM(keep=0.6, stack_rank=3), "attn"),
    "tensorllm absorbed": (TensorLLM(keep=0.6, absorb=True), "attn"),
}


def ladders(seed: int) -> list[Ladder]:
    """Three convex ladders of unit steps."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for name in "abc":
        gains = torch.rand(4, generator=generator).sort(descending=True).values
        errors = [float(gains[i:].sum()) for i in range(5)]
        result.append(Ladder(name, 5, [Step(i + 1, errors[i], i) for i in range(4)]))
    return result


def test_ranks_to_choose_from_reach_both_ends() -> None:
    assert grid(1) == [1] and grid(32) == [*range(1, 33)]
    for most in (33, 64, 1000):
        ranks = grid(most)
        assert (len(ranks), ranks[0], ranks[-1]) == (32, 1, most)
        assert max(b - a for a, b in zip(ranks, ranks[1:], strict=False)) <= -(-(most - 1) // 31)


def test_errors_of_ranks_are_the_lost_shares_of_squared_singular_values() -> None:
    """Summed over the matrices of an MLP, each of which counts alike."""
    model = llama().double()
    with torch.no_grad():  # another scale changes nothing
        model.get_parameter("layers.0.mlp.up_proj.weight").mul_(7)
    weights = [parameter for name, parameter in model.named_parameters() if name.startswith("layers.0.mlp")]
    squares = [torch.linalg.svdvals(weight.detach()).square() for weight in weights]
    ladder = MLPSVD(keep=0.5).ladders(model, family_of(model).layers(model))[0]
    for step in ladder.steps:
        lost = sum(float(values[step.value :].sum() / values.sum()) for values in squares)
        assert step.error == pytest.approx(lost, abs=1e-9)
    assert len(ladder.steps) == 24


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.8, 1.0])
def test_the_optimum_of_convex_ladders(seed: int, keep: float) -> None:
    """Against every combination of steps."""
    choices = ladders(seed)
    values = allocate(choices, keep)
    options = [[*ladder.steps, Step(5, 0.0, None)] for ladder in choices]
    allowed = [steps for steps in product(*options) if sum(step.parameters for step in steps) <= keep * 15]
    best = min(sum(step.error for step in steps) for steps in allowed)
    chosen = [next(s for s in o if s.value == values[ladder.path]) for ladder, o in zip(choices, options, strict=True)]
    assert sum(step.parameters for step in chosen) <= keep * 15
    assert sum(step.error for step in chosen) == pytest.approx(best)
    assert keep < 1 or set(values.values()) == {None}  # all stays dense


def matrices(model: nn.Module, part: str) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if f".{part}." in name and not name.endswith("bias"))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_keeps_at_most_its_share(name: str) -> None:
    """On random weights, and on the meta device."""
    method, part = METHODS[name]
    plain, model = vit(), vit()
    reports = compress(model, method)
    assert 0.4 * matrices(plain, part) < matrices(model, part) <= 0.6 * matrices(plain, part)
    other = "mlp" if part == "attn" else "attn"
    assert matrices(model, other) == matrices(plain, other)
    outlined = vit().to("meta")
    outline(outlined, method)
    assert 0.4 * matrices(plain, part) < matrices(outlined, part) <= 0.6 * matrices(plain, part)
    assert method.rank_of(reports[0]) is None


@pytest.mark.parametrize("method", [TruncAtt, TensorLLM, MLPSVD, LASER])
def test_parameters_go_where_they_lower_the_error(method: Any) -> None:
    """A first layer of rank one needs fewer parameters than a random second one."""
    model = vit()
    with torch.no_grad():
        for layer in family_of(model).layers(model)[:1]:
            for place in layer.projections.values():
                u, v = torch.randn(place.shape[0], 1), torch.randn(1, place.shape[1])
                parts = place.split(u @ v) if place.axis else None
                same = None if parts is None else place.join(parts[:1].expand_as(parts))
                place.write(model, u @ v if same is None else same)
    reports = compress(model, method(keep=0.5))
    names = {name for name in ("attn", "mlp") if matrices(model, name) < matrices(vit(), name)}
    sizes = [matrices(nn.ModuleDict({"x": block}), *names) for block in model.blocks]  # type: ignore[union-attr]
    assert sizes[0] < 0.8 * sizes[1] and len(reports) >= 1


def test_the_rest_of_the_budget_is_spent() -> None:
    """If errors fall faster and faster, as with two ranks at once, the hull has both ends alone."""
    concave = [Ladder(name, 12, [Step(rank, 1 - (rank / 10) ** 2, rank) for rank in range(1, 11)]) for name in "ab"]
    assert len(hull([*concave[0].steps, Step(12, 0.0, None)])) == 2
    assert allocate(concave[:1], 0.5) == {"a": 6}
    assert allocate(concave, 0.5) == {"a": 10, "b": 2}
    assert allocate(concave, 0.25) == {"a": 5, "b": 1}


def test_a_budget_over_grouped_keys_chosen_layers_and_everything() -> None:
    model, plain = llama(), llama()
    assert compress(vit(), TensorLLM(keep=1.0)) == []
    compress(model, TensorLLM(keep=0.5, layers=[1]))
    before, after = (sum(p.numel() for p in m.layers[1].self_attn.parameters()) for m in (plain, model))  # type: ignore[index, union-attr]
    assert 0.4 * before < after < 0.55 * before  # with biases
    first = {name: value for name, value in plain.state_dict().items() if name.startswith("layers.0")}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in first.items())


def multiply_adds_of(method: Any) -> Method:
    method.keep_of = "multiply_adds"
    return method


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: allocate(ladders(0), 0.1), "compress.keep=0.1: .* 0.2000 to 1"),
        (lambda: CPSlimAtt(9, fusion="constrained", fusion_penalty=0.1), "constrained and compress.fusion_penalty=0.1"),
        (lambda: TensorLLM(ranks=[3, 3], keep=0.5), "compress.keep chooses the ranks"),
        (lambda: TruncAtt(4, keep=0.5, keep_of="multiply_adds"), "compress.keep chooses the ranks; give it, or rank=$"),
        (lambda: TruncAtt(4, keep_of="multiply_adds"), "compress.keep_of=multiply_adds"),
        (lambda: MLPSVD(4, keep_of="multiply_adds"), "compress.keep_of=multiply_adds"),
        (lambda: MLPSVD(keep=0.5, mlp_rank=3), "compress.mlp_rank"),
        (MLPSVD, "compress.mlp_rank"),
        (
            lambda: outline(vit(), TruncAtt(keep=0.1, keep_of="multiply_adds")),
            r"compress.keep=0.1: blocks.0.attn can keep 0.\d+ to 0.\d+ of its multiply-adds",
        ),
        (
            lambda: outline(vit(), MLPSVD(keep=0.01, keep_of="multiply_adds")),
            "compress.keep=0.01: blocks.0.mlp can keep 0.0521 to 1",
        ),
        (lambda: outline(vit(), multiply_adds_of(TRAWL(keep=0.5))), "compress.keep_of=multiply_adds: TRAWL"),
    ],
)
def test_budgets_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# --- section 3.4: a share of each layer's multiply-adds -----------------------------------------------------------


@cache
def deit_small() -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = timm.create_model("deit_small_patch16_224")
    return model


@pytest.mark.parametrize(
    ("method", "keep", "rank"),
    [
        (TruncAtt, 0.375, 16),
        (TruncAtt, 0.422, 22),
        (TruncAtt, 0.5, 32),
        (CPSlimAtt, 0.503, 96),
        (CPSlimAtt, 0.598, 132),
        (CPSlimAtt, 0.756, 192),
        (IrrAtt, 0.385, 96),
        (IrrAtt, 0.432, 132),
        (IrrAtt, 0.51, 192),
        (GlobalSVD, 0.375, 96),
    ],
)
def test_the_rates_of_table_1_give_its_ranks(method: type[Method], keep: float, rank: int) -> None:
    """DeiT-Small, VO rank 32: the column of MHSA, rounded up."""
    model = deit_small()
    ranks = method(keep=keep, keep_of="multiply_adds").rated(model, family_of(model).layers(model))  # type: ignore[call-arg]
    assert ranks == {f"blocks.{i}.attn": [rank, 32] for i in range(12)}


@pytest.mark.parametrize("method", [TruncAtt, GlobalSVD, CPSlimAtt, IrrAtt])
@pytest.mark.parametrize("keep", [0.45, 0.6, 1.0])
def test_a_rate_of_multiply_adds_is_kept_by_the_largest_rank(method: Any, keep: float) -> None:
    dense, plain = multiply_adds(vit(), (3, 32, 32))["attention"], vit()
    ranks = method(keep=keep, keep_of="multiply_adds", vo_rank=3).rated(plain, family_of(plain).layers(plain))
    (rank, vo_rank), again = ranks.values()
    assert vo_rank == 3 and again == [rank, vo_rank]

    def share(rank: int) -> float:
        outline(model := vit(), method(rank, vo_rank))
        return multiply_adds(model, (3, 32, 32))["attention"] / dense

    assert share(rank) <= keep
    most = 8 if method.per_head else 24
    assert rank == most or share(rank + 1) > keep
    outline(model := vit(), method(keep=keep, keep_of="multiply_adds", vo_rank=3))
    assert multiply_adds(model, (3, 32, 32))["attention"] / dense == share(rank)
    outline(model := vit(), MLPSVD(keep=0.5, keep_of="multiply_adds"))
    assert matrices(model, "mlp") == 2 * 2 * 9 * (24 + 96)  # 9 = floor(0.5 * 24 * 96 / (24 + 96))


@pytest.mark.parametrize("name", ["truncatt", "laser", "laser_tensorllm", "mlp_svd", "tensorllm", "trawl"])
def test_no_method_takes_a_share_and_a_rank(name: str) -> None:
    cfg = compose("task=imagenet", f"compress={name}", "compress.keep=0.6", "rank=2")
    with pytest.raises(ConfigError, match="keep"):
        instantiate(cfg.compress, path="compress")
