"""TensorLLM on timm's fused projections and on a Llama's separate ones with grouped keys."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from attnlab.compression import compress, densify, load, outline, save
from attnlab.compression.counting import multiply_adds, parameters
from attnlab.compression.methods.tensorllm import Sizes, Stack, TensorLLM
from attnlab.compression.modules.tensorllm import HeadFactors, HeadProjection
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import ATTENTION, Projection, huggingface
from tests.compression.llama import SIZES, llama, words
from tests.compression.models import NAMES, OPTIONS, compressed, images, layers, vit
from tests.pretrained.tiny import ids, logits, tiny

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
    """In every form; biases and other layers stay; the error is that of the matrices."""
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
            was, now = (places[matrix].read(source) for source in (dense, rebuilt))
            assert error == pytest.approx(float((was - now).norm() / was.norm()), rel=1e-9)
            lost, square = lost + float((was - now).square().sum()), square + float(was.square().sum())
        assert report["error"] == pytest.approx((lost / square) ** 0.5, rel=1e-9)
        assert report["rate"] == report["parameters_dense"] / report["parameters"]
    outline(outlined := case.make(), TensorLLM(**METHODS[method]))
    assert outlined.state_dict().keys() == model.state_dict().keys()
    fewer = sum(report["parameters_dense"] - report["parameters"] for report in reports)
    assert parameters(dense)["total"] - parameters(model)["total"] == fewer
    changed = {n for n, value in rebuilt.state_dict().items() if not torch.equal(value, dense.state_dict()[n])}
    expected = {f"{by_path[r['path']].projections[m].path}.weight" for r in reports for m in r["errors"]}
    assert changed == expected


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_ranks_cut_the_matrices_as_the_paper_says(name: str) -> None:
    """All heads have a common column space of rank R1 and a common row space of rank R2; full ranks are exact."""
    case = CASES[name]
    model, full = case.make().double(), case.make().double()
    expected = full(inputs(case, full))
    compress(full, TensorLLM(ranks=[24, 8]))
    torch.testing.assert_close(full(inputs(case, full)), expected, rtol=0, atol=1e-11)
    compress(model, TensorLLM(ranks=[10, 5]))
    rebuilt = densify(model, case.make().double())
    places = [layers(rebuilt)[0].projections[matrix] for matrix in ATTENTION]
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


def test_an_absorbed_core_computes_the_same_with_less() -> None:
    assert f"{rate(4096, 16, 256, (208, 13, 1), absorbed=True):.2f}" == "78.46"
    assert f"{rate(4096, 32, 128, (1920, 60, 1), absorbed=True):.2f}" == "8.53"
    for ranks in ([12, 2, 1], [20, 1]):
        plain, absorbed = (llama(kv_heads=6).double() for _ in range(2))
        before = compress(plain, TensorLLM(ranks=ranks))[0]
        after = compress(absorbed, TensorLLM(ranks=ranks, absorb=True))[0]
        assert after["rate"] == before["rate_absorbed"] > before["rate"] and "rate_absorbed" not in after
        torch.testing.assert_close(plain(words()), absorbed(words()), rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_first_product_is_computed_once_and_for_its_own_input() -> None:
    model = llama().double()
    compress(model, TensorLLM(ranks=[6, 2]))
    attention: Any = model.layers[0].self_attn  # type: ignore[index, union-attr]
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    x, other = (torch.randn(2, 5, 24).double() for _ in range(2))
    alone = [projection(x.clone()) for projection in (q, k, v)]
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        real = torch.Tensor.__matmul__

        def multiply(a: Tensor, b: Tensor) -> Tensor:
            calls.append(b.shape[-1])
            return real(a, b)

        patch.setattr(torch.Tensor, "__matmul__", multiply)
        assert all(torch.equal(projection(x), y) for projection, y in zip((q, k, v), alone, strict=True))
    assert calls.count(6) == 1  # x U1
    assert torch.equal(q(x), alone[0]) and not torch.equal(q(other), alone[0])
    x.mul_(2)
    torch.testing.assert_close(k(x) - k.bias, 2 * (alone[1] - k.bias))
    x.mul_(0.5)
    torch.testing.assert_close(v(x), alone[2])


def test_multiply_adds_are_those_of_the_spec() -> None:
    """2 d R1 + 4 h (R1 R2 + R2 dv) of one token, with x U1 computed once for q, k and v."""
    model = llama(kv_heads=6, dim=48)
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
    merged = compressed(TensorLLM(ranks=[10, 8]))
    counts = [multiply_adds(other, (3, 32, 32))["attention"] for other in (vit(), merged)]
    outlined = vit().to("meta")
    with torch.device("meta"):
        outline(outlined, TensorLLM(ranks=[10, 8]))
    assert multiply_adds(outlined, (3, 32, 32))["attention"] == counts[1]
    assert counts[0] - counts[1] == 2 * 17 * (4 * 24 * 24 - (2 * 24 * 10 + 4 * 10 * 24))


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


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model() -> None:
    """As one graph, although eager calls cache products."""
    for options in ({"kv_heads": 2}, {"kv_heads": 6}):
        model = llama(**options)
        compress(model, TensorLLM(ranks=[6, 2] if options["kv_heads"] == 2 else [6, 2, 1]))
        compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(words()), model(words()))


@torch.no_grad()
def test_products_after_autocast_have_the_type_of_the_model() -> None:
    model = tiny("gptj")
    compress(model, TensorLLM(ranks=[6, 3, 2]))
    before = logits(model, ids())
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(logits(model, ids()).float(), before)
    assert torch.equal(logits(model, ids()), before)


def test_a_model_of_several_types_keeps_them(tmp_path: Path) -> None:
    model = tiny("gpt2").bfloat16()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.float()
    torch.nn.init.normal_(model.get_parameter("transformer.h.0.ln_1.weight"))
    compress(model, TensorLLM(ranks=[8, 4]))
    save(model, tmp_path, "tiny", huggingface.options_of(model))
    before, after = model.state_dict(), load(tmp_path).state_dict()
    assert all(torch.equal(value, after[name]) and value.dtype == after[name].dtype for name, value in before.items())


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": [25, 4]}, r"compress.ranks=\[25, 4\]: layers.0.self_attn takes R1 1 to 24"),
        ({"ranks": [10, 9]}, r"R2 1 to 8 \(head width\)"),
        ({"rank": 9}, r"rank=9: layers.0.self_attn takes"),
        (
            {"ranks": [10, 5, 3]},
            r"heads of different numbers \(q 6, k 2, v 2, o 6\), .*coupled=true with 1 to 2, for q",
        ),
        ({"ranks": [10, 5, 3], "coupled": True}, r"the stack rank 3: .*self_attn takes 1 to 2 \(matrices q, o\)"),
        ({"ranks": [10, 5], "layout": "released"}, r"compress.layout=released: .*self_attn has a projection of 48"),
        ({"ranks": [10, 5], "layers": [2]}, r"compress.layers: 2: expected 0 to 1, or -1 for the last to -2"),
        ({"ranks": [10, 5], "layers": []}, r"compress.layers=\[\]: expected at least one layer"),
    ],
)
def test_invalid_ranks_are_refused_before_a_weight_is_read(options: dict[str, Any], message: str) -> None:
    model = llama()
    for plain in (model, llama().to("meta")):
        with pytest.raises(ConfigError, match=message):
            TensorLLM(**options).units(plain, layers(plain))


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = llama()
    model.get_parameter("layers.1.self_attn.v_proj.weight").data[0, 0] = torch.inf
    with pytest.raises(DataError, match=r"layers.1.self_attn.v_proj: its weight has values that are not numbers"):
        compress(model, TensorLLM(ranks=[10, 5]))
