"""mode=test: score the test set with the weights of a run, or with a pretrained model as it is."""

from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import seed_everything
from omegaconf import DictConfig

from attnlab.pretrained.weights import fill
from attnlab.tasks.base import task_of
from attnlab.training.checkpoints import check_identity

READS_CORPUS = True  # the files of data_root are checked before a library is loaded


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Load the checkpoint into the configured model and score it.  The checkpoint is read before the data.

    Args:
        cfg: the fixed configuration, with `checkpoint`, or with the pretrained weights of a language or image model.
        record: the run's; it is filled.
        directory: the run's; predictions are written there.
    """
    task = task_of(cfg)
    stored = None if cfg.checkpoint is None else task.read_weights(Path(cfg.checkpoint).expanduser())
    if stored is None:
        task.check(directory)
    seed_everything(cfg.seed, workers=True, verbose=False)
    data, module = task.prepare(record, "test")
    if stored is None:
        task.before_fit(record, directory, data, module)  # reads the pretrained weights
    else:
        path, weights, found = stored
        check_identity(path, found, module.identity)
        fill(module.model, path, weights)
    task.score(record, directory, data, module)
