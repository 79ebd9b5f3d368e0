"""The main job at a size that trains in seconds, called in this process."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import hydra
import pytest
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from attnlab.config.build import CONF, freeze
from attnlab.config.check import compose
from attnlab.run.record import new
from tests.data.conftest import write_corpus

TINY = [
    "hardware=cpu",
    "task.model.d_model=16",
    "task.attention_heads=2",
    "task.model.encoder.num_layers=1",
    "task.model.encoder.num_heads=2",
    "task.model.encoder.ffn_dim=16",
    "task.model.encoder.conv_channels=16",
    "task.model.decoder.num_layers=1",
    "task.model.decoder.ffn_dim=16",
    "task.model.decoder.projector_dim=8",
    "task.train.batch.frames=250",
    "task.train.max_epochs=3",
    "task.schedule.warmup_steps=2",
    "task.decode.beam=2",
    "task.decode.max_len_b=4",
]

Start = Callable[..., tuple[DictConfig, dict[str, Any]]]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def starter(*settings: str) -> Start:
    def start(*overrides: str) -> tuple[DictConfig, dict[str, Any]]:
        cfg = compose(*settings, *overrides)
        return cfg, new(cfg, "test")

    return start


def make(root: Path, cache: Path) -> Start:
    """With a configuration that is not checked: a test may remove keys, or change the class of a node."""

    def start(*overrides: str) -> tuple[DictConfig, dict[str, Any]]:
        arguments = [*TINY, f"data_root='{root}'", f"cache_dir='{cache}'", *overrides]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = hydra.compose("config", overrides=arguments)
        names = dict(text.split("=", 1) for text in overrides if "." not in text.split("=")[0])
        chosen = {"task": "mustc", "attention": names.get("attention", "mtla"), "scale": "sample", "compress": "none"}
        cfg = freeze(cfg, chosen)
        return cfg, new(cfg, "test")

    return start


@pytest.fixture
def start(root: Path, cache: Path) -> Start:
    """start("attention=mha", ...) -> the fixed config and a fresh record."""
    return make(root, cache)


def recorded(mode: ModuleType, started: tuple[DictConfig, dict[str, Any]], directory: Path | None) -> dict[str, Any]:
    """The record of a run of a mode, whose directory has the config, as the command leaves it."""
    cfg, record = started
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(cfg, directory / "config.yaml")
    mode.run(cfg, record, directory)
    return record


def predictions(directory: Path, name: str = "predictions.tsv") -> list[dict[str, str]]:
    """The rows of a run's file of predictions."""
    with open(directory / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
