"""The training loop leaves its numbers on the device. Tests of how often the host reads them, and of the errors."""

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnlab.errors import TrainingError
from attnlab.modes import train
from attnlab.pretrained.weights import read_checkpoint
from attnlab.tasks.sequence_to_text.module import SequenceToText
from attnlab.training.module import Module
from tests.tasks.conftest import Start


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a number or a selection, by where it happens."""

    def __init__(self, where: list[str], reads: Counter[str]) -> None:
        super().__init__()
        self.where, self.reads = where, reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):  # by a mask: it looks for the true
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        if self.where and waits:
            self.reads[self.where[-1]] += 1
        return func(*args, **(kwargs or {}))


def test_the_host_reads_once_in_log_every_updates(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[str] = []
    reads: Counter[str] = Counter()
    tolist, begin = Tensor.tolist, Module.on_train_batch_start
    updates = []

    def listed(self: Tensor) -> Any:
        if where:
            reads[where[-1]] += 1
        return tolist(self)

    def began(self: Module, batch: Any, batch_idx: int) -> None:
        begin(self, batch, batch_idx)
        where.append("batch")

    end = Module.on_train_batch_end

    def ended(self: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        end(self, outputs, batch, batch_idx)
        where.clear()
        updates.append(self.global_step)

    tally, tallied = Module.tally, list[tuple[int, Tensor, Tensor]]()

    def counted(self: Module, name: str, total: Tensor, count: Any) -> None:
        tally(self, name, total, count)
        if name == "ctc_loss":
            tallied.append((self.global_step // 3, total.detach(), count))

    monkeypatch.setattr(Module, "tally", counted)
    monkeypatch.setattr(Tensor, "tolist", listed)
    monkeypatch.setattr(Module, "on_train_batch_start", began)
    monkeypatch.setattr(Module, "on_train_batch_end", ended)
    cfg, record = start(
        "task.train.log_every=3", "task.train.max_epochs=2", "task.train.ctc_weight=0.3", "task.data.ctc_vocab_size=20"
    )
    with Reads(where, reads):
        train.run(cfg, record, tmp_path)
    assert len(updates) == updates[-1] == record["training"]["steps"] >= 8
    assert reads["batch"] <= updates[-1] // 3, reads
    with (tmp_path / "curves" / "metrics.csv").open(newline="") as file:
        curve = [float(row["ctc_loss"]) for row in csv.DictReader(file) if row["ctc_loss"]]
    for point, value in enumerate(curve):  # the mean over the labels of three updates
        _, totals, labels = zip(*(batch for batch in tallied if batch[0] == point), strict=True)
        assert value == pytest.approx(float(sum(totals) / sum(labels)), rel=1e-5)
    assert len(curve) == updates[-1] // 3


@pytest.mark.parametrize(
    ("epoch", "batch", "log_every"),
    [(1, 1, 2), *(pytest.param(n, 1 + n, 1000, marks=pytest.mark.slow) for n in (0, 1))],
)
def test_a_nan_is_named_before_the_next_checkpoint(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int, batch: int, log_every: int
) -> None:
    losses, step = SequenceToText.losses, SequenceToText.training_step
    now: list[tuple[int, int]] = [(-1, -1)]
    names: dict[tuple[int, int], str] = {}

    def at(self: SequenceToText, items: Any, batch_idx: int) -> Tensor:
        now[0] = (self.current_epoch, batch_idx)
        names[now[0]] = items.utterances[0].id
        return step(self, items, batch_idx)

    def broken(self: SequenceToText, items: Any) -> tuple[Tensor, ...]:
        loss, *rest = losses(self, items)
        return loss * (float("nan") if self.training and now[0] == (epoch, batch) else 1), *rest

    monkeypatch.setattr(SequenceToText, "training_step", at)
    monkeypatch.setattr(SequenceToText, "losses", broken)
    cfg, record = start(f"task.train.log_every={log_every}")
    with pytest.raises(TrainingError) as error:
        train.run(cfg, record, tmp_path)
    update = epoch * (1 + max(b for e, b in names if e == 0)) + batch + 1
    where = f"update {update}, epoch {epoch + 1}, batch {batch + 1} (first: {names[epoch, batch]})"
    assert f"the loss became nan at {where}" in str(error.value)
    assert max(names) <= (epoch, batch + log_every - 1)
    checkpoints = list((tmp_path / "checkpoints").glob("*.ckpt"))
    assert bool(checkpoints) == (epoch > 0)
    for path in checkpoints:
        assert all(torch.isfinite(value).all() for value in read_checkpoint(path)[0].values())


def test_a_gradient_that_is_not_finite_is_named(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Module.on_before_optimizer_step

    def broken(self: Module, optimizer: Any) -> None:
        before(self, optimizer)
        if self.global_step == 2:
            next(p for p in self.parameters() if p.grad is not None).grad.fill_(float("inf"))  # type: ignore[union-attr]

    monkeypatch.setattr(Module, "on_before_optimizer_step", broken)
    cfg, record = start()
    with pytest.raises(TrainingError, match=r"the gradient's norm became inf at update 3, epoch 1; the checkpoints of"):
        train.run(cfg, record, tmp_path)
    assert not (tmp_path / "checkpoints" / "last.ckpt").exists()
