"""Gram matrices of calibration data, and weighted methods."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attnlab.compression import compress, densify, outline
from attnlab.compression.calibration import Grams, calibrated, collect
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.errors import ConfigError
from attnlab.pretrained import ATTENTION, family_of
from tests.compression.llama import llama, words
from tests.compression.models import images, vit

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "llama": (llama, lambda: words(6)),
    "timm": (vit, lambda: images(6).double()),
}


def inputs_of(model: nn.Module, data: Tensor, path: str) -> Tensor:
    seen: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(data)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", CASES)
def test_gram_matrices_are_those_of_the_inputs(name: str) -> None:
    make, data = CASES[name]
    model, x = make().double(), data()
    paths = [place.path for layer in family_of(model).layers(model) for place in layer.projections.values()]
    with torch.no_grad(), collect(model, paths) as grams:
        model(x[:2])
        model(x[2:])
    for path in paths:
        flat = inputs_of(model, x, path).flatten(0, 1)
        torch.testing.assert_close(grams.of(path), flat.T @ flat / len(flat))
        assert grams.tokens[path] == len(flat)
    damped = grams.of(paths[0], 0.5)
    plain = grams.of(paths[0])
    torch.testing.assert_close(damped - plain, 0.5 * plain.diagonal().mean() * torch.eye(len(plain)).double())
    with torch.no_grad():
        model(x)
    assert grams.tokens[paths[0]] == len(inputs_of(model, x, paths[0]).flatten(0, 1))  # the hooks are gone


def test_padding_does_not_count() -> None:
    model, path = llama().double(), "layers.1.self_attn.q_proj"
    with torch.no_grad(), collect(model, [path]) as grams:
        grams.mask = torch.arange(7).expand(2, 7) >= torch.tensor([[0], [4]])
        model(words())
    mask = torch.arange(7).expand(2, 7) >= torch.tensor([[0], [4]])
    rows = inputs_of(model, words(), path)[mask]
    assert grams.tokens[path] == 10
    torch.testing.assert_close(grams.of(path), rows.T @ rows / 10)
    q, k = torch.ones(2, 1, 3)
    changing = Grams()
    for name, x in (("q", q), ("k", q), ("q", q)):
        changing.add(name, x)
    with pytest.raises(ConfigError, match="k and q share their input in some batches"):
        changing.add("k", k)
    with pytest.raises(ConfigError, match="received no input; the calibration data is empty"):
        Grams().of(path)


@pytest.mark.parametrize("name", ["llama", pytest.param("timm", marks=pytest.mark.slow)])
def test_outputs_over_the_calibration_data_are_better(name: str, tmp_path: Path) -> None:
    """The reported errors are those of the projections' outputs, and lower than without weights."""
    make, data = CASES[name]
    x, plain = data(), make().double()
    result = []
    for weighted in (False, True):
        model = make().double()
        method = calibrated(
            TensorLLM(ranks=[8, 4], layers=[0], calibration="validation", weighted=weighted, damping=1e-3),
            model,
            lambda grams, model=model: model(x),  # type: ignore[misc]
        )
        report = compress(model, method, tmp_path)[0]
        result.append(report)
        rebuilt = densify(model, make().double())
        layer = family_of(plain).layers(plain)[0]
        for matrix in ATTENTION:
            place = layer.projections[matrix]
            flat = inputs_of(plain, x, place.path).flatten(0, 1)
            was, now = (flat @ place.read(source).T for source in (plain, rebuilt))
            assert report["output_errors"][matrix] == pytest.approx(float((was - now).norm() / was.norm()), rel=1e-6)
    assert result[1]["output_error"] < 0.98 * result[0]["output_error"]
    assert result[1]["error"] > result[0]["error"]
    assert "stored" not in result[1]  # another result than without weights
    model = make().double()
    other = calibrated(method, model, lambda grams: model(x[:3]))
    assert "stored" not in compress(model, other, tmp_path)[0]  # other calibration data


def test_a_matrix_alone_has_the_best_outputs_over_the_damped_data() -> None:
    """With whole heads: as good as the truncated SVD of W C^1/2, C with damping times its mean diagonal added."""
    damping, path = 0.5, "layers.0.self_attn.q_proj"
    plain = llama().double()
    with torch.no_grad():  # inputs of unlike size
        plain.get_parameter("layers.0.norm1.weight").copy_(torch.logspace(0, -3, 24))
    x = inputs_of(plain, words(6), path).flatten(0, 1)
    gram = x.T @ x / len(x)
    values, vectors = torch.linalg.eigh(gram + damping * gram.diagonal().mean() * torch.eye(24).double())
    weight, root = plain.get_parameter(f"{path}.weight").detach(), vectors * values.sqrt()
    cut = torch.linalg.svdvals(weight @ root)
    best = float(cut[7:].norm() / cut.norm())

    def lost(used: float) -> float:
        model = copy.deepcopy(plain)
        method = TensorLLM(ranks=[7, 8], layers=[0], matrices=["q"], weighted=True, damping=used)
        compress(model, calibrated(method, model, lambda grams: model(words(6))))
        error = densify(model, llama().double()).get_parameter(f"{path}.weight").detach() - weight
        return float((error @ root).norm() / cut.norm())

    assert best * (1 - 1e-9) < lost(damping) < 1.005 * best
    assert lost(1e-3) > 1.02 * best


def test_without_calibration_data_it_is_refused_and_sizes_are_known() -> None:
    method = TensorLLM(ranks=[8, 4], weighted=True)
    assert method.calibration == "validation"
    outline(llama(), method)
    with pytest.raises(ConfigError, match="compress.calibration: there is no calibration data"):
        compress(llama(), method)
    plain = TensorLLM(ranks=[8, 4])
    assert calibrated(plain, llama(), lambda grams: pytest.fail("no data is needed")) is plain
