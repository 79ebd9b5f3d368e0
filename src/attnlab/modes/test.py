"""mode=test checkpoint=...: decode and score the test set with given weights."""

from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import seed_everything
from omegaconf import DictConfig

from attnlab.tasks.base import flow_of
from attnlab.training.checkpoints import check_identity, find_weights, load_into, read_checkpoint


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    flow = flow_of(cfg)
    path = find_weights(Path(cfg.checkpoint).expanduser())
    weights, found = read_checkpoint(path)  # before the data: a broken file is said at once
    seed_everything(cfg.seed, workers=True, verbose=False)
    data, module = flow.prepare(record, "test")
    check_identity(path, found, module.identity)
    load_into(module.model, path, weights)
    flow.score(record, directory, data, module)
