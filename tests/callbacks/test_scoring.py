"""The contributions of the test-time callbacks, from one process and from two."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from attnlab.callbacks import cost as speed
from attnlab.callbacks.cost import CacheBytes, Memory, ScoringSpeed, TrainingSpeed
from attnlab.callbacks.scoring import PredictionsFile, Quality, Scored, Sections, contributions
from attnlab.metrics.numbers import Perplexity
from attnlab.metrics.text import WER
from tests.callbacks.test_training import Constant, trainer

TEXTS = ["one two", "ünï", "", "four five six", "seven\teight"]


class Echo(Constant):
    """Returns each text without its last word; the second loader scores numbers."""

    tokens_seen = 12

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        index = [int(i) for i in batch]
        if dataloader_idx == 1:
            return Scored(torch.tensor(index), {"nats": torch.ones(len(index)), "counts": torch.ones(len(index))})
        hypotheses = [TEXTS[i].rpartition(" ")[0] for i in index]
        rows = [(f"id{i}", "source", TEXTS[i], text) for i, text in zip(index, hypotheses, strict=True)]
        update = {"hypotheses": hypotheses, "references": [TEXTS[i] for i in index], "others": None}
        size = 10 * len(index) + min(index)
        return Scored(torch.tensor(index), update, rows, seconds=0.5, units=3, cache_bytes=(size, size + 1))


class Save(Callback):
    """The contributions of rank zero as JSON: with several processes they live in another one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_test_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(contributions(trainer.callbacks)))  # type: ignore[attr-defined]


def scored(directory: Path, processes: int) -> Sections:
    directory.mkdir()
    callbacks = [Memory(), ScoringSpeed("echo", beam=2), CacheBytes(), Quality({"": WER(5)}, {"sentences": 5})]
    files = [PredictionsFile(5, directory / "predictions.tsv"), Save(directory / "sections.json")]
    test = trainer(directory, *callbacks, *files, strategy="ddp_fork" if processes > 1 else "auto", devices=processes)
    test.test(Echo(), DataLoader(range(5), batch_size=1), verbose=False)  # type: ignore[arg-type]
    return json.loads((directory / "sections.json").read_text())


def test_two_processes_contribute_what_one_does(tmp_path: Path) -> None:
    """Lightning's own sampler pads five items to six: the repeated one is counted once."""
    alone, two = scored(tmp_path / "1", 1), scored(tmp_path / "2", 2)
    assert alone["quality"] == two["quality"] and alone["quality"]["sentences"] == 5
    assert alone["quality"]["deletions"] == 5 and alone["quality"]["words"] == 8
    texts = (tmp_path / "1" / "predictions.tsv").read_text()
    assert texts == (tmp_path / "2" / "predictions.tsv").read_text()
    assert texts.splitlines()[1:] == [
        "id0\tsource\tone two\tone",
        "id1\tsource\tünï\t",
        "id2\tsource\t\t",
        "id3\tsource\tfour five six\tfour five",
        "id4\tsource\tseven eight\t",
    ]
    assert alone["kv_cache"] == two["kv_cache"] == {"bytes_measured": 14, "bytes_predicted": 15}
    cost = alone["inference"]
    assert 0 <= cost["busy_cores_before"] <= (os.cpu_count() or 1)
    assert (cost["seconds"], cost["tokens_per_second"], cost["batch"], cost["beam"]) == (2.5, 6.0, 1, 2)
    assert cost["peak_memory_mib"] >= cost["mean_memory_mib"] > 0
    assert cost["protocol"] == "resident set of the process, read every 50 ms; echo"
    shared = two["inference"]
    assert (shared["seconds"], shared["tokens_per_second"]) == (1.5, 12.0)  # three batches each, one of them repeated
    assert shared["protocol"].endswith("echo, shared by 2 processes; seconds of the slowest")


def test_training_and_scoring_are_measured_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 14.0))
    monkeypatch.setattr(speed, "now", lambda device: next(clock))
    callbacks: list[Callback] = [Memory(), TrainingSpeed(), Quality({"": WER(5), "sliding_": Perplexity(5)})]
    both = trainer(tmp_path, *callbacks, max_epochs=1, enable_checkpointing=False)
    module, loader = Echo(), DataLoader[Any](range(5), batch_size=2)  # type: ignore[arg-type]
    assert contributions(callbacks) == {}
    both.fit(module, loader)
    sections = contributions(callbacks)
    assert set(sections) == {"training"} and sections["training"]["peak_memory_mib"] > 0
    assert (sections["training"]["seconds"], sections["training"]["tokens_per_second"]) == (4.0, 3.0)
    both.test(module, [loader, loader], verbose=False)
    sections = contributions(callbacks)
    assert sections["inference"]["peak_memory_mib"] > 0
    assert sections["quality"]["sliding_perplexity"] == 2.7183 and sections["quality"]["words"] == 8
    assert "tokens" not in sections["quality"]  # of further metrics the first value alone
