"""Multiruns: the command lines of their jobs, and what Hydra's sweeper is given."""

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from attnlab.errors import ConfigError

SWEEPER = "hydra/sweeper"
EMPTY = ("compress", "convert")  # groups whose default option has no keys


def searches(overrides: list[Override]) -> bool:
    """Whether another sweeper than Hydra's own chooses the values.

    Args:
        overrides: of the command line.
    """
    return any(override.key_or_group == SWEEPER and override.value() != "basic" for override in overrides)


def of_options(overrides: list[Override], swept: list[Override]) -> set[str]:
    """The settings of options that are swept, `compress.keep=0.5` beside `compress=laser,trawl`, as they are written.

    Hydra composes a sweep as a whole without what is swept, and the default option need not have such a key. An
    experiment may choose any option: beside swept experiments all settings are such.

    Args:
        overrides: of the command line.
        swept: those with several values.
    """
    groups = tuple(f"{override.key_or_group}." for override in swept)
    others = [override for override in overrides if override not in swept and not searches(overrides)]
    names = [str(override.key_or_group) for override in others]
    if any(override.key_or_group == "experiment" for override in swept):
        groups = tuple(name for name in names if "." in name and not name.startswith("hydra."))
    return {str(override.input_line) for override, name in zip(others, names, strict=True) if name.startswith(groups)}


def as_a_sweep(text: str) -> str:
    """A setting as a sweep of one value.

    Args:
        text: `compress.keep=0.5`.
    """
    key, _, value = text.partition("=")
    return f"{key}=choice({value})" if value else text


def jobs_of(overrides: list[Override], swept: list[Override]) -> list[list[str]]:
    """The command lines to check: every job of Hydra's own sweeper; of another one, the ends of each search space.

    Args:
        overrides: of the command line.
        swept: those with several values.

    Raises:
        ConfigError: a sweeper that searches is not told in which direction, or cannot be given a setting.
    """
    fixed = [override for override in overrides if override not in swept]
    chosen = {str(override.key_or_group): override.value() for override in fixed}
    if chosen.get(SWEEPER, "basic") == "basic":
        jobs: list[list[str]] = BasicSweeper.split_arguments(overrides, None)[0]
        return jobs
    if "hydra.sweeper.direction" not in chosen:
        raise ConfigError(
            f"{SWEEPER}={chosen[SWEEPER]}: give hydra.sweeper.direction=maximize or minimize; a job's value is the "
            "validation metric by which its task chooses checkpoints"
        )
    groups = {str(override.key_or_group) for override in swept if override.key_or_group in EMPTY}
    for override in fixed:
        key, text = str(override.key_or_group), str(override.input_line)
        if key.partition(".")[0] in groups and "." in key:
            raise ConfigError(
                f"{text}: {SWEEPER}={chosen[SWEEPER]} composes all but what it searches, so without the options of "
                f"{key.partition('.')[0]}=; give it as a search space of one value, {as_a_sweep(text)}"
            )
    spaces = {str(override.key_or_group): ends(override) for override in swept}
    first = {key: values[0] for key, values in spaces.items()}
    lines = [first | {key: value} for key, values in spaces.items() for value in values]
    return [
        [*(str(one.input_line) for one in fixed), *(f"{key}={value}" for key, value in line.items())] for line in lines
    ]


def ends(override: Override) -> list[str]:
    """The values of a search space that are checked: every choice, or the ends of a range.

    Args:
        override: with several values.
    """
    space = override.value()
    if isinstance(space, IntervalSweep):
        return [str(space.start), str(space.end)]
    if isinstance(space, RangeSweep):
        return [str(space.start), str(space.stop)]
    return list(override.sweep_string_iterator())
