"""TensorLLM on tiny models of every family of language models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.compression import compress, densify, load, save
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.pretrained import ATTENTION, Layer, family_of, huggingface
from tests.pretrained.tiny import OPTIONS, ids, logits, tiny


def two_thirds(layer: Layer) -> list[int]:
    """Two thirds of both modes."""
    q = layer.projections["q"]
    return [2 * q.shape[1] // 3, max(1, 2 * q.width // 3)]


@pytest.mark.parametrize("kind", OPTIONS)
@torch.no_grad()
def test_factors_compute_what_their_matrices_do(kind: str) -> None:
    """With every form of the stack that the family's heads allow; at full ranks nothing changes."""
    dense = tiny(kind).double()
    layer = family_of(dense).layers(dense)[0]
    q, k = layer.projections["q"], layer.projections["k"]
    forms: list[dict[str, Any]] = [{}, {"coupled": True}]
    forms += [{"ranks": [*two_thirds(layer), 3]}, {"layout": "released"}] if q.heads == k.heads else []
    for options in forms:
        if options.get("layout") and q.shape[0] != q.shape[1]:
            continue
        model = tiny(kind).double()
        method = TensorLLM(**{"ranks": two_thirds(layer) + ([1] if "coupled" in options else []), **options})
        reports = compress(model, method)
        rebuilt = densify(model, tiny(kind).double())
        y = logits(model, ids())
        torch.testing.assert_close(y, logits(rebuilt, ids()), rtol=0, atol=1e-6)  # GPT-J's products are in float32
        assert float((y - logits(dense, ids())).norm()) > 1e-5 and all(0 < r["error"] < 1 for r in reports)
        assert {name for report in reports for name in report["errors"]} == set(ATTENTION)
    full = tiny(kind).double()
    compress(full, TensorLLM(ranks=[q.shape[1], q.width]))
    torch.testing.assert_close(logits(full, ids()), logits(dense, ids()), rtol=0, atol=1e-6)


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
