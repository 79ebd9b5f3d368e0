"""Closed forms, and totals of real models. The rows of table 1: tests/report/test_published.py."""

import copy
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnlab.compression import compress, outline
from attnlab.compression.counting import multiply_adds, parameters, rate
from attnlab.compression.methods.cp_slimatt import CPSlimAtt
from attnlab.compression.methods.irratt import IrrAtt
from attnlab.compression.methods.laser import LASER
from attnlab.compression.methods.mlp_svd import MLPSVD
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.compression.methods.truncatt import GlobalSVD, TruncAtt
from tests.compression.llama import llama
from tests.compression.models import compressed, images, vit


@pytest.mark.parametrize(
    ("name", "adds", "numbers"),
    [
        ("deit_small_patch16_224", 4_608_338_304, 22_050_664),
        ("deit_base_patch16_224", 17_582_740_224, 86_567_656),
    ],
)
def test_totals_of_deit(name: str, adds: int, numbers: int) -> None:
    with torch.device("meta"):
        model: Any = timm.create_model(name)
    assert multiply_adds(model)["total"] == adds
    assert parameters(model)["total"] == numbers
    n, f, h, d = 197, model.embed_dim, model.blocks[0].attn.num_heads, 64
    assert multiply_adds(model)["attention"] == 12 * (4 * n * f * d * h + 2 * h * n * n * d)


def test_the_papers_formulas() -> None:
    """Per block, r = rank of a head, R = total: section 2 and table 1."""
    n, f, h, blocks = 17, 24, 3, 2
    v = n * h * 4 * (2 * f + n)  # value-output, rank 4
    for method, expected in (
        (TruncAtt(5, 4), n * h * 5 * (2 * f + n) + v),
        (GlobalSVD(10, 4), 2 * n * f * 10 + n * n * 10 + v),
        (CPSlimAtt(10, 4), 2 * n * f * 10 + n * n * h * 10 + v),
        (IrrAtt(10, 4), 2 * n * f * 10 + n * n * 10 + h * h * n * n + v),
        (IrrAtt(10, 4, fusion="identity"), 2 * n * f * 10 + n * n * 10 + v),
    ):
        model = vit()
        outline(model, method)
        assert multiply_adds(model, (3, 32, 32))["attention"] == blocks * expected
    dense, model = vit(), vit()
    outline(model, MLPSVD(7))
    before, after = (multiply_adds(m, (3, 32, 32))["total"] for m in (dense, model))
    assert before - after == blocks * (8 * n * f * f - 10 * n * f * 7)


def test_against_torchs_counter() -> None:
    """Without padding: torch's counter counts products of matrices, without norms."""
    model = compressed(TruncAtt(4, 4, 9))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # it does not know the CPU's fused kernel
        model(images(1))
    norms = 5 * 5 * 17 * 24
    assert counter.get_total_flops() / 2 == multiply_adds(model, (3, 32, 32))["total"] - norms


def test_the_rate_of_replaced_matrices() -> None:
    """By hand: fused and separate projections, a matrix that stays dense beside others, whole attention, MLPs, none."""
    names = ["parameters", "parameters_dense", "multiply_adds_factorised", "multiply_adds_dense"]

    def counts(dense: Any, method: Any) -> list[float]:
        model = copy.deepcopy(dense)
        before = sum(p.numel() for p in dense.parameters())
        compress(model, method)
        result = rate(dense, model)
        assert result["rate"] == pytest.approx(result["parameters_dense"] / result["parameters"])
        saving = 100 * (before - sum(p.numel() for p in model.parameters())) / before
        assert result["model_saving_percent"] == pytest.approx(saving)
        return [result[name] for name in names]

    core = 24 * 6 + 8 * 2
    adds = 24 * 6 + 9 * (12 + 16) + 3 * 2 * (8 + 24)  # x U1, then q, k and v; o with U1 and its cores as one matrix
    assert counts(vit(), TensorLLM(ranks=[6, 2], layers=[0])) == [core + 144, 2304, adds, 2304]
    two = TensorLLM(ranks=[6, 2], layers=[0], matrices=["q", "v"])
    assert counts(vit(), two) == [core + 72, 1152, 24 * 6 + 6 * (12 + 16), 1152]
    grouped = 2 * 24 * 8 * (6 + 2)
    assert counts(llama(), TensorLLM(ranks=[6, 2], layers=[1]))[:2] == [core + 16 * 12, grouped]
    assert counts(vit(), TruncAtt(4, 4)) == [2 * 4 * 24 * 12, 2 * 2304] * 2
    assert counts(vit(), MLPSVD(5)) == [4 * 5 * 120, 4 * 96 * 24] * 2
    everything = 2 * (2304 + 2 * 96 * 24)
    dense = LASER(layers=[0], matrices="fc1", rank=5, factorised=False)
    assert counts(vit(), dense) == [everything] * 4  # written back dense: nothing is smaller
