"""mode=compress: load pretrained weights, score, compress, score, save the compressed folder; nothing is trained."""

from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import seed_everything
from omegaconf import DictConfig

from attnlab.run.record import first_process
from attnlab.tasks.base import Transforms, task_of

READS_CORPUS = True  # the files of data_root are checked before a library is loaded


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Fill `compression` or `conversion` with the points before and after, and `quality` with the latter."""
    task = task_of(cfg, Transforms)
    task.check(directory)
    seed_everything(cfg.seed, workers=True, verbose=False)
    data, module = task.prepare(record, None)
    if first_process():
        task.save_files(directory, data)
    task.transform(record, directory, data, module)
