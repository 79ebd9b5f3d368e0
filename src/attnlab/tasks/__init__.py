"""Tasks: what is trained, on what loss, and how it is scored.  One folder per kind of task."""

from collections.abc import Sequence
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig


def complete(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A composed configuration, with what a pretrained model decides in it; see `Task.complete`.

    The task is imported, which takes seconds, only where it can convert the model that the configuration names.
    """
    if "convert" not in cfg.task.modes or (cfg.model is None and cfg.hydra.runtime.choices.convert in (None, "none")):
        return cfg
    task: Any = get_class(cfg.task.kind._target_)
    completed: DictConfig = task.complete(cfg, overrides)
    return completed
