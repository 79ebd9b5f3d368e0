"""Hybrid stacks: `attention.pattern=[mtla,mtla,mha]` brings the files of several mechanisms into one configuration.

Each file of the pattern is composed below `attention.mechanisms`, by overrides that are added to the command line. They
are the same for all jobs of a multirun; a job's own pattern selects among them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnlab.config.nearest import nearest
from attnlab.errors import ConfigError

HYBRID = "hybrid"  # the option of the group `attention` that has a pattern
PATTERN = "attention.pattern"
FILE = "+attention@attention.mechanisms."


def parts(pattern: Any, names: Sequence[str]) -> list[str]:
    """The mechanisms of a pattern, each once; none where there is no pattern.

    Args:
        pattern: the value of `attention.pattern`, or None.
        names: the options of the group `attention`.

    ConfigError: the pattern is not a list of single mechanisms.
    """
    if pattern is None:
        return []
    single = [name for name in names if name != HYBRID]
    if not isinstance(pattern, Sequence) or isinstance(pattern, str) or not pattern:
        raise ConfigError(f"{PATTERN}={pattern}: expected a list of mechanisms, such as [mtla,mtla,mha]")
    for name in pattern:
        if name not in single:
            raise ConfigError(f"{PATTERN}: {name} is not a mechanism{nearest(str(name), single)}")
    return list(dict.fromkeys(pattern))


def overrides(names: Iterable[str]) -> list[str]:
    """What composes the files of these mechanisms.

    Args:
        names: of files in conf/attention.
    """
    return [f"{FILE}{name}={name}" for name in names]


def added(cfgs: Sequence[DictConfig], keys: Iterable[str]) -> list[str]:
    """The overrides that a command line lacks.

    Args:
        cfgs: the configuration of each job.
        keys: the keys that the command line sets.
    """
    patterns = [pattern for cfg in cfgs if (pattern := OmegaConf.select(cfg, PATTERN)) is not None]
    implied = [f"attention={HYBRID}"] if PATTERN in (keys := list(keys)) and "attention" not in keys else []
    return [*implied, *overrides(dict.fromkeys(name for pattern in patterns for name in pattern))]


def plain(arguments: Iterable[str]) -> list[str]:
    """A command line without the files that `added` has added.

    Args:
        arguments: as in sys.argv[1:].
    """
    return [text for text in arguments if not text.startswith(FILE)]


def prune(cfg: DictConfig) -> None:
    """Keep the mechanisms of the pattern alone, in its order.

    Args:
        cfg: composed; it is changed.
    """
    if pattern := OmegaConf.select(cfg, PATTERN):
        mechanisms = cfg.attention.mechanisms
        cfg.attention.mechanisms = {name: mechanisms[name] for name in dict.fromkeys(pattern)}
