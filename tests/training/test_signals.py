"""SIGUSR2 during training: the saved run continues exactly, at whichever moment the signal came."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from attnlab.run.processes import interruptible
from attnlab.training import checkpoints as signals
from attnlab.training.checkpoints import AtomicCheckpointIO, BestAndLast, EndAfterUpdate, Resume

BATCHES, PER_UPDATE, EPOCHS, VALIDATE = 14, 2, 2, 3  # 7 updates in an epoch, a validation after every third


class Numbers(LightningDataModule):
    """Numbers in order, from the batch at which a resumed run continues."""

    resume_at = (0, 0)

    def __iter__(self) -> Iterator[list[int]]:
        assert self.trainer is not None
        epoch, batch = self.resume_at
        first = batch if epoch == self.trainer.current_epoch else 0
        return iter([[number] for number in range(first, BATCHES)])

    def __len__(self) -> int:
        return BATCHES

    def train_dataloader(self) -> Any:
        return DataLoader(range(BATCHES), batch_sampler=self)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader([0])  # type: ignore[arg-type]


class Walk(LightningModule):
    """Weights that depend on every batch and on the order, and a learning rate that depends on the update.

    `at`: the batch at which the process gets the signal, counted from the beginning of the training.
    """

    def __init__(self, at: int | None = None, in_validation: bool = False) -> None:
        super().__init__()
        self.weight, self.at, self.in_validation = torch.nn.Parameter(torch.ones(())), at, in_validation
        self.seen: list[tuple[int, int]] = []
        self.validated: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, int(batch)))
        if self.current_epoch * BATCHES + batch_idx == self.at and not self.in_validation:
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR2)  # a cluster may send it twice
        return (self.weight * (1 + batch) / 10).sin().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.in_validation:
            os.kill(os.getpid(), signal.SIGUSR2)
        self.validated[self.global_step] = self.weight.item()
        self.log("val_loss", self.weight.detach())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.1)
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


def train(directory: Path, module: Walk, resume: bool = False, **settings: Any) -> tuple[Walk, BestAndLast, int]:
    """Train until the end, or until a signal ends the process. `settings`: other arguments of the Trainer."""
    data = Numbers()
    best = BestAndLast(directory, monitor="val_loss", save_top_k=2, filename="{step}", auto_insert_metric_name=False)
    intervals = {"val_check_interval": VALIDATE * PER_UPDATE, "check_val_every_n_epoch": None, "max_epochs": EPOCHS}
    trainer = Trainer(
        **intervals | settings, accelerator="cpu", accumulate_grad_batches=PER_UPDATE, logger=False,
        reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=0, use_distributed_sampler=False,
        enable_progress_bar=False, enable_model_summary=False,
        plugins=[AtomicCheckpointIO()], callbacks=[best, Resume(data), EndAfterUpdate(best)],  # type: ignore[arg-type]
        default_root_dir=directory,
    )  # fmt: skip
    names: list[str] = []
    code = 0
    with interruptible(names.append):
        try:
            trainer.fit(module, datamodule=data, ckpt_path=directory / "last.ckpt" if resume else None)
        except SystemExit:  # what Lightning makes of KeyboardInterrupt
            code = 1
    assert names == ["SIGUSR2"] * code
    return module, best, code


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Walk, BestAndLast]:
    before = signal.getsignal(signal.SIGUSR2)
    module, best, code = train(tmp_path_factory.mktemp("alone"), Walk())
    assert code == 0 and signal.getsignal(signal.SIGUSR2) == before
    return module, best


@pytest.mark.parametrize(
    ("at", "in_validation"), [(0, False), (5, False), (6, False), (13, False), (19, False), (0, True)]
)
def test_the_run_continues_exactly(
    at: int, in_validation: bool, alone: tuple[Walk, BestAndLast], tmp_path: Path
) -> None:
    expected, best = alone
    first, _, code = train(tmp_path, Walk(at, in_validation))
    updates = VALIDATE if in_validation else at // PER_UPDATE + 1
    assert code == 1
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == updates
    assert len(first.seen) == updates * PER_UPDATE  # it ended there
    second, again, code = train(tmp_path, Walk(), resume=True)
    assert code == 0
    assert first.seen + second.seen == expected.seen
    assert torch.equal(second.weight, expected.weight)
    assert first.validated | second.validated == expected.validated
    assert not set(first.validated) & set(second.validated) and len(again.best_k_models) == 2
    assert sorted(map(float, again.best_k_models.values())) == sorted(map(float, best.best_k_models.values()))


@pytest.mark.parametrize("max_steps", [-1, 1000])
def test_a_run_of_two_limits_continues_for_all_epochs(max_steps: int, tmp_path: Path) -> None:
    """The last.ckpt of a killed process is that of an epoch's end."""
    limits: dict[str, Any] = {"max_steps": max_steps, "max_epochs": 3}
    limits |= {"check_val_every_n_epoch": 1, "val_check_interval": 1.0}
    expected, _, _ = train(tmp_path / "alone", Walk(), **limits)

    class Killed(Walk):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.current_epoch == 1 and batch_idx == 4:
                raise RuntimeError("killed")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, Killed(), **limits)
    second, _, _ = train(tmp_path, Walk(), resume=True, **limits)
    assert second.seen == expected.seen[BATCHES:] and torch.equal(second.weight, expected.weight)
    assert second.validated == {step: weight for step, weight in expected.validated.items() if step > 7}


def test_an_update_that_does_not_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "PATIENCE", 0.2)

    class Slow(Walk):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 8:
                os.kill(os.getpid(), signal.SIGUSR2)
                signal.pause()  # until the second one
                pytest.fail("the run goes on")
            return super().training_step(batch, batch_idx)

    assert train(tmp_path, Slow())[2] == 1
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == VALIDATE


@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        ({"max_steps": 2}, [2]),
        ({"max_epochs": 1, "val_check_interval": 100}, [7]),
        ({"check_val_every_n_epoch": 3, "val_check_interval": 1.0}, [14]),
        ({"max_steps": 2, "check_val_every_n_epoch": 1, "val_check_interval": 1.0}, [2]),
        ({"max_steps": 3}, [3]),
        ({"max_steps": 4}, [3, 4]),
        ({"max_epochs": 1}, [3, 6, 7]),
    ],
)
def test_every_training_is_validated_at_its_end(settings: dict[str, Any], updates: list[int], tmp_path: Path) -> None:
    module, best, _ = train(tmp_path, Walk(), **settings)
    assert list(module.validated) == updates and len(best.best_k_models) == min(len(updates), 2)
