"""mode=test checkpoint=...: decode and score the test set with given weights."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from src.tasks.checkpoints import check_identity, find_weights, load_into, read_checkpoint

from .train import prepare, score


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    path = find_weights(Path(cfg.checkpoint).expanduser())
    weights, found = read_checkpoint(path)  # before the data: a broken file is said at once
    data, module = prepare(cfg, record, "test")
    check_identity(path, found, module.identity)
    load_into(module.model, path, weights)
    score(cfg, record, directory, data, module)
