"""On a GPU: an update of every task never waits for the host."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.config.check import compose
from attnlab.modes import train
from attnlab.run.record import new
from attnlab.training.module import Module
from tests.training.same_run import LINES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """From the second batch on, what waits inside a training step or an optimizer step is an error; counts batches."""
    counted: list[int] = []
    ctc_loss = F.ctc_loss
    step, before, after = Module.training_step, Module.on_before_optimizer_step, Module.configure_gradient_clipping

    def checked(function: Any) -> Any:
        def call(self: Module, *args: Any, **kwargs: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error" if len(counted) > 1 else "default")
            try:
                return function(self, *args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    def stepped(self: Module, *args: Any) -> Any:
        counted.append(1)
        return checked(step)(self, *args)

    def may_wait(*args: Any, **kwargs: Any) -> Tensor:  # torch reads the lengths of ctc_loss on the host
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return ctc_loss(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    monkeypatch.setattr(F, "ctc_loss", may_wait)
    monkeypatch.setattr(Module, "training_step", stepped)
    monkeypatch.setattr(Module, "on_before_optimizer_step", checked(before))
    monkeypatch.setattr(Module, "configure_gradient_clipping", checked(after))
    yield counted
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", LINES)
def test_an_update_never_waits(name: str, tmp_path: Path, strict: list[int]) -> None:
    settings = ["hardware=gpu", "task.train.max_epochs=2", f"cache_dir='{tmp_path / 'cache'}'"]
    if name == "translation":
        settings += ["task.data.vocab_size=80"]
    cfg = compose(*LINES[name], *settings)
    train.run(cfg, new(cfg, "test"), tmp_path)
    assert len(strict) > 2
