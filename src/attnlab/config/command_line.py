"""The command line, parsed once: its flags, its settings, and the settings of each job of a multirun."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import IntervalSweep, Override, OverrideType, RangeSweep, ValueType
from hydra.errors import HydraException

from attnlab.config.compose import Composer, implied_options, one_line
from attnlab.errors import ConfigError

SWEEPER = "hydra/sweeper"
TEXTS = ("prompt", "input", "output")  # keys whose values are free texts or paths: no quotes are needed
SPELLINGS = {"compress.search": "task.search"}  # the task scores the settings; their keys are those of `compress`


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    Args:
        words: as given, the flags first.
        flags: Hydra's.
        settings: with the keys that the configuration files and records have.
        composer: for the files that the flags name.
    """

    words: list[str]
    flags: Namespace
    settings: list[Override]
    composer: Composer

    @property
    def keys(self) -> list[str]:
        """The keys and groups that are set."""
        return [setting.key_or_group for setting in self.settings]

    @property
    def swept(self) -> list[Override]:
        """The settings with several values."""
        return [setting for setting in self.settings if setting.is_sweep_override()]

    @property
    def multirun(self) -> bool:
        return bool(self.flags.multirun or "hydra.mode=MULTIRUN" in self.flags.overrides)

    @property
    def searches(self) -> bool:
        """Whether another sweeper than Hydra's own chooses the values."""
        return any(setting.key_or_group == SWEEPER and setting.value() != "basic" for setting in self.settings)

    def jobs(self) -> list[list[Override]]:
        """The settings of every job of Hydra's own sweeper; of another one, a job with the first values.

        Raises:
            ConfigError: there are several values without -m, or a sweeper that searches is not told in which direction.
        """
        if not self.swept:
            return [self.settings]
        if not self.multirun:
            raise ConfigError(f"{self.swept[0].input_line}: several values need -m; quote the value if it is one text")
        lines: list[list[str]]
        if not self.searches:
            try:
                lines = BasicSweeper.split_arguments(self.settings, None)[0]
            except HydraException as error:
                raise ConfigError(one_line(error)) from error
        elif "hydra.sweeper.direction" not in self.keys:
            raise ConfigError(
                f"{SWEEPER}: give hydra.sweeper.direction=maximize or minimize; a job's value is the validation metric "
                "by which its task chooses checkpoints"
            )
        else:
            fixed = [_text(setting) for setting in self.settings if setting not in self.swept]
            lines = [[*fixed, *(f"{setting.key_or_group}={_first(setting)}" for setting in self.swept)]]
        return [[self.composer.parse(text) for text in line] for line in lines]

    def for_hydra(self) -> list[str]:
        """The settings with which Hydra composes a multirun: they are checked, so the keys need not exist.

        Hydra first composes the multirun without what is swept, whose options may bring the keys.
        """
        forced = [f"++{_text(setting)}" if self._is_forced(setting) else _text(setting) for setting in self.settings]
        return [*forced, *implied_options(self.settings)]

    def of_job(self, texts: Sequence[str]) -> list[str]:
        """A job's command line, from the settings that Hydra's sweeper gives it."""
        forced = {f"++{setting.key_or_group}" for setting in self.settings if self._is_forced(setting)}
        settings = [text[2:] if text.partition("=")[0] in forced else text for text in texts]
        return [*self.sources(), *(text for text in settings if not text.startswith("hydra."))]

    def sources(self) -> list[str]:
        """The flags that say where the YAML files are."""
        return [] if self.flags.config_dir is None else [f"--config-dir={self.flags.config_dir}"]

    @staticmethod
    def _is_forced(setting: Override) -> bool:
        key = setting.key_or_group
        return "." in key and setting.type == OverrideType.CHANGE and not key.startswith("hydra.")


def parse_flags(words: Sequence[str]) -> Namespace:
    """Hydra's flags, which may stand anywhere, and the other words as `overrides`.

    Raises:
        ConfigError: a flag that there is not.
    """
    parser = get_args_parser()
    parser.error = _usage  # type: ignore[method-assign]
    flags: Namespace = parser.parse_intermixed_args(list(words))
    if flags.config_path or flags.config_name:
        flag = "--config-path" if flags.config_path else "--config-name"
        raise ConfigError(f"{flag} is fixed; --config-dir adds a directory of YAML files")
    return flags


def parse(words: Sequence[str], flags: Namespace, composer: Composer) -> CommandLine:
    """The settings of a command line, inside :meth:`Composer.hydra`.

    Raises:
        ConfigError: a word is neither a flag nor a setting.
    """
    texts = list(flags.overrides)
    settings = [_setting(text, composer, bool(flags.multirun)) for text in texts]
    return CommandLine([*(word for word in words if word not in texts), *texts], flags, settings, composer)


def _setting(text: str, composer: Composer, multirun: bool) -> Override:
    key, equals, value = text.partition("=")
    if key in TEXTS and equals and not multirun and value not in ("", "null") and value[0] not in "'\"":
        return Override(OverrideType.CHANGE, key, ValueType.ELEMENT, value, input_line=text)
    setting = composer.parse(text)
    if setting.key_or_group.startswith("trainer."):  # arguments of Lightning's Trainer, which no file lists
        return replace(setting, type=OverrideType.FORCE_ADD)
    return replace(setting, key_or_group=SPELLINGS.get(setting.key_or_group, setting.key_or_group))


def _text(setting: Override) -> str:
    """A setting as a word of the command line."""
    if setting.key_or_group in TEXTS:
        return str(setting.input_line)
    return f"{setting.get_key_element()}={str(setting.input_line).partition('=')[2]}"


def _first(setting: Override) -> str:
    """The first value of a search space."""
    space = setting.value()
    return str(space.start) if isinstance(space, IntervalSweep | RangeSweep) else next(setting.sweep_string_iterator())


def _usage(message: str) -> NoReturn:
    raise ConfigError(f"{message}; settings are written key=value, for instance attention=mtla")
