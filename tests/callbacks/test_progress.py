"""The lines of a training without a terminal."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from attnlab.callbacks import progress


def test_without_a_terminal_a_line_every_thirty_seconds(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Of updates of two batches each, the first of which takes ten times as long."""
    caplog.set_level(logging.INFO)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    trainer: Any = SimpleNamespace(
        global_step=7, accumulate_grad_batches=2, is_global_zero=True, current_epoch=1, estimated_stepping_batches=107
    )
    callback, module = progress.TrainingLines(), SimpleNamespace(mean_loss=2.5)
    callback.on_train_start(trainer, module)  # type: ignore[arg-type]
    for batch in range(80):
        clock.now += 10 if batch < 2 else 1
        trainer.global_step += batch % 2
        callback.on_train_batch_end(trainer, module, None, None, batch)  # type: ignore[arg-type]
    assert caplog.messages[0] == "epoch 2, update 13 of 107, training loss 2.500, about 3 min left"
    assert len(caplog.messages) == 3  # 98 seconds of updates, the first of 20
