"""Compose the options of groups with Hydra, then check and set each key of the command line."""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra import conf as hydra_files
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnlab.config import build as config
from attnlab.config.nodes import bases_of, declared, is_text, mappings, owner, parameters, require
from attnlab.config.settings import ARGUMENTS
from attnlab.errors import ConfigError, matches, nearest, printable

COMMANDS = ("list", "explain", "report", "runs")  # the first word of a command line without a run
TEXTS = ("prompt", "input", "output")  # in which ${...} is no reference
PRETRAINED = "pretrained"  # the scale of a language model that model= names
DIRECTORIES = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
VALUES = re.compile(rf"(?:^|(?<=,))(?:(?:{QUOTED.pattern})(?=,|$)|[^,]*)", re.DOTALL)
SWEEP = re.compile(r"(choice|shuffle|sort|range|interval|glob|tag)\(.*\)$")  # values that Hydra's grammar computes
QUOTES = """quote text with special signs, within the shell's quotes too: 'bench.references=[mha,"mtla.stride=4"]'"""


def one_line(error: BaseException) -> str:
    """An exception's message, or its type if it has none, without line breaks and control characters."""
    return printable(" ".join(str(error).split())) or type(error).__name__


class Composer:
    """Composes configurations inside :meth:`hydra`, from conf/ and the `directory` of --config-dir."""

    def __init__(self, directory: str | None = None) -> None:
        self.directories = [config.CONF, *([Path(directory).absolute()] if directory else [])]
        if not self.directories[-1].is_dir():
            raise ConfigError(f"--config-dir={directory}: no such directory")
        added = self.directories[-1]  # its other folders may be anything
        places = [added / path.name for path in sorted(config.CONF.iterdir())]
        files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.yaml")))]
        self.texts = tuple(self._checked(file) for file in files if directory)

    @contextmanager
    def hydra(self) -> Iterator[None]:
        """Hydra, initialised with the directories."""
        with initialize_config_dir(str(config.CONF), job_name="run", version_base="1.3"):
            search_path = create_config_search_path(str(config.CONF))
            for path in self.directories[1:]:
                search_path.prepend("command-line", f"file://{path}", SearchPathQuery(provider="schema"))
            GlobalHydra.instance().clear()
            Hydra.create_main_hydra2("run", search_path)
            yield

    def options(self, group: str) -> list[str]:
        """The names of a group's files, `folder/name` for those in folders; base/ holds what other files build on."""
        folders = [directory / group for directory in self.directories]
        names = {
            file.relative_to(folder).with_suffix("").as_posix() for folder in folders for file in folder.rglob("*.yaml")
        }
        return sorted(name for name in names if not name.startswith("base/"))

    def _checked(self, file: Path) -> str:
        """The text of a file of --config-dir. ConfigError: it has a built-in one's name, or is no YAML."""
        place = file.relative_to(self.directories[-1])
        if any((folder / place).is_file() for folder in (config.CONF, Path(hydra_files.__file__).parent)):
            raise ConfigError(f"{file}: {place} is a built-in file, which would be taken instead; rename yours")
        try:
            text = file.read_text(encoding="utf-8")
            content = yaml.safe_load(text)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"{file}: not YAML in UTF-8 ({one_line(error)})") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: expected keys and values, found {type(content).__name__}")
        return text

    def text(self, group: str, option: str) -> str:
        """An option's file as it is written, with the files of other options that it builds on."""
        places = [directory / group / f"{option}.yaml" for directory in self.directories]
        text = next((place.read_text(encoding="utf-8") for place in places if place.is_file()), "")
        entries = yaml.safe_load(text).get("defaults", []) if "\ndefaults:" in f"\n{text}" else []
        bases = [entry.partition("@")[0] for entry in entries if isinstance(entry, str)]
        return text + "".join(self.text(group, name) for name in bases if not name.startswith(("_", "base/")))

    def scales(self, task: str) -> list[str]:
        """The scales for which a task, or the file that it builds on, has a recipe."""
        names = [task, *re.findall(r"^ *- base/(\w+)@_here_", self.text("task", task), re.MULTILINE)]
        recipes = {file.stem for folder in self.directories for file in (folder / "recipe").rglob("*.yaml")}
        return [scale for scale in self.options("scale") if any(f"{name}_{scale}" in recipes for name in names)]

    def settings(self, texts: Sequence[str], multirun: bool = False) -> list[Override]:
        """Parse settings as they are typed: texts and paths as they are, all else by Hydra's grammar.

        The quotes around a whole text are left out, and null stands for none. `multirun`: a comma outside such quotes
        separates values. ConfigError: a setting cannot be read.
        """
        plain = self._plain(texts)
        return [self.parse(literal(text, multirun) if takes_text(plain, _key(text)) else text) for text in texts]

    def _plain(self, texts: Sequence[str]) -> dict[str, Any]:
        """The configuration of the options among settings, of the first where one has several; empty: one is wrong."""
        try:
            parsed = [self.parse(text) for text in texts if _key(text) in config.GROUPS]
            first = [f"{s.key_or_group}={next(s.sweep_string_iterator())}" if s.is_sweep_override() else s.input_line
                     for s in parsed]  # fmt: skip
            implied = ["attention=hybrid"] * (
                config.PATTERN in map(_key, texts) and "attention" not in map(_key, texts)
            )
            plain: dict[str, Any] = config.written(self.compose([*implied, *map(str, first)]))
        except (ConfigError, HydraException, TypeError):  # which the check of the whole command line reports
            return {}
        return plain

    def parse(self, text: str) -> Override:
        """Parse a setting in Hydra's grammar. ConfigError: it cannot be read."""
        try:
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            override = parser.parse_overrides([text])[0]
            if not override.key_or_group:
                raise HydraException("it begins with '='")
            return override
        except HydraException as error:
            raise self._unreadable(text, error) from error

    def _unreadable(self, text: str, error: HydraException) -> ConfigError:
        if "=" in text:
            reason = one_line(error).removeprefix(f"Error parsing override '{text}' ").partition(" See http")[0]
            return ConfigError(f"cannot read {text!r} ({reason}); {QUOTES}")
        groups = [group for group in config.GROUPS if text in self.options(group)]
        near = [f"; nearest command: {name}" for name in matches(text, COMMANDS)]
        meant = f": {groups[0]}={text}?" if groups else [*near, ", for instance attention=mtla"][0]
        return ConfigError(f"cannot read {text!r}: settings are written key=value{meant}")

    def compose(self, settings: Sequence[str], file: str = "") -> DictConfig:
        """The composed configuration of the root file with Hydra's node, or of another file; do not modify it."""
        try:
            return _composed(self.texts, tuple(self.directories), file or "config", *settings)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
            raise self._refused(settings, error) from error

    def _refused(self, settings: Sequence[str], error: Exception) -> ConfigError:
        if isinstance(error, RecursionError):
            return ConfigError(f"{' '.join(settings)}: files build on each other; look at their defaults")
        if not isinstance(error, MissingConfigException):
            return ConfigError(one_line(error.__cause__ or error))
        group, _, name = (error.missing_cfg_file or "").partition("/")
        options = self.options(group) if group in config.GROUPS else error.options or []
        if group == "hydra":
            group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return ConfigError(f"{group}={name}: no such {group}{nearest(name, options)}")

    def job(self, settings: Sequence[Override]) -> DictConfig:
        """Compose the options that the settings of a job choose; then check and set its keys (else ConfigError)."""
        for setting in settings:
            self.check_form(setting)
        values = [setting for setting in settings if not _is_option(setting)]
        cfg = copy.deepcopy(self.compose(self.options_of(settings)))
        if isinstance(name := config.written(cfg.task).get("score"), str):  # in a file: score: bleu
            cfg.task.score = {"name": name, "tokenize": None}
        if "pattern" in (cfg.get("attention") or {}):
            self._add_mechanisms(cfg, values)
        plain = config.written(cfg)
        pairs = [pair for setting in values for pair in assigned(plain, setting)]
        for key, value in pairs:
            if not key.startswith("hydra."):
                check_value(plain, key, value)
        try:
            for key, value in pairs:
                OmegaConf.update(cfg, key, value, merge=True, force_add=True)
        except OmegaConfBaseException as error:  # a key of Hydra
            raise ConfigError(one_line(error)) from error
        return cfg

    def options_of(self, settings: Sequence[Override]) -> list[str]:
        """The options that settings choose, and those that they imply: `model=` implies a scale if the task has it."""
        lines = [*implied_options(settings), *(str(s.input_line) for s in settings if _is_option(s))]
        cfg, given = self.compose(lines), {setting.key_or_group: setting for setting in settings}
        choices, model = cfg.hydra.runtime.choices, given["model"].value() if "model" in given else cfg.model
        if model is None or "scale" in given or choices.scale != "sample":
            return lines
        if PRETRAINED not in self.scales(choices.task):
            return lines
        return [f"scale={PRETRAINED}", *lines]

    def _add_mechanisms(self, cfg: DictConfig, settings: Sequence[Override]) -> None:
        """Put the files of a hybrid stack's mechanisms below `attention.mechanisms`."""
        patterns = [setting.value() for setting in settings if setting.key_or_group == config.PATTERN]
        names = mechanisms_of(patterns[-1] if patterns else cfg.attention.pattern, self.options("attention"))
        nodes = {name: config.written(self.compose([], f"attention/{name}").attention) for name in names}
        OmegaConf.update(cfg, "attention.mechanisms", nodes, merge=False, force_add=True)

    def check_form(self, override: Override) -> None:
        """Refuse a form of override that the project does not take, and an option that a group does not have."""
        text, key, value = override.input_line, override.key_or_group, override.value()
        if override.is_delete() or override.package is not None or key == "hydra.searchpath":
            raise ConfigError(f"{text}: not supported; set a key to null, or add files by --config-dir=<directory>")
        if "/" in key and not key.startswith("hydra/"):
            raise ConfigError(f"{text}: no such group{nearest(key, config.GROUPS)}")
        if key not in config.GROUPS:
            return
        if override.is_add() or override.is_force_add():
            raise ConfigError(f"{text}: every group has a choice already; write {key}={value} without '+'")
        for name in value if isinstance(value, list) and key in config.LISTS else [value]:
            if not isinstance(name, str) or name not in self.options(key):
                hint = nearest(str(name), self.options(key)) or f"; `attnlab list {key}` names all"
                raise ConfigError(f"{key}={override.get_value_string()}: no such {key}{hint}")


def takes_text(plain: dict[str, Any], key: str) -> bool:
    """Whether a key takes texts or paths alone. `plain`: the configuration; of a run that is loaded, any."""
    if key.startswith("hydra") or key in config.GROUPS:
        return key in DIRECTORIES
    above, _, name = key.rpartition(".")
    parent, path, rest = walk(plain, above) if above else (plain, "", [])
    bases = [parameters({"_target_": base}, above).get(name) for base in bases_of(above)]
    kinds = [kind for kind in bases if kind is not None] if rest else declared(parent, path, name)
    return bool(kinds) and all(map(is_text, kinds))


def literal(text: str, multirun: bool = False) -> str:
    """A setting of a text or path, as it is typed, in the quotes that Hydra's grammar needs."""
    key, equals, value = text.partition("=")
    if not equals or value in ("", "null") or (multirun and SWEEP.match(value)):
        return text
    values = VALUES.findall(value) if multirun else [value]
    return f"{key}={','.join(map(quoted, values if len(values) == 1 else map(str.strip, values)))}"


def quoted(text: str) -> str:
    """A text in the quotes that Hydra's grammar needs; one that has them stays."""
    return text if QUOTED.fullmatch(text) else QuotedString(text, Quote.single).with_quotes()


def _is_option(setting: Override) -> bool:
    return "/" in setting.key_or_group or setting.key_or_group in config.GROUPS


def _key(text: str) -> str:
    return text.partition("=")[0].lstrip("+")


def mechanisms_of(pattern: Any, names: Sequence[str]) -> list[str]:
    """The different mechanisms in `attention.pattern`. ConfigError: it is not a list of options `names`."""
    if pattern is None:
        return []
    single = [name for name in names if name != "hybrid"]
    if not isinstance(pattern, Sequence) or isinstance(pattern, str) or not pattern:
        raise ConfigError(f"{config.PATTERN}={pattern}: expected a list of mechanisms, such as [mtla,mtla,mha]")
    for name in pattern:
        if name not in single:
            raise ConfigError(f"{config.PATTERN}: {name} is not a mechanism{nearest(str(name), single)}")
    return list(dict.fromkeys(pattern))


def implied_options(settings: Sequence[Override]) -> list[str]:
    """The option that `attention.pattern=` on the command line implies."""
    keys = {setting.key_or_group for setting in settings}
    return ["attention=hybrid"] if config.PATTERN in keys and "attention" not in keys else []


@lru_cache(maxsize=1024)
def _composed(texts: tuple[str, ...], directories: tuple[Path, ...], name: str, *settings: str) -> DictConfig:
    """Memoized, since Hydra needs 0.1 s. `texts`: of the files in --config-dir."""
    return compose(name, list(settings), return_hydra_config="/" not in name)


def flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings with its dotted key, below `key`; a list and an empty mapping are values."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from flat(f"{key}.{name}" if key else name, item)


def assigned(plain: dict[str, Any], setting: Override) -> list[tuple[str, Any]]:
    """The keys of `plain` that a setting gives, with their values: `a={b: 1}` gives a.b. ConfigError: no such key."""
    pairs = [
        (key, config.escaped(value) if key in TEXTS and isinstance(value, str) else value)
        for key, value in flat(setting.key_or_group, setting.value())
    ]
    adding = setting.is_add() or setting.is_force_add()
    for key, value in pairs:
        if value == MISSING:
            raise ConfigError(f"{key}={value}: this text marks a value that is missing; give another")
        node, _, rest = walk(plain, key)
        if adding and key.startswith("hydra."):
            continue  # Hydra checks its own schema
        if rest:
            _check_missing(plain, setting, key)
        elif setting.is_add():
            raise ConfigError(f"{setting.input_line}: {key} exists already; write it without '+'")
        elif isinstance(node, dict) and not isinstance(setting.value(), dict | None):
            inner = f": {', '.join(node)}" if node else ", for instance trainer.limit_train_batches=10"
            raise ConfigError(f"{setting.input_line}: {key} is a group of keys; set one of them{inner}")
    return pairs


def walk(node: Any, key: str) -> tuple[Any, str, list[str]]:
    """Follow a dotted key as far as it leads: the last node, its key, and the remaining parts."""
    parts = key.split(".")
    for i, part in enumerate(parts):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return node, ".".join(parts[:i]), parts[i:]
    return node, key, []


def _check_missing(plain: dict[str, Any], setting: Override, key: str) -> None:
    """Accept `+key=` of a parameter that the configuration lacks. ConfigError: any other missing key."""
    adding = setting.is_add() or setting.is_force_add()
    node, path, rest = walk(plain, key)
    target = owner(node, path) if isinstance(node, dict) and ("_target_" in node or path in ARGUMENTS) else ""
    known = parameters(node, path) if target else {}
    if rest[0] in known and adding:
        return
    if rest[0] in known:
        raise ConfigError(f"{key} is not in the configuration, but {target} takes it; write +{key}=...")
    if target and (adding or path in ARGUMENTS):
        raise ConfigError(f"{key}: {target} has no parameter {rest[0]!r}{nearest(rest[0], known)}")
    raise ConfigError(f"{key}: no such key{_nearest_key(plain, key)}")


def _nearest_key(plain: dict[str, Any], key: str) -> str:
    """Keys that may have been meant: those with the same end, those beside it, those that look alike."""
    node, path, rest = walk(plain, key)
    names = [f"{place}.{name}".lstrip(".") for place, inner in mappings(plain) for name in inner]
    every = [name for name in names if not name.startswith("hydra.") or key.startswith("hydra.")]
    order = {group: i for i, group in enumerate(config.GROUPS)}
    every.sort(key=lambda name: order.get(name.partition(".")[0], -1))  # a task's keys before a mechanism's
    same_end = [name for name in every if name.endswith(f".{key}")]
    same_end += [name for name in every if "." in key and f".{name}".endswith(f".{key.rpartition('.')[2]}")]
    if "." not in key:
        same_end += matches(key, config.GROUPS)
    beside = matches(rest[0], node, 0.7) if isinstance(node, dict) and len(rest) == 1 else []
    alike = matches(key, [name for name in every if name.count(".") == key.count(".")], 0.8)
    names = [*same_end, *(f"{path}.{name}" if path else name for name in beside), *alike]
    if names:
        return f"; nearest: {', '.join(list(dict.fromkeys(names))[:3])}"
    if path in config.LISTS and rest and not (isinstance(node, dict) and rest[0] in node):
        return f"; {path}={rest[0]} is not chosen"
    if isinstance(node, dict):
        return f"; {path or 'the root'} has: {', '.join(str(name) for name in node if name != 'hydra')}"
    return f"; {path} is a single value"


def check_value(plain: dict[str, Any], key: str, value: Any) -> None:
    """Check that a value fits the annotation of its key. `plain`: the configuration without the command line."""
    if "${" in str(value):
        return  # a reference: what it leads to is checked in the composed configuration
    parent, path, rest = walk(plain, key.rpartition(".")[0]) if "." in key else (plain, "", [])
    for annotation in [] if rest else declared(parent, path, key.rpartition(".")[2]):
        require(key, annotation, value)
