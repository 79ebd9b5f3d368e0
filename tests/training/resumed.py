"""A training that is killed at every place and continued: `python -m tests.training.resumed FOLDER NAME`.

The processes of one run are started by the test with torchrun's environment variables.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, distributed

from attnlab.config.check import compose
from attnlab.report.figure import read_curves
from attnlab.run.record import RECORD, new
from attnlab.run.store import SavedRecord
from attnlab.tasks.base import Trains, task_of
from attnlab.training.checkpoints import AtomicCheckpointIO
from attnlab.training.module import Module
from attnlab.training.trainer import fit
from tests.command import weights
from tests.golden.runs import corpus
from tests.training.same_run import LINES, write_corpora

Batches = list[tuple[int, int, int, float]]  # the update, epoch and number of each batch, and its loss
MEASURED = ("seconds", "tokens_per_second", "images_per_second", "resumed", "protocol")


@dataclass
class Trained:
    """What a training leaves: the record's section, the batches, the curves, averaged weights and the checkpoint."""

    section: dict[str, Any]
    batches: Batches
    curves: dict[str, list[tuple[int, float]]]
    averaged: dict[str, Tensor]
    last: dict[str, Any]


def settings(*words: str, cache: Path, processes: int = 1) -> DictConfig:
    several = ["hardware=ddp", "hardware.accelerator=cpu", f"hardware.devices={processes}"]
    common = ["task.train.log_every=2", f"cache_dir='{cache}'", *(several if processes > 1 else ["hardware=cpu"])]
    cfg = compose(*common, *words)
    OmegaConf.set_readonly(cfg, False)
    OmegaConf.set_struct(cfg, False)
    return cfg


def first_rank() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def train(cfg: DictConfig, directory: Path, resume: bool = False) -> Trained:
    """Train, or continue from the directory's last.ckpt."""
    batches: Batches = []
    step = Module.training_step

    def watched(self: Module, batch: Any, batch_idx: int) -> Tensor:
        place = self.global_step, self.current_epoch, batch_idx
        loss = step(self, batch, batch_idx)
        batches.append((*place, loss.item()))
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Module, "training_step", watched)
        cfg.resume = str(directory) if resume else None
        task, record = task_of(cfg, Trains), new(cfg, "test")
        L.seed_everything(1, workers=True, verbose=False)
        data, module = task.prepare(record, None)
        if first_rank():
            task.save_files(directory, data)
        if not resume:
            task.before_fit(record, directory, data, module)
        path = directory / "checkpoints" / "last.ckpt" if resume else None
        section = fit(cfg, directory, data, module, monitor=task.monitor, better=task.better, resume=path)
    if distributed.is_initialized():
        distributed.barrier()
    section = {key: value for key, value in section.items() if key not in MEASURED and "memory" not in key}
    last = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)
    return Trained(section, batches, read_curves(SavedRecord(directory / RECORD, record)), weights(directory), last)


@contextmanager
def kills(directory: Path, states: Path) -> Iterator[None]:
    """Copy the directory of the training to `states` whenever its checkpoints change, as a kill would leave it.

    Also between two updates, where a cluster's signal ends a run, with a last.ckpt of that moment.
    """
    save, remove = AtomicCheckpointIO.save_checkpoint, AtomicCheckpointIO.remove_checkpoint
    advance, taken = _TrainingEpochLoop.advance, [0]

    def copied(name: str) -> None:
        if (directory / "checkpoints" / "last.ckpt").exists():
            shutil.copytree(directory, states / f"{len(list(states.iterdir())):03} {name}")

    def saved(self: Any, checkpoint: Any, path: Any, **options: Any) -> None:
        save(self, checkpoint, path, **options)
        if Path(path).is_relative_to(directory):
            copied(f"{Path(path).stem} is written")

    def removed(self: Any, path: Any) -> None:
        remove(self, path)
        copied(f"{Path(path).stem} is removed")

    def advanced(self: Any, fetcher: Any) -> None:
        updates = self.trainer.global_step
        if taken[-1] < updates and not self.trainer.fit_loop._should_accumulate():
            taken.append(updates)
            place = states / f"after update {updates}"
            for logger in self.trainer.loggers:
                logger.save()
            if first_rank():
                shutil.copytree(directory, place)
            self.trainer.save_checkpoint(place / "checkpoints" / "last.ckpt")
        advance(self, fetcher)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AtomicCheckpointIO, "save_checkpoint", saved)
        patch.setattr(AtomicCheckpointIO, "remove_checkpoint", removed)
        patch.setattr(_TrainingEpochLoop, "advance", advanced)
        yield


def compare(resumed: Trained, alone: Trained) -> int:
    """Fail unless the second part of a training ended as the whole; return the updates that it trained."""
    begun = len(alone.batches) - len(resumed.batches)
    assert resumed.batches == alone.batches[begun:]
    assert resumed.section == alone.section
    assert resumed.curves == alone.curves
    same(resumed.averaged, alone.averaged, "averaged")
    for part in (
        "epoch",
        "global_step",
        "state_dict",
        "optimizer_states",
        "lr_schedulers",
        "averaging_state",
        "trained",
    ):
        same(resumed.last.get(part), alone.last.get(part), part)
    for key, state in alone.last["callbacks"].items():
        for name, value in state.items():
            if "path" not in name and name not in ("dirpath", "current_score", "time_elapsed"):
                same(named(resumed.last["callbacks"][key][name]), named(value), f"{key} {name}")
    loops = [trained.last["loops"]["fit_loop"] for trained in (resumed, alone)]
    for name in ("epoch_progress", "epoch_loop.batch_progress") if resumed.batches else ():
        same(loops[0][name], loops[1][name], name)
    return len({update for update, *_ in resumed.batches})


def named(value: Any) -> Any:
    """Paths of checkpoints as names: those of the two parts lie in two folders."""
    return {Path(key).name: item for key, item in value.items()} if isinstance(value, dict) else value


def same(value: Any, expected: Any, where: str) -> None:
    """Fail unless two values are equal, tensors inside bit by bit."""
    assert type(value) is type(expected), where
    if isinstance(expected, Tensor):
        assert value.dtype == expected.dtype and torch.equal(value, expected), where
    elif isinstance(expected, dict):
        assert value.keys() == expected.keys(), where
        for key in expected:
            same(value[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(value) == len(expected), where
        for i in range(len(expected)):
            same(value[i], expected[i], f"{where}[{i}]")
    else:
        assert value == expected, where


def check(cfg: DictConfig, folder: Path) -> list[int]:
    """Train once, continue from every state in which a kill would leave it; return the updates that each trained."""
    directory, states = folder / "alone", folder / "states"
    if first_rank():
        states.mkdir(parents=True)
    with kills(directory, states):
        alone = train(cfg, directory)
    trained = []
    for state in sorted(states.iterdir()):
        resumed = train(cfg, state, resume=True)
        try:
            trained.append(compare(resumed, alone) if first_rank() else 0)
        except AssertionError as error:
            raise AssertionError(f"continued where {state.name}: {error}") from error
    return trained


LANGUAGE = [
    "task=wikitext2", "attention=mtla", "stride=2", "task.model.d_model=16", "task.attention_heads=2",
    "task.schedule.warmup_steps=2", "task.model.num_layers=1", "task.model.max_length=48", "task.data.window=16",
    "task.score.sliding_stride=8", "task.attention_dropout=0.2",
    "task.train.batch.tokens=96", "task.data.batch_size=3", "task.train.max_epochs=3",
]  # fmt: skip
SHORT = ["task.train.max_epochs=3", "task.train.max_steps=9"]
TRANSLATION, CONFORMER, BUCKET, IMAGES = (
    [*LINES[name], *SHORT] for name in ("translation", "conformer", "one bucket", "images")
)
EVERY_SECOND = ["task.train.validate_every=2", "task.train.keep_best=2"]
EPOCHS = ["task.train.validate_every=null", "task.train.validate_every_epochs=1"]
STOPPED = ["callbacks=early_stopping", "callbacks.early_stopping.patience=1", "task.optimizer.lr=0"]
RUNS: dict[str, list[str]] = {
    "updates": [*LANGUAGE, "task.train.validate_every=3", "task.train.keep_best=2", "callbacks=early_stopping"],
    "epochs": [*LANGUAGE, *EPOCHS, "callbacks=mean_weights", "callbacks.mean_weights.start=3"],
    "two epochs": [*LANGUAGE, *EPOCHS, "task.train.validate_every_epochs=2", "callbacks=[ema,early_stopping]",
                   "task.train.max_steps=11"],
    "stopped": [*LANGUAGE, *STOPPED, "task.train.validate_every=2"],
    "stopped by epochs": [*LANGUAGE, *STOPPED, *EPOCHS],
    "translation": [*TRANSLATION, "task.train.validate_every=4", "task.model.decoder.dropout=0.2"],
    "conformer": [*CONFORMER, *EVERY_SECOND, "task.model.decoder.dropout=0.2", "task.data.speeds=[0.9,1.0]"],
    "one bucket": [*BUCKET, *EPOCHS],
    "images": [*IMAGES, *EVERY_SECOND],
    "recall": ["task=recall", "attention=mha", "task.model.d_model=16", "task.attention_heads=2", *SHORT, *EVERY_SECOND,
               "task.data.train=[[16,2,48],[24,3,24]]", "task.data.test=[[16,2,8]]", "task.train.batch.sequences=24",
               "task.data.batch_size=12", "task.data.vocab_size=64"],
}  # fmt: skip


def write(name: str, corpora: Path) -> None:
    """What the processes of one of RUNS read, written before they start."""
    if "task=wikitext2" not in RUNS[name]:
        if not (corpora / "text").exists():
            write_corpora(corpora)
    elif not (corpora / "language").exists():
        corpus("wikitext2", corpora / "language")


def run(name: str, corpora: Path, folder: Path) -> list[int]:
    """One of RUNS in the processes of this run; see :func:`check`."""
    place = {"translation": "text", "conformer": "speech", "one bucket": "speech"}.get(name, "language")
    roots = {"images": [f"model='{corpora}/start.safetensors'"], "recall": []}
    words = [*RUNS[name], *roots.get(name, [f"data_root='{corpora / place}'"])]
    cfg = settings(*words, cache=corpora / "cache", processes=int(os.environ.get("WORLD_SIZE", 1)))
    if "task.train.batch.split=false" in words:
        encoder = {key: value for key, value in cfg.task.model.encoder.items() if not key.endswith("n_dropout")}
        cfg.task.model.encoder = encoder | {"_target_": "attnlab.models.ConformerEncoder", "kernel": 3}
    return check(cfg, folder)


if __name__ == "__main__":
    trained = run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    if first_rank():
        (Path(sys.argv[3]) / "trained.json").write_text(json.dumps(trained))
