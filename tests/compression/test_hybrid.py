"""Several methods on one model: equal to one after the other, from the command line, refusals."""

from typing import Any

import pytest
import torch

from attnlab.compression import Method, compress
from attnlab.compression.calibration import calibrated
from attnlab.compression.counting import parameters
from attnlab.compression.methods.hybrid import Hybrid
from attnlab.compression.methods.laser import LASER
from attnlab.compression.methods.mlp_svd import MLPSVD
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.config.build import instantiate
from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.run.identity import recipe
from tests.compression.llama import llama, words
from tests.pretrained.tiny import tiny


def test_the_same_as_one_method_after_the_other() -> None:
    both, apart = llama(), llama()
    method = Hybrid({"laser": LASER(rho=0.3), "tensorllm": TensorLLM(rank=3)}, layers=[1])
    reports = compress(both, method)
    compress(apart, LASER(layers=[1], rho=0.3))
    compress(apart, TensorLLM(layers=[1], rank=3))
    assert torch.equal(both(words()), apart(words()))
    assert [report["path"] for report in reports] == [
        *(f"layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
        "layers.1.self_attn",
    ]
    assert [method.rank_of(report) for report in reports] == [None, None, None, 3]


def test_from_the_command_line() -> None:
    words = ("task=imagenet", "compress=laser_tensorllm", "rank=5", "compress.layers=[0]")
    cfg = compose(*words, "compress.steps.laser.rate=6", "compress.steps.tensorllm.stack_rank=3")
    method = instantiate(cfg.compress, path="compress")
    assert isinstance(method, Hybrid) and cfg.rank == 5
    laser, tensorllm = method.steps.values()
    assert isinstance(laser, LASER) and laser.rate == 6 and laser.rank is None and laser.matrices == ["mlp"]
    assert isinstance(tensorllm, TensorLLM) and (tensorllm.rank, tensorllm.stack_rank) == (5, 3)
    assert laser.layers == tensorllm.layers == [0]
    assert recipe(cfg, {}) != recipe(compose(*words), {})
    with pytest.raises(ConfigError, match=r"^compress.steps.laser.rats: no such key; nearest: compress.steps.laser.r"):
        compose("task=imagenet", "compress=laser_tensorllm", "compress.steps.laser.rats=6")


def test_steps_with_layers_and_a_budget_of_their_own() -> None:
    settings = "compress=laser_tensorllm compress.layers=null compress.steps.laser.layers=[0]"
    settings += " compress.steps.laser.keep=0.5 compress.steps.tensorllm.layers=[1]"
    cfg = compose("task=reasoning", *settings.split(), "compress.steps.tensorllm.ranks=[12,4]")
    reports = compress(tiny("llama"), instantiate(cfg.compress, path="compress"))
    mlp = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert [report["path"] for report in reports] == [*mlp, "model.layers.1.self_attn"]
    left = sum(64 * rank for report in reports[:3] for rank in report["ranks"].values())
    assert 0.4 * 3 * 960 < left <= 0.5 * 3 * 960
    assert reports[-1]["ranks"] == [12, 4, None]


def test_one_budget_for_all_steps() -> None:
    model, plain = llama(), llama()
    compress(model, Hybrid({"laser": LASER(), "tensorllm": TensorLLM()}, keep=0.5))
    attention = 2 * (2 * 48 * 24 + 2 * 16 * 24)
    dense = attention + 2 * 3 * 24 * 40
    left = dense - (parameters(plain)["total"] - parameters(model)["total"])
    assert 0.4 * dense < left <= 0.5 * dense


def test_calibration_reaches_the_step_that_asks_for_it() -> None:
    model = llama()
    steps: dict[str, Method] = {"laser": LASER(rank=4), "tensorllm": TensorLLM(rank=3, calibration="validation")}
    method = calibrated(Hybrid(steps), model, lambda grams: model(words()))
    reports = compress(model, method)
    assert ["output_error" in report for report in reports] == [False] * 6 + [True] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: compress(llama(), Hybrid({"a": LASER(matrices="o", rank=2), "b": TensorLLM(rank=2)})),
            "compress.steps: a and b both change layers.0.self_attn.o_proj",
        ),
        (lambda: Hybrid({}), "compress.steps: expected at least one method"),
        (lambda: Hybrid({"x": 3}), "compress.steps.x: expected a method"),
        (lambda: Hybrid({"x": MLPSVD(2)}, layers=[0]), "compress.layers: the step x"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_list_of_methods_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^compress=\[laser_mlp,tensorllm\]: .* nearest: laser_tensorllm"):
        compose("task=imagenet", "compress=[laser_mlp,tensorllm]")
