"""mode=test: score the test set with the weights of a run, or with a pretrained model as it is."""

from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import seed_everything
from omegaconf import DictConfig

from attnlab.pretrained.weights import check_identity, fill
from attnlab.tasks.base import Trains, task_of

READS_CORPUS = True  # the files of data_root are checked before a library is loaded


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Load the checkpoint, or the pretrained weights of `model=`, and score the model.  It is read before the data."""
    task = task_of(cfg, Trains)
    stored = None if cfg.checkpoint is None else task.read_weights()
    if stored is None:
        task.check(directory)
    seed_everything(cfg.seed, workers=True, verbose=False)
    data, module = task.prepare(record, "test")
    if stored is None:
        task.before_fit(record, directory, data, module)  # reads the pretrained weights
    else:
        path, weights, identity = stored
        check_identity(path, identity, module.identity)
        fill(module.model, path, weights)
    task.round(module)
    task.score(record, directory, data, module)
