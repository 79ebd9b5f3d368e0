"""What mode=bench measures of compressed language models."""

import sys

import pytest
import torch
from omegaconf import DictConfig

from attnlab.bench.workloads import compressed
from attnlab.bench.workloads.compressed import Compared, CompressedModel, Decomposition, Projections
from attnlab.compression.modules.tensorllm import HeadFactors
from attnlab.config.build import instantiate
from attnlab.config.check import compose
from attnlab.errors import ConfigError
from tests.bench.small import CPU, QUICK, rows, spoil


def config(*overrides: str) -> DictConfig:
    return compose("task=reasoning", *QUICK, "bench.text=5", *overrides)


def test_projections_and_the_whole_model_beside_the_dense_ones() -> None:
    cfg = config("bench.what=[projections,whole]", "compress=tensorllm", "compress.layers=[1]", "rank=4")
    checks, (projections, model) = rows(cfg)
    assert checks["compressed"]["output"] < 1e-12
    assert projections["layer"].endswith(".1") and projections["rate"] == model["rate"] > 1
    assert 0 < projections["multiply_adds_percent"] < 100
    for row in (projections, model):
        assert list(row["variants"]) == ["compressed", "dense"] and row["ratios"][0]["seconds"]["median"] > 0


def test_wrong_factors_give_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, HeadFactors, "project")
    words = "bench.what=[projections,whole]", "compress=tensorllm", "compress.layers=[0]", "rank=4"
    _, (_, whole) = rows(config(*words))
    assert "not found equal to its reference: output off by 0.0" in whole["ratios"][0]["not run"]
    monkeypatch.undo()
    right = CompressedModel.error
    monkeypatch.setattr(CompressedModel, "error", lambda *arguments: right(*arguments) + 0.01)
    for row in rows(config(*words))[1]:  # the check of the second workload counts, too
        assert "not found equal to its reference: output off by 0.0" in row["ratios"][0]["not run"]


def test_a_published_size_without_its_weights() -> None:
    cfg = config("bench.what=projections", "model=roberta-base", "compress=tensorllm", "compress.ranks=[312,26,4]",
                 "compress.layers=[-1]")  # fmt: skip
    settings = instantiate(cfg.bench)
    row = Projections.facts(Projections.lineup(cfg, settings), Projections.shapes(cfg, settings)[0], {})
    assert row["rate"] == 3.7409


def test_hooi_beside_tensorly(monkeypatch: pytest.MonkeyPatch) -> None:
    tucker = ("bench.what=decomposition", "compress=tensorllm", "compress.layers=[0]", "task.model.sample=roberta")
    cfg = config(*tucker, "compress.ranks=[12,4,3]", "bench.references=[tensorly]")
    checks, (row,) = rows(cfg)
    assert checks["hooi"]["ours"] <= checks["hooi"]["tensorly"] + 1e-3
    assert row["ratios"][0]["against"] == "tensorly" and row["ratios"][0]["seconds"]["median"] > 0
    monkeypatch.setitem(sys.modules, "tensorly", None)
    _, (row,) = rows(cfg)
    assert "TensorLy is not installed" in row["variants"]["tensorly"]["not run"]


def test_the_sizes_of_a_layer_are_found_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config("bench.what=decomposition", "compress=tensorllm", "compress.layers=[0]", "rank=4")
    settings = instantiate(cfg.bench)
    work = Decomposition(
        Decomposition.lineup(cfg, settings)[0], Decomposition.shapes(cfg, settings)[0], torch.float32, CPU
    )
    monkeypatch.setattr(Compared, "outline", lambda self: pytest.fail("a model is built inside a measured run"))
    work.run()


def test_a_model_that_does_not_fit_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "free_bytes", lambda device: 1000)
    _, (row,) = rows(config("bench.what=whole", "compress=tensorllm", "compress.layers=[0]", "rank=4"))
    assert "parameters in float32 take" in row["variants"]["compressed"]["not run"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench.what=projections"], "give compress=<method>"),
        (["bench.what=decomposition", "compress=mlp_svd", "rank=4"], "give compress=tensorllm"),
        (["bench.what=projections", "compress=mlp_svd", "rank=4"], "no module in place of an attention projection"),
    ],
)
def test_what_cannot_be_measured(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rows(config(*words))
