"""The optimizer of a training: one kernel for all parameters on CUDA, and float16's scale."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from attnlab.config.build import instantiate
from attnlab.config.check import compose
from attnlab.errors import TrainingError
from attnlab.training.module import Module, Pending


class Line(Module):
    """A linear model."""

    def __init__(self, make: Any, device: str, scaler: Any) -> None:
        super().__init__(optimizer=make, schedule=torch.optim.lr_scheduler.ConstantLR, identity={}, seed=1)
        self.model = nn.Linear(2, 2)
        strategy = SimpleNamespace(root_device=torch.device(device))
        self.__dict__["_stub"] = SimpleNamespace(strategy=strategy, precision_plugin=SimpleNamespace(scaler=scaler))

    @property
    def trainer(self) -> Any:
        return self.__dict__["_stub"]

    @trainer.setter
    def trainer(self, value: Any) -> None:
        raise AssertionError

    def losses(self, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        raise AssertionError

    def first_of(self, batch: Any) -> Callable[[], str]:
        return lambda: "x"


@pytest.mark.parametrize(
    ("make", "device", "scaler", "expected"),
    [
        (partial(torch.optim.AdamW, fused=None), "cuda", None, {"fused": True}),
        (partial(torch.optim.AdamW, fused=None), "cpu", None, {}),
        (partial(torch.optim.AdamW, fused=False), "cuda", None, {}),
        (partial(torch.optim.AdamW, fused=None), "cuda", "a scaler", {"fused": False}),
        (partial(torch.optim.AdamW, fused=True), "cuda", "a scaler", {"fused": False}),
        (partial(torch.optim.Adagrad), "cuda", None, {}),
        (partial(create_optimizer_v2, opt="adamw"), "cuda", None, {"fused": True}),
        (partial(create_optimizer_v2, opt="lamb"), "cuda", None, {}),
    ],
)
def test_where_an_optimizer_is_fused(make: Any, device: str, scaler: Any, expected: dict[str, bool]) -> None:
    module = Line(make, device, scaler)
    assert module.fused(make) == expected
    made = make(module.model if make.func is create_optimizer_v2 else module.parameters(), **expected)
    assert made.defaults.get("fused") == expected.get("fused", make.keywords.get("fused"))


def test_the_configured_optimizers_leave_it_open() -> None:
    for scale in (("task=fineweb_edu", "scale=paper_small"), ("task=imagenet",)):
        make = instantiate(compose(*scale, "hardware=cpu").task.optimizer, path="task.optimizer")
        assert Line(make, "cuda", None).fused(make) == {"fused": True}


@pytest.mark.parametrize(("task", "decay"), [("mustc", 0.0), ("ami", 0.0), ("slurp", 0.0), ("xsum", 1e-4)])
def test_the_papers_recipes_update_as_fairseq_s_adam(task: str, decay: float) -> None:
    """Its decay is decoupled: p - lr decay p - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps)."""
    settings = compose(f"task={task}", "scale=paper", "hardware=cpu").task.optimizer
    weight = nn.Parameter(torch.tensor([1000.0, -2000.0, 0.1], dtype=torch.float64))
    optimizer = instantiate(settings, path="task.optimizer")([weight])
    p, m, v = weight.detach().numpy().copy(), np.zeros(3), np.zeros(3)
    for step, gradient in enumerate(([0.5, 0.3, -1.0], [-0.1, 0.4, 2.0], [0.2, 0.2, 0.3]), 1):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        before = weight.detach().numpy().copy()
        optimizer.step()
        g = np.array(gradient)
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g**2
        rate = settings.lr * (1 - 0.98**step) ** 0.5 / (1 - 0.9**step)
        expected = -settings.lr * decay * p - rate * m / (v**0.5 + 1e-8)
        np.testing.assert_allclose(weight.detach().numpy() - before, expected, rtol=1e-6)
        p = p + expected


def test_an_overflow_of_scaled_gradients_is_no_error() -> None:
    pending = Pending(batches=[(1, 0, 0, lambda: "first")], updates=[(1, 0)])
    pending.losses, pending.sums = [torch.tensor(2.0)], [torch.tensor([2.0, 2.0, 1.0, float("inf")])]
    for scaler, error in ((None, True), ("a scaler", False)):
        module = Line(partial(torch.optim.SGD), "cpu", scaler)
        module.pending = Pending(pending.batches, list(pending.losses), pending.updates, list(pending.sums))
        if error:
            with pytest.raises(TrainingError, match="norm became inf at update 1"):
                module.read_pending()
        else:
            module.read_pending()
            module.pending = Pending(pending.batches, [torch.tensor(float("nan"))], pending.updates, pending.sums)
            with pytest.raises(TrainingError, match="the loss became nan"):
                module.read_pending()
