"""A trained model, loaded from its run directory alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from attnlab.runs.loading import configuration
from attnlab.tasks.base import Task, task_of

if TYPE_CHECKING:
    from attnlab.training.module import Module


class Trained:
    """The model of a run, ready to compute.

    Args:
        cfg: the fixed configuration, whose `checkpoint` names the run directory or a file of weights in it.

    Attributes:
        cfg: the run's own configuration.
        task: what wires its parts.
        module: with its `model`, weights loaded, in evaluation mode on the device of `hardware.accelerator`; of text
            it also has the `tokenizer` or the `vocabulary`, of images the `classes`.

    Raises:
        DataError: a file of the run is missing or damaged.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.task: Task = task_of(cfg)
        self.module: Module = self.task.restore()


def restore(run: str | Path, *settings: str, config_dir: str | None = None) -> Trained:
    """The model of a run directory; neither its corpus nor a cache is needed.

    Args:
        run: the run directory, or a file of weights in it.
        settings: decoding, paths and hardware as on the command line: "task.decode.beam=1", "hardware=cpu".
        config_dir: the directory of YAML files that name your own classes, if the run has any.

    Raises:
        ConfigError: `run` is no run directory, or a setting is not one of these.
        DataError: a file of the run is missing or damaged.
    """
    return Trained(configuration(run, *settings, config_dir=config_dir))
