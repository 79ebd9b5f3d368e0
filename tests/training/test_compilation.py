"""hardware.compile: the same losses and gradients, few graphs for many lengths, and words that say what is compiled."""

import copy
import functools
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.config.check import compose
from attnlab.models.sequence import SequenceModel
from attnlab.run import device
from attnlab.tasks.base import Trains, task_of
from attnlab.training.compiled import Compiled
from tests.golden.runs import TEXT
from tests.tasks.conftest import Start

SMALL = ["hardware=cpu", *TEXT.split()]
SHAPES = [(3, 40, 7), (2, 33, 9), (5, 61, 4), (6, 70, 5)]  # sentences, inputs, tokens
GRAPHS = {"mustc": 4, "slurp": 4, "xsum": 4, "wmt16": 2}  # at most; of the encoder and of the loss


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compile without a C++ compiler -> a list with one entry of each graph that is compiled."""
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        sizes.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return sizes


def step(model: SequenceModel, shape: tuple[int, int, int], mels: int | None, compiled: Any) -> list[Tensor]:
    """Losses and gradients of a batch."""
    torch.manual_seed(shape[1])
    rows, frames, tokens = shape
    inputs = torch.randint(4, 50, (rows, frames))
    inputs = torch.randn(rows, frames, mels, dtype=torch.float64) if mels else inputs
    lengths, text = torch.randint(frames // 2, frames + 1, (rows,)), torch.randint(4, 50, (rows, tokens))
    lengths[0] = frames
    model.zero_grad()
    losses = model.token_losses(inputs, lengths, text, text, 1, 0.1, compiled).smoothed
    losses.sum().backward()
    return [losses.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("task", [x if x == "wmt16" else pytest.param(x, marks=pytest.mark.slow) for x in GRAPHS])
def test_sequences_of_many_lengths_have_few_graphs(task: str, graphs: list[int]) -> None:
    cfg = compose(f"task={task}", "attention=mtla", *SMALL)
    model: Any = task_of(cfg, Trains).build().double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    mels, compiled = cfg.task.model.encoder.get("num_mels"), Compiled(True, dynamic=True)
    for shape in SHAPES:
        want = step(model, shape, mels, lambda method: method)
        torch.testing.assert_close(step(model, shape, mels, compiled), want)
    assert 0 < len(graphs) <= GRAPHS[task]
    assert model.compilable_encoder is (task != "wmt16")


def test_the_record_says_what_is_compiled(start: Start, graphs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(device.shutil, "which", lambda name: f"/usr/bin/{name}")
    cfg, record = start("hardware.compile=true")
    module = task_of(cfg, Trains).prepare(record, None)[1]
    assert record["environment"]["compiled"].startswith("the encoder and the loss over the vocabulary, for sequences")
    assert module and not graphs  # sharding comes first


def test_a_copy_of_a_module_is_compiled_anew(graphs: list[int]) -> None:
    class Model(torch.nn.Linear):
        def loss(self, x: Tensor) -> Tensor:
            total: Tensor = self(x).sum()
            return total

    model, compiled = Model(2, 2), Compiled(True)
    assert compiled(model.loss) is compiled(model.loss)
    other = copy.deepcopy((model, compiled))
    torch.nn.init.zeros_(other[0].weight)
    torch.nn.init.zeros_(other[0].bias)
    x = torch.ones(1, 2)
    assert other[1](other[0].loss)(x).item() == 0.0 != compiled(model.loss)(x).item()
    assert Compiled(False)(model.loss) == model.loss
    assert pickle.loads(pickle.dumps(compiled)).on  # as processes that are spawned get it, after a run too


def test_timings_leave_the_compiler_out() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        time.sleep(0.3)
        return graph.forward

    class Model:
        def double(self, x: Tensor) -> Tensor:
            return 2 * x

    compiled = Compiled(True)
    torch._dynamo.reset()
    before = compiled.seconds()
    double = torch.compile(Model().double, backend=backend)
    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    once = compiled.seconds() - before
    double(torch.ones(3))
    assert once >= 0.3 and compiled.seconds() - before == once and Compiled(False).seconds() == 0.0
