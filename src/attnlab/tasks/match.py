"""task.match=parameters: the feed-forward width with which a model has as many parameters as with attention=mha."""

import copy
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf, open_dict

from attnlab.config.build import freeze
from attnlab.config.check import check_fixed
from attnlab.errors import ConfigError
from attnlab.models.build import count_parameters, width_key, without_memory
from attnlab.tasks.base import Trains, task_of

NEAR = 0.01  # of the parameters


def matched(cfg: DictConfig) -> DictConfig:
    """The composed configuration with the width that `task.match` asks for.

    The parameters of a model are linear in the width, so two widths give every other.

    Raises:
        ConfigError: the model has no feed-forward layers, or no width is near enough.
    """
    key = width_key(cfg)
    refused = f"task.match={cfg.task.match}"
    if OmegaConf.select(cfg, key) == 0:
        raise ConfigError(f"{refused}: {key}=0, so there is no width to choose; give a width or leave task.match out")
    reference = copy.deepcopy(cfg)
    with open_dict(reference):
        reference.attention = compose("attention/mha").attention
        reference.hydra.runtime.choices.attention = "mha"
    wanted = _parameters(reference)
    counts = [_parameters(_at_width(cfg, key, width)) for width in (1, 2)]
    width = 1 + round((wanted - counts[0]) / (counts[1] - counts[0]))
    reached = counts[0] + (width - 1) * (counts[1] - counts[0])
    if width < 1 or abs(reached - wanted) > NEAR * wanted:
        raise ConfigError(
            f"{refused}: no {key} gives the {wanted:,} parameters of attention=mha; with 1 there are {counts[0]:,}"
        )
    return _at_width(cfg, key, width)


def _at_width(cfg: DictConfig, key: str, width: int) -> DictConfig:
    changed = copy.deepcopy(cfg)
    OmegaConf.update(changed, key, width)
    return changed


def _parameters(cfg: DictConfig) -> int:
    """The number of parameters of a composed configuration's model."""
    fixed: Any = freeze(cfg, cfg.hydra.runtime.choices)
    check_fixed(fixed)
    with without_memory():
        return count_parameters(task_of(fixed, Trains).build())["total"]
