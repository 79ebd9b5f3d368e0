"""Tasks: what is trained, on what loss, and how it is scored. One folder per kind of task."""

import copy
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf, open_dict

from attnlab.config.rules import SAMPLE, TIMM, check_model
from attnlab.errors import ConfigError

HEALING = {  # keys that follow from convert.healing, unless they are on the command line
    "task.train.max_steps": "steps",
    "task.train.batch.tokens": "tokens",
    "task.optimizer.lr": "lr",
    "task.schedule.warmup_steps": "warmup",
}


def match_parameters(cfg: DictConfig, overrides: Sequence[str], read_models: bool = True) -> DictConfig:
    """The configuration with the feed-forward width of `task.match`. ConfigError: no width fits."""
    if cfg.task.get("match") is None:
        return cfg
    from attnlab.tasks.base import matched  # it imports torch

    return matched(cfg)


def complete_images(cfg: DictConfig, overrides: Sequence[str], read_models: bool = True) -> DictConfig:
    """The configuration with the architecture and the images of `model=`, where that says them."""
    if cfg.model is None or not read_models:
        return cfg
    check_model(str(cfg.model), TIMM)
    from attnlab.pretrained.timm import completed  # it imports torch

    return completed(cfg, overrides)


def complete(cfg: DictConfig, overrides: Sequence[str], read_models: bool = True) -> DictConfig:
    """The configuration of a language-modelling run that begins with a pretrained decoder.

    The model's sizes and attention replace the task's. Any other configuration is returned as it is. Names are checked
    before torch is imported, which takes seconds.

    Args:
        overrides: the keys and groups of the command line.
        read_models: False: set only `task.weights` and the training of a conversion.

    Raises:
        ConfigError: the model is missing, or an override does not fit it.
    """
    converts = cfg.hydra.runtime.choices.get("convert") not in (None, "none")
    if not converts and cfg.model is None:
        return match_parameters(cfg, overrides)
    if cfg.task.get("match") is not None:
        raise ConfigError(f"task.match={cfg.task.match}: the pretrained model decides the width; leave task.match out")
    if of_model := [key for key in overrides if key == "attention" or key.startswith(("attention.", "task.model"))]:
        raise ConfigError(
            f"{of_model[0]}=: the pretrained model decides it; leave it out (convert=mla or the like changes its "
            "attention)"
        )
    cfg = copy.deepcopy(cfg)
    with open_dict(cfg):
        cfg.task.weights = SAMPLE if cfg.model is None else str(cfg.model)
    if converts:
        values = {key: cfg.convert.healing[name] for key, name in HEALING.items()}
        for key, value in (values | {"task.optimizer.weight_decay": 0.0}).items():
            if key not in overrides:
                OmegaConf.update(cfg, key, value)
    if not read_models:
        return cfg
    if cfg.task.weights != SAMPLE:
        check_model(cfg.task.weights, str(cfg.task.model._target_))
    from attnlab.conversion.original import completed

    return completed(cfg, overrides)
