"""Tasks: what is trained, on what loss, and how it is scored.  One folder per kind of task."""

from collections.abc import Sequence

from omegaconf import DictConfig

from attnlab.config.model import SAMPLE, check_model, pretrained_decoder


def complete(cfg: DictConfig, overrides: Sequence[str], read_models: bool = True) -> DictConfig:
    """The configuration of a run with a pretrained decoder: that of its model in place of the task's.

    Any other configuration is returned as it is. Names are checked before torch is imported, which takes seconds.

    Args:
        cfg: composed, with Hydra's node; it is not changed.
        overrides: the keys and groups of the command line.
        read_models: whether the model's config is read. False: only what its name tells.

    Raises:
        ConfigError: there is no such model, or an override does not fit it.
    """
    named = pretrained_decoder(cfg, overrides)
    if named is cfg or not read_models:
        return named
    if named.task.weights != SAMPLE:
        check_model(named.task.weights, str(named.task.model._target_))
    from attnlab.conversion.original import completed

    return completed(named, overrides)
