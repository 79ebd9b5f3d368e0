"""Tasks: what is trained, on what loss, and how it is scored.  One folder per kind of task."""

from collections.abc import Sequence
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig

from attnlab.config.model import SAMPLE, check_model, pretrained_decoder


def complete(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A composed configuration, with what a pretrained model decides in it; see `Task.complete`.

    What names alone tell is checked before the task is imported, which takes seconds.

    Args:
        cfg: with Hydra's node; it is not changed.
        overrides: the keys and groups of the command line.

    Raises:
        ConfigError: there is no such model, or an override does not fit it.
    """
    named = pretrained_decoder(cfg, overrides)
    if named is cfg:
        return cfg
    if named.task.weights != SAMPLE:
        check_model(named.task.weights, str(named.task.model._target_))
    task: Any = get_class(named.task.kind._target_)
    completed: DictConfig = task.complete(named, overrides)
    return completed
