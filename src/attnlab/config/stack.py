"""Hybrid stacks: `attention.pattern=[mtla,mtla,mha]` brings the files of several mechanisms into one configuration."""

from collections.abc import Iterable, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from attnlab.config.nearest import nearest
from attnlab.errors import ConfigError

HYBRID = "hybrid"  # the option of the group `attention` that has a pattern
PATTERN = "attention.pattern"


def parts(pattern: Any, names: Sequence[str]) -> list[str]:
    """The mechanisms of a pattern, each once; none where there is no pattern.

    Args:
        pattern: the value of `attention.pattern`, or None.
        names: the options of the group `attention`.

    Raises:
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


def implied(settings: Iterable[Override]) -> list[str]:
    """The option that a pattern on the command line implies."""
    keys = {setting.key_or_group for setting in settings}
    return [f"attention={HYBRID}"] if PATTERN in keys and "attention" not in keys else []
