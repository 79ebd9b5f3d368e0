"""mode=describe: parameters, cache and arithmetic from the configuration alone; with hardware=gpu memory, too."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from attnlab.tasks.base import Task, Trains, task_of
from attnlab.tasks.memory import estimate

EVERY_TASK = True  # a task need not list this mode in `task.modes`
KEEPS = False  # no run directory, unless hydra.run.dir= names one


def run(cfg: DictConfig, record: dict[str, Any], directory: Path | None) -> None:
    """Fill the sizes in the record, which the command prints."""
    task = task_of(cfg, Task)
    task.describe(record)
    if cfg.hardware.accelerator in ("gpu", "cuda") and isinstance(task, Trains) and (memory := estimate(task)):
        record["memory"] = memory.describe()
