"""What the interface must carry, on timm's fused projections and on a Llama's separate ones with grouped keys."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from attnlab.compression import compress, densify, load, outline, save
from attnlab.compression.counting import multiply_adds
from attnlab.compression.methods.truncatt import TruncAtt
from attnlab.errors import ConfigError
from attnlab.pretrained import ATTENTION, Layer, family_of
from tests.compression.future_methods import AllHeads, OneMatrix, Stacked
from tests.compression.llama import SIZES, llama, words
from tests.compression.models import NAMES, OPTIONS, images, vit


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    matrix: str  # of the MLP
    about: tuple[str, dict[str, Any]]  # for a saved folder
    dim: int
    slices: int  # heads of q, k, v and o together
    width: int


CASES = {
    "timm": Case(vit, images, "fc2", (NAMES[0], OPTIONS), 24, 12, 8),
    "llama": Case(llama, words, "down", ("llama", SIZES), 24, 16, 8),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def layers(model: nn.Module) -> list[Layer]:
    return family_of(model).layers(model)


def inputs(case: Case, model: nn.Module) -> Tensor:
    x = case.inputs()
    return x.to(next(model.parameters()).dtype) if x.is_floating_point() else x


def changed(before: nn.Module, after: nn.Module) -> set[str]:
    return {name for name, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[name])}


def test_one_matrix_as_laser_does(case: Case) -> None:
    model = case.make().double()
    before = copy.deepcopy(model)
    (report,) = compress(model, OneMatrix(-1, case.matrix, 5))
    place = layers(model)[-1].projections[case.matrix]
    was, now = place.read(before), place.read(model)
    u, s, vh = torch.linalg.svd(was)
    torch.testing.assert_close(now, u[:, :5] * s[:5] @ vh[:5], rtol=0, atol=1e-12)
    assert report["path"] == place.path and report["error"] == pytest.approx(float(s[5:].norm()), rel=1e-12)
    assert changed(before, model) == {f"{place.path}.weight"}
    with pytest.raises(ConfigError, match=rf"{place.path} takes 1 to 24"):
        compress(case.make(), OneMatrix(-1, case.matrix, 25))


def test_all_heads_as_tensorllm_does(case: Case) -> None:
    """At full rank nothing changes; below, the modules compute what the reconstructed matrices do."""
    with torch.no_grad():
        model = case.make().double()
        expected = model(inputs(case, model))
        compress(model, AllHeads([0, 1], [case.dim, case.width]))
        torch.testing.assert_close(model(inputs(case, model)), expected, rtol=0, atol=1e-11)

        model, dense = case.make().double(), case.make().double()
        (report,) = compress(model, AllHeads([1], [10, 5]))
        rebuilt = densify(model, case.make().double())
        tensors = []
        for each in (dense, rebuilt):
            places = [layers(each)[1].projections[name] for name in ATTENTION]
            tensors.append(torch.cat([place.split(place.read(each)) for place in places]))
        assert torch.linalg.matrix_rank(tensors[1].transpose(0, 1).flatten(1)) == 10  # one subspace for all heads
        error = float((tensors[0] - tensors[1]).norm() / tensors[0].norm())
        assert error == pytest.approx(report["error"], rel=1e-9) and 0.1 < error < 1
        y = model(inputs(case, model))
        torch.testing.assert_close(y, rebuilt(inputs(case, model)), rtol=0, atol=1e-11)
        assert float((y - dense(inputs(case, model))).norm() / y.norm()) > 0.01
        first = layers(dense)[0].path  # the other layer, and all biases, are as they were
        for name, value in dense.state_dict().items():
            if name.startswith(f"{first}.") or name.endswith("bias"):
                assert torch.equal(rebuilt.state_dict()[name], value), name


def test_factors_are_stored_once_and_the_folder_gives_them_back(case: Case, tmp_path: Path) -> None:
    model = case.make()
    was = sum(p.numel() for p in model.parameters())
    compress(model, AllHeads([0, 1], [10, 5]), tmp_path / "store")
    now = sum(p.numel() for p in model.parameters())
    factors = case.dim * 10 + case.width * 5 + case.slices * 10 * 5
    assert was - now == 2 * (case.slices * case.dim * case.width - factors)
    plain = case.make()
    outline(plain, AllHeads([0, 1], [10, 5]))
    assert plain.state_dict().keys() == model.state_dict().keys()
    save(model, tmp_path / "saved", *case.about)
    again = load(tmp_path / "saved")
    assert torch.equal(again(case.inputs()), model(case.inputs()))
    stored = case.make()
    assert all(report["stored"] for report in compress(stored, AllHeads([0, 1], [10, 5]), tmp_path / "store"))
    assert torch.equal(stored(case.inputs()), model(case.inputs()))
    model.train()(case.inputs()).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_stacked_layers_as_trawl_does(case: Case) -> None:
    model = case.make().double()
    before = copy.deepcopy(model)
    places = [layer.projections[case.matrix] for layer in layers(model)]
    rows = places[0].shape[0]
    assert compress(model, Stacked(case.matrix, [2, rows]))[0]["error"] < 1e-14
    (report,) = compress(model, Stacked(case.matrix, [1, 6]))
    assert changed(before, model) == {f"{place.path}.weight" for place in places}
    one, other = (place.read(model) for place in places)
    ratio = (one * other).sum() / other.square().sum()  # one slice across layers: the matrices are multiples
    torch.testing.assert_close(one, ratio * other, rtol=0, atol=1e-12)
    assert torch.linalg.matrix_rank(one) == 6 and 0 < report["error"] < 1
    planted = case.make().double()
    basis, cores = torch.randn(rows, 3).double(), torch.randn(2, 3, places[0].shape[1]).double()
    for place, core in zip(places, cores, strict=True):
        place.write(planted, basis @ core)
    expected = [place.read(planted).clone() for place in places]
    assert compress(planted, Stacked(case.matrix, [2, 3]))[0]["error"] < 1e-13
    for place, weight in zip(places, expected, strict=True):
        torch.testing.assert_close(place.read(planted), weight, rtol=0, atol=1e-12)


def test_rotary_positions_break_the_algebra_of_heads() -> None:
    with pytest.raises(ConfigError, match=r"layers.0.self_attn: rotary positions stand between"):
        compress(llama(), TruncAtt(4, 4))


def test_a_compressed_projection_is_refused_by_methods_of_heads() -> None:
    model = vit()
    compress(model, AllHeads([0], [10, 5]))
    with pytest.raises(ConfigError, match=r"blocks.0.attn is compressed already"):
        compress(model, TruncAtt(4, 4))


def test_multiply_adds_of_modules_inside_attention() -> None:
    """Per token and layer: three times x U1 and four times the heads; and both products, which stay."""
    dense, model = vit(), vit()
    compress(model, AllHeads([0, 1], [10, 5]))
    counts = [multiply_adds(each, (3, 32, 32)) for each in (dense, model)]
    tokens, heads = 17, 3
    views = 4 * tokens * (24 * 10 + heads * 5 * (10 + 8))
    assert counts[0]["attention"] - counts[1]["attention"] == 2 * (4 * tokens * 24 * 24 - views)
    assert counts[0]["total"] - counts[0]["attention"] == counts[1]["total"] - counts[1]["attention"]
