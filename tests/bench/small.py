"""Small runs of mode=bench."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from attnlab.bench.compare import compare
from attnlab.bench.variants import AttentionVariant, lineup
from attnlab.config.build import instantiate
from attnlab.config.check import compose
from attnlab.modes import bench
from attnlab.run import record as records

CPU = torch.device("cpu")
QUICK = ("mode=bench", "hardware=cpu", "bench.memory=false", "bench.rounds=1", "bench.warmup=0", "bench.batch=2")
TINY = (
    "task.model.d_model=32", "task.attention_heads=4", "task.model.encoder.num_layers=1",
    "task.model.encoder.ffn_dim=32", "task.model.encoder.conv_channels=32", "task.model.decoder.num_layers=2",
    "task.model.decoder.ffn_dim=32", "bench.beam=3", "bench.prefix=7", "bench.text=12", "bench.steps=5",
)  # fmt: skip


def config(*overrides: str, attention: str = "mtla") -> DictConfig:
    """A small speech translator."""
    return compose(f"attention={attention}", *QUICK, *TINY, *overrides)


def measured(cfg: DictConfig, directory: Path) -> dict[str, Any]:
    """The record of a run."""
    record = records.new(cfg, "python -m attnlab")
    bench.run(cfg, record, directory)
    return record


def rows(cfg: DictConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The checks and the rows."""
    return compare(cfg, instantiate(cfg.bench), CPU)


def variants(cfg: DictConfig) -> list[AttentionVariant]:
    return lineup(cfg, instantiate(cfg.bench))


def spoil(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, factor: float = 1.01) -> None:
    """Make a function, or a method of a class, return its results times this factor."""
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: right(*args, **options) * factor)
