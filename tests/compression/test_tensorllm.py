"""TensorLLM on timm's fused projections and on a Llama's separate ones with grouped keys."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from attnlab.compression import compress, densify, load, outline, save
from attnlab.compression.counting import multiply_adds
from attnlab.compression.methods.head_tensor import Sizes, Stack
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.compression.modules.tensorllm import HeadFactors, HeadProjection
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import ATTENTION, Layer, Projection, family_of
from tests.compression.llama import SIZES, llama, words
from tests.compression.models import NAMES, OPTIONS, images, vit

RATES = {  # of table II: model width, heads, head width, ranks, the printed rate
    "RoBERTa HotpotQA": ((768, 12, 64), (720, 60, 3), "1.12"),
    "RoBERTa HotpotQA, the other solution": ((768, 12, 64), (636, 53, 4), "1.12"),
    "RoBERTa FEVER": ((768, 12, 64), (312, 26, 4), "3.74"),
    "RoBERTa Bios": ((768, 12, 64), (180, 15, 4), "8.78"),
    "RoBERTa WikidataQA": ((768, 12, 64), (444, 37, 3), "2.52"),
    "GPT-J HotpotQA": ((4096, 16, 256), (64, 4, 2), "247.30"),
    "GPT-J FEVER": ((4096, 16, 256), (672, 42, 4), "14.69"),
    "GPT-J Bios": ((4096, 16, 256), (208, 13, 1), "74.68"),
    "GPT-J WikidataQA": ((4096, 16, 256), (304, 19, 2), "46.77"),
    "Llama 2 HotpotQA, FEVER, Bios": ((4096, 32, 128), (1920, 60, 3), "3.54"),
    "Llama 2 WikidataQA": ((4096, 32, 128), (1920, 60, 1), "5.81"),
}


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    about: tuple[str, dict[str, Any]]  # for a saved folder


SQUARE = {"heads": 3, "kv_heads": 3}  # heads that fill the model's width
CASES = {
    "timm": Case(vit, images, (NAMES[0], OPTIONS)),
    "llama": Case(llama, words, ("llama", SIZES)),
    "llama without groups": Case(lambda: llama(kv_heads=6), words, ("llama", {**SIZES, "kv_heads": 6})),
    "square llama": Case(lambda: llama(**SQUARE), words, ("llama", {**SIZES, **SQUARE})),
}
GROUPED = "llama"
METHODS: dict[str, dict[str, Any]] = {
    "joint": {"ranks": [10, 5]},
    "stacked": {"ranks": [10, 5, 3]},
    "stack of four": {"ranks": [10, 5, 4]},
    "one": {"ranks": [9, 4, 1]},
    "coupled": {"ranks": [10, 5, 1], "coupled": True},
    "tied": {"rank": 3, "stack_rank": 2},
    "factors": {"ranks": [6, 2]},
    "joined": {"ranks": [24, 1]},
    "merged": {"ranks": [5, 8, 4]},
    "products shared": {"ranks": [6, 2, 1]},
    "products shared by two": {"ranks": [6, 2, 1], "coupled": True, "matrices": ["q", "k", "v"]},
    "dense": {"ranks": [24, 7, 4]},
    "last layer": {"ranks": [10, 5], "layers": [-1]},
    "released": {"ranks": [10, 5, 3], "layout": "released"},
    "absorbed": {"ranks": [12, 2, 1], "absorb": True},
    "absorbed, joint": {"ranks": [20, 1], "absorb": True},
    "q and k": {"ranks": [10, 5, 1], "matrices": ["q", "k"], "coupled": True},
    "o": {"ranks": [10, 5], "matrices": ["o"]},
}


def layers(model: nn.Module) -> list[Layer]:
    return family_of(model).layers(model)


def inputs(case: Case, model: nn.Module) -> Tensor:
    x = case.inputs()
    return x.to(next(model.parameters()).dtype) if x.is_floating_point() else x


def runs(case: str, method: str) -> bool:
    options = METHODS[method]
    if case == GROUPED and not options.get("coupled"):
        return "stack_rank" not in options and len(options["ranks"]) == 2
    if "layout" in options or case == "square llama":
        return "layout" in options and case in ("timm", "square llama")
    return case != "timm" or method in ("stacked", "dense", "q and k")  # fused projections


PAIRS = [(case, method) for case in CASES for method in METHODS if runs(case, method)]


@pytest.mark.parametrize(("name", "method"), PAIRS)
@torch.no_grad()
def test_the_factors_compute_what_their_matrices_do(name: str, method: str) -> None:
    """Whichever form is cheapest; biases and layers that are not chosen stay; the error is that of the matrices."""
    case = CASES[name]
    dense, model = case.make().double(), case.make().double()
    reports = compress(model, TensorLLM(**METHODS[method]))
    rebuilt = densify(model, case.make().double())
    y = model(inputs(case, model))
    torch.testing.assert_close(y, rebuilt(inputs(case, model)), rtol=0, atol=1e-11)
    assert float((y - dense(inputs(case, model))).norm() / y.norm()) > 1e-3
    by_path = {layer.attention: layer for layer in layers(dense)}
    assert [report["path"] for report in reports] == list(by_path)[-len(reports) :]
    for report in reports:
        places = by_path[report["path"]].projections
        lost = square = 0.0
        for matrix, error in report["errors"].items():
            was, now = (places[matrix].read(each) for each in (dense, rebuilt))
            assert error == pytest.approx(float((was - now).norm() / was.norm()), rel=1e-9)
            lost, square = lost + float((was - now).square().sum()), square + float(was.square().sum())
        assert report["error"] == pytest.approx((lost / square) ** 0.5, rel=1e-9)
    changed = {n for n, value in rebuilt.state_dict().items() if not torch.equal(value, dense.state_dict()[n])}
    expected = {f"{by_path[r['path']].projections[m].path}.weight" for r in reports for m in r["errors"]}
    assert changed == expected


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_full_ranks_change_nothing(name: str) -> None:
    case = CASES[name]
    model = case.make().double()
    expected = model(inputs(case, model))
    compress(model, TensorLLM(ranks=[24, 8]))
    torch.testing.assert_close(model(inputs(case, model)), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_ranks_cut_the_matrices_as_the_paper_says(name: str) -> None:
    """One column space of all heads of U1's rank, and of the heads' widths one of U2's."""
    model = CASES[name].make().double()
    compress(model, TensorLLM(ranks=[10, 5]))
    rebuilt = densify(model, CASES[name].make().double())
    places = [layers(rebuilt)[0].projections[each] for each in ATTENTION]
    tensor = torch.cat([place.split(place.read(rebuilt)) for place in places])
    assert torch.linalg.matrix_rank(tensor.transpose(0, 1).flatten(1)) == 10
    assert torch.linalg.matrix_rank(tensor.movedim(2, 0).flatten(1)) == 5


@torch.no_grad()
def test_the_released_layout_cuts_the_models_width() -> None:
    """Chunks of the residual stream share a subspace: those of q's columns and of o's rows."""
    model = llama(**SQUARE).double()
    compress(model, TensorLLM(ranks=[10, 5, 4], layout="released"))
    rebuilt = densify(model, llama(**SQUARE).double())
    places = layers(rebuilt)[0].projections
    q, o = places["q"].read(rebuilt), places["o"].read(rebuilt)  # (24, 24), three chunks of 8
    chunks = torch.cat([q.unflatten(1, (3, 8)).movedim(1, 0), o.unflatten(0, (3, 8)).mT], 0)  # (6, 24, 8)
    assert torch.linalg.matrix_rank(chunks.transpose(0, 1).flatten(1)) == 10
    assert torch.linalg.matrix_rank(chunks.flatten(0, 1)) == 5
    assert torch.linalg.matrix_rank(places["q"].split(q).flatten(0, 1)) == 8  # heads have no common subspace


def rate(dim: int, heads: int, width: int, ranks: tuple[int, int, int], absorbed: bool = False) -> float:
    """CR = 4 d h dv / (h R1 R2 R3 + d R1 + dv R2 + 4 R3)."""
    stack, place = Stack(ATTENTION, heads, ranks[2]), Projection("", (heads * width, dim), "out", heads)
    sizes = Sizes(dict.fromkeys(ATTENTION, place), dim, width, ranks[:2], (stack,))
    return sizes.original / sizes.parameters(absorbed)


@pytest.mark.parametrize("row", RATES)
def test_rates_of_table_2(row: str) -> None:
    sizes, ranks, printed = RATES[row]
    assert f"{rate(*sizes, ranks):.2f}" == printed


def test_what_absorption_gives_for_nothing() -> None:
    assert f"{rate(4096, 16, 256, (208, 13, 1), absorbed=True):.2f}" == "78.46"
    assert f"{rate(4096, 32, 128, (1920, 60, 1), absorbed=True):.2f}" == "8.53"


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_sizes(name: str, method: str) -> None:
    """Parameters of the report, of the outline, and of the paper's formula; multiply-adds of the cheapest form."""
    case = CASES[name]
    dense, model, outlined = (case.make() for _ in range(3))
    before = sum(p.numel() for p in dense.parameters())
    reports = compress(model, TensorLLM(**METHODS[method]))
    outline(outlined, TensorLLM(**METHODS[method]))
    assert outlined.state_dict().keys() == model.state_dict().keys()
    saved = sum(report["parameters_dense"] - report["parameters"] for report in reports)
    assert before - sum(p.numel() for p in model.parameters()) == saved
    for report in reports:
        assert report["rate"] == report["parameters_dense"] / report["parameters"]
        owner = model.get_submodule(f"{report['path']}.factors")
        proxies = [part for part in model.modules() if isinstance(part, HeadProjection) and part._owner == [owner]]
        assert isinstance(owner, HeadFactors) and len(proxies) == len(report["errors"])
        assert sum(proxy.multiply_adds(3) for proxy in proxies) <= 3 * report["parameters_dense"]


def test_absorbing_the_core_computes_the_same_with_less() -> None:
    for ranks in ([12, 2, 1], [20, 1]):
        models = [llama(kv_heads=6).double() for _ in range(2)]
        counts = []
        for model, absorb in zip(models, (False, True), strict=True):
            (report, _) = compress(model, TensorLLM(ranks=ranks, absorb=absorb))
            counts.append(report["rate"])
            assert ("rate_absorbed" in report) != absorb
            if not absorb:
                expected = report["rate_absorbed"]
        assert counts[1] == expected > counts[0]
        torch.testing.assert_close(models[0](words()), models[1](words()), rtol=0, atol=1e-12)


def test_multiply_adds_are_those_of_the_spec() -> None:
    """2 d R1 + 4 h (R1 R2 + R2 dv) of one token, with x U1 computed once for q, k and v."""
    model, dense = llama(kv_heads=6, dim=48), llama(kv_heads=6, dim=48)
    compress(model, TensorLLM(ranks=[6, 2]))
    (owner,) = (m for m in model.layers[0].modules() if isinstance(m, HeadFactors))  # type: ignore[index, union-attr]
    assert owner.forms == {"out": "factors", "in": "factors"}
    proxies = [m for m in model.layers[0].modules() if isinstance(m, HeadProjection)]  # type: ignore[index, union-attr]
    assert sum(proxy.multiply_adds(5) for proxy in proxies) == 5 * (2 * 48 * 6 + 4 * 6 * (6 * 2 + 2 * 8))
    shared = llama(kv_heads=6, dim=48)
    compress(shared, TensorLLM(ranks=[6, 2, 1]))  # U3 after the product with the only core
    proxies = [m for m in shared.layers[0].modules() if isinstance(m, HeadProjection)]  # type: ignore[index, union-attr]
    products = 2 * 48 * 6 + 2 * 6 * 6 * 2 + 3 * 6 * 2 + 4 * 6 * 2 * 8
    assert sum(proxy.multiply_adds(5) for proxy in proxies) == 5 * products
    merged = vit()
    compress(merged, TensorLLM(ranks=[10, 8]))
    counts = [multiply_adds(each, (3, 32, 32))["attention"] for each in (vit(), merged)]
    outlined = vit().to("meta")
    with torch.device("meta"):
        outline(outlined, TensorLLM(ranks=[10, 8]))
    assert multiply_adds(outlined, (3, 32, 32))["attention"] == counts[1]
    assert counts[0] - counts[1] == 2 * 17 * (4 * 24 * 24 - (2 * 24 * 10 + 4 * 10 * 24))
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in dense.parameters())


# --- at run time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "method"), [pair for pair in PAIRS if pair[0] != "timm" or pair[1] == "q and k"])
def test_stored_saved_and_trained(name: str, method: str, tmp_path: Path) -> None:
    case, made = CASES[name], TensorLLM(**METHODS[method])
    model, stored = case.make(), case.make()
    compress(model, made, tmp_path / "store")
    assert all(report["stored"] for report in compress(stored, made, tmp_path / "store"))
    save(model, tmp_path / "saved", *case.about)
    with torch.no_grad():
        expected = model(case.inputs())
        for other in (stored, load(tmp_path / "saved"), copy.deepcopy(model)):
            assert torch.equal(other(case.inputs()), expected)
    y = model.train()(case.inputs())
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    y.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():  # products of weights follow the weights
        for p in model.parameters():
            p.mul_(1.1)
        now = model.eval()(case.inputs())
    assert not torch.equal(now, expected)
    torch.testing.assert_close(now, model(case.inputs()), rtol=1e-4, atol=1e-4)


def test_the_first_product_is_computed_once_and_for_its_own_input() -> None:
    model = llama().double()
    compress(model, TensorLLM(ranks=[6, 2]))
    attention: Any = model.layers[0].self_attn  # type: ignore[index, union-attr]
    owner: HeadFactors = attention.factors
    x, other = (torch.randn(2, 5, 24).double() for _ in range(2))
    with torch.no_grad():
        alone = {name: getattr(attention, f"{name}_proj")(x.clone()) for name in "qkv"}
        owner._shared.clear()
        for name in "qkv":
            assert torch.equal(getattr(attention, f"{name}_proj")(x), alone[name])
        assert not owner._shared
        q = attention.q_proj(x)
        assert not torch.equal(attention.q_proj(other), q)
        x.mul_(2)
        torch.testing.assert_close(
            attention.k_proj(x) - attention.k_proj.bias, 2 * (alone["k"] - attention.k_proj.bias)
        )
        x.mul_(0.5)
        torch.testing.assert_close(attention.v_proj(x), alone["v"])
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        real = torch.Tensor.__matmul__

        def multiply(a: Tensor, b: Tensor) -> Tensor:
            calls.append(b.shape[-1])
            return real(a, b)

        patch.setattr(torch.Tensor, "__matmul__", multiply)
        owner._shared.clear()
        for name in "qkv":
            getattr(attention, f"{name}_proj")(x)
    assert calls.count(6) == 1  # x U1


def test_half_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = llama().to(dtype)
        compress(model, TensorLLM(ranks=[10, 5]))
        assert all(parameter.dtype == dtype for parameter in model.parameters())
        assert model(words()).isfinite().all()


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model() -> None:
    """As one graph, although products are kept between calls otherwise."""
    for options in ({"kv_heads": 2}, {"kv_heads": 6}):
        model = llama(**options)
        compress(model, TensorLLM(ranks=[6, 2] if options["kv_heads"] == 2 else [6, 2, 1]))
        compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(words()), model(words()))


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": [25, 4]}, r"compress.ranks=\[25, 4\]: layers.0.self_attn takes R1 1 to 24"),
        ({"ranks": [10, 9]}, r"R2 1 to 8 \(head width\)"),
        ({"rank": 9}, r"rank=9: layers.0.self_attn takes"),
        (
            {"ranks": [10, 5, 3]},
            r"heads of different numbers \(q 6, k 2, v 2, o 6\); leave it out, or give compress.cou",
        ),
        (
            {"ranks": [10, 5, 3], "coupled": True},
            r"the stack rank 3: layers.0.self_attn takes 1 to 2 \(matrices q, o\)",
        ),
        (
            {"ranks": [10, 5], "layout": "released"},
            r"compress.layout=released: layers.0.self_attn has a projection of 48",
        ),
        ({"ranks": [10, 5], "layers": [2]}, r"compress.layers: 2: expected 0 to 1, or -1 for the last to -2"),
        ({"ranks": [10, 5], "layers": []}, r"compress.layers=\[\]: expected at least one layer"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_weight_is_read(options: dict[str, Any], message: str) -> None:
    model = llama()
    for each in (model, llama().to("meta")):
        with pytest.raises(ConfigError, match=message):
            TensorLLM(**options).units(each, layers(each))


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = llama()
    model.get_parameter("layers.1.self_attn.v_proj.weight").data[0, 0] = torch.inf
    with pytest.raises(DataError, match=r"layers.1.self_attn.v_proj: its weight has values that are not numbers"):
        compress(model, TensorLLM(ranks=[10, 5]))


def test_an_interrupted_compression_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[int] = []
    real = TensorLLM._fit

    def fit(self: TensorLLM, *arguments: Any) -> Any:
        fitted.append(1)
        if len(fitted) == 2:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(TensorLLM, "_fit", fit)
    with pytest.raises(KeyboardInterrupt):
        compress(llama(), TensorLLM(ranks=[10, 5]), tmp_path)
    reports = compress(llama(), TensorLLM(ranks=[10, 5]), tmp_path)
    assert len(fitted) == 3 and reports[0]["stored"] and "stored" not in reports[1]
