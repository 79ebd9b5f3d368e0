"""mode=describe: parameters, cache and arithmetic from the configuration alone; with hardware=gpu memory, too."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from attnlab.tasks.base import task_of
from attnlab.tasks.memory import estimate

EVERY_TASK = True  # a task need not list this mode in `task.modes`
KEEPS = False  # no run directory, unless hydra.run.dir= names one


def run(cfg: DictConfig, record: dict[str, Any], directory: Path | None) -> None:
    """Fill the record; the command prints it.

    Args:
        cfg: the fixed configuration.
        record: the run's; sizes are filled.
        directory: the run's; None: nothing is kept.
    """
    task = task_of(cfg)
    task.describe(record)
    if cfg.hardware.accelerator in ("gpu", "cuda") and (memory := estimate(task)):
        record["memory"] = memory.describe()
