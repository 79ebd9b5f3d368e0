"""Composing with Hydra, each override checked on its own first, so that an error can say what was meant."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src import config
from src.annotation import annotation_of, fits, literals, parse, words
from src.errors import ConfigError
from src.nearest import matches, nearest
from src.signature import signature

# What the root's keys may be; every other key is as its class's signature or its default says.
ROOT = {
    "mode": "Literal['train', 'test', 'bench', 'describe']",
    "seed": "int",
    "stride": "int | None",
    "rank": "int | None",
    "data_root": "Path | None",
    "checkpoint": "Path | None",
    "resume": "Path | None",
    "cache_dir": "Path",
}
LEAST = {"seed": 0, "stride": 1, "rank": 1}
OVERLAYS = ("recipe", "experiment")  # groups whose files change what other files declare, and declare nothing


def one_line(error: BaseException) -> str:
    """An exception's message, or its type if it has none, without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


class Composer:
    """Hydra's composition inside `hydra.initialize`. `directory`: one more directory of YAML files."""

    def __init__(self, directory: str | None = None) -> None:
        self.directories = [config.CONF, *([Path(directory).absolute()] if directory else [])]
        self.search = [f"hydra.searchpath=['file://{path}']" for path in self.directories[1:]]
        self.groups = self.options("", ObjectType.GROUP)

    def options(self, group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
        """The names of a group's files, or of the groups in it."""
        loader = GlobalHydra.instance().config_loader()
        return loader.get_group_options(group, kind, config_name="config", overrides=self.search)

    def text(self, group: str, option: str) -> str:
        """A group file as it is written."""
        files = [directory / group / f"{option}.yaml" for directory in self.directories]
        return next((file.read_text() for file in files if file.is_file()), "")

    def parse(self, text: str) -> Override:
        try:
            return OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_override(text)
        except HydraException as error:
            if "=" in text:
                raise ConfigError(f"cannot read {text!r}: {one_line(error)}; quote text with special signs") from error
            groups = [group for group in config.GROUPS if text in self.options(group)]
            meant = f": {groups[0]}={text}?" if groups else ", for instance attention=mtla"
            raise ConfigError(f"cannot read {text!r}: settings are written key=value{meant}") from error

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The composed configuration, Hydra's own node included."""
        try:
            return compose("config", [*self.search, *overrides], return_hydra_config=True)
        except MissingConfigException as error:
            group, _, name = (error.missing_cfg_file or "").rpartition("/")
            options = error.options or []
            if group == "recipe" and not any(text.startswith("recipe=") for text in overrides):
                task = next((task for task in self.options("task") if name.startswith(f"{task}_")), name)
                scales = [option.removeprefix(f"{task}_") for option in options if option.startswith(f"{task}_")]
                scale = name.removeprefix(f"{task}_")
                raise ConfigError(f"task={task} has no scale={scale}{nearest(scale, scales)}") from error
            raise ConfigError(f"{group}={name}: no such {group}{nearest(name, options)}") from error
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            raise ConfigError(one_line(error.__cause__ or error)) from error

    def compose_checked(self, texts: Sequence[str]) -> DictConfig:
        """Compose one job. ConfigError: the first override that names nothing or has a value of the wrong type."""
        overrides = [self.parse(text) for text in texts]
        for override in overrides:
            self._check_form(override)
        groups = [o for o in overrides if o.key_or_group in self.groups or "/" in o.key_or_group]
        values = [o for o in overrides if o not in groups]
        base = self.compose([str(o.input_line) for o in groups])
        self._check_overlays(base)
        plain = config.written(base)
        for override in values:
            for key, _ in _assigned(override):
                _check_key(plain, override, key, self.groups)
        cfg = self.compose(texts)
        for override in values:
            for key, value in _assigned(override):
                if not key.startswith("hydra."):
                    _check_value(base, cfg, key, value)
        return cfg

    def _check_form(self, override: Override) -> None:
        text, key, value = override.input_line, override.key_or_group, override.value()
        if override.is_delete():
            raise ConfigError(
                f"{text}: nothing can be deleted; set a key to null, or choose another option of its group"
            )
        if override.package is not None:
            raise ConfigError(f"{text}: '@' is not supported; write {key}={value}")
        if key not in self.groups:
            return
        if override.is_add() or override.is_force_add():
            raise ConfigError(f"{text}: every group has a choice already; write {key}={value} without '+'")
        if not isinstance(value, str) or value not in self.options(key):
            raise ConfigError(
                f"{key}={override.get_value_string()}: no such {key}{nearest(str(value), self.options(key))}"
            )

    def _check_overlays(self, base: DictConfig) -> None:
        """What a recipe or an experiment sets is declared elsewhere, or a parameter of the class it is set beside."""
        choices = base.hydra.runtime.choices
        overlays = [group for group in OVERLAYS if choices.get(group)]
        others = [group for group in config.GROUPS if choices.get(group) and group not in OVERLAYS]
        without = [f"{group}={choices[group]}" for group in others] + [f"~{group}" for group in overlays]
        bare, full = config.written(self.compose(without)), config.written(base)
        for key, _ in config.leaves({name: node for name, node in full.items() if name != "hydra"}):
            node, path, rest = _walk(bare, key)
            if rest and not (isinstance(node, dict) and "_target_" in node):
                names = " or ".join(f"{group}={choices[group]}" for group in overlays)
                raise ConfigError(f"{names} sets {key}, which is no key{_nearest_key(bare, key)}")


def _assigned(override: Override) -> Iterator[tuple[str, Any]]:
    """The keys that an override sets, with their values: `a={b: 1}` sets a.b."""

    def flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, dict):
            yield key, value
            return
        for name, item in value.items():
            yield from flat(f"{key}.{name}", item)

    return flat(override.key_or_group, override.value())


def _walk(node: Any, key: str) -> tuple[Any, str, list[str]]:
    """Follow a dotted key as far as it leads: the node reached, its own key, and the parts that are left."""
    parts = key.split(".")
    for i, part in enumerate(parts):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return node, ".".join(parts[:i]), parts[i:]
    return node, key, []


def _check_key(plain: dict[str, Any], override: Override, key: str, groups: list[str]) -> None:
    node, path, rest = _walk(plain, key)
    adding = override.is_add() or override.is_force_add()
    if adding and key.startswith("hydra."):
        return  # Hydra knows its own schema
    if not rest:
        if override.is_add():
            raise ConfigError(f"{override.input_line}: {key} exists already; write it without '+'")
        if isinstance(node, dict) and not isinstance(override.value(), dict) and override.value() is not None:
            raise ConfigError(f"{override.input_line}: {key} is a group of keys; set one of them: {', '.join(node)}")
        return
    target = str(node["_target_"]) if isinstance(node, dict) and "_target_" in node else ""
    found = signature(target) if target else None
    if found and rest[0] in found.parameters:
        if not adding:
            raise ConfigError(f"{key} is not in the configuration, but {target} takes it; write +{key}=...")
        return
    if target and adding:
        parameters = found.parameters if found else []
        raise ConfigError(f"{override.input_line}: {target} has no parameter {rest[0]!r}{nearest(rest[0], parameters)}")
    if len(rest) == 1 and not path:
        raise ConfigError(f"{key}: no such key or group{_nearest_key(plain, key, groups)}")
    raise ConfigError(f"{key}: no such key{_nearest_key(plain, key)}")


def _nearest_key(plain: dict[str, Any], key: str, groups: Sequence[str] = ()) -> str:
    """Keys that may have been meant: those beside it, those with the same end, those that look alike."""
    node, path, rest = _walk(plain, key)
    prefix = f"{path}." if path else ""
    beside = [f"{prefix}{name}" for name in matches(rest[0], node)] if isinstance(node, dict) else []
    every = [name for name in _keys(plain) if not name.startswith("hydra.")]
    same_end = [name for name in every if name.endswith(f".{key}") or name.endswith(f".{key.rpartition('.')[2]}")]
    found = list(dict.fromkeys([*matches(key, groups), *beside, *same_end, *matches(key, every, 0.8)]))[:3]
    if not found and isinstance(node, dict):
        return f"; {path or 'the root'} has: {', '.join(str(name) for name in node if name != 'hydra')}"
    return f"; nearest: {', '.join(found)}" if found else ""


def _keys(node: Any, path: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for name, child in node.items():
            key = f"{path}.{name}" if path else str(name)
            yield key
            yield from _keys(child, key)


def _check_value(base: DictConfig, cfg: DictConfig, key: str, given: Any) -> None:
    """The value has the type that the root's table, the class's annotation or the default asks for."""
    try:
        value = config.written(OmegaConf.select(cfg, key))
        default = config.written(OmegaConf.select(base, key))
    except OmegaConfBaseException:
        return  # a reference: config.resolve says what is wrong with it
    parent, _, rest = _walk(config.written(cfg), key.rpartition(".")[0]) if "." in key else ({}, "", [])
    expected = parse(ROOT[key]) if key in ROOT else None
    if expected is None and not rest and isinstance(parent, dict) and "_target_" in parent:
        found = signature(str(parent["_target_"]))
        expected = found.parameters.get(key.rpartition(".")[2]) if found else None
    if expected is None:
        expected = annotation_of(default)
    if expected is not None and not fits(expected, value):
        hint = nearest(str(value), [str(literal) for literal in literals(expected)])
        raise ConfigError(f"{key}={given}: expected {words(expected)}{hint}")
    if key in LEAST and value is not None and value < LEAST[key]:
        raise ConfigError(f"{key}={given}: expected at least {LEAST[key]}")
