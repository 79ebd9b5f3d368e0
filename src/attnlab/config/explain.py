"""The text of `attnlab explain KEY`: a key's type, default and meaning, and the file that sets it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnlab.config.bounds import words
from attnlab.config.build import ABOUT, CONF, GROUPS, leaves, written
from attnlab.config.check import parse_flags
from attnlab.config.compose import Composer, implied_options, walk
from attnlab.config.nodes import declared, owner
from attnlab.config.schema import documentation
from attnlab.errors import ConfigError


def explain(arguments: Sequence[str]) -> str:
    """Return a line for each fact about a key. `arguments`: the key, and settings such as `task=wikitext2`.

    ConfigError: there is no such key, or a setting is wrong.
    """
    flags = parse_flags(arguments)
    keys = [text.lstrip("+") for text in flags.overrides if "=" not in text]
    if len(keys) != 1:
        raise ConfigError("explain: give one key, and settings if they matter: explain attention.latent_dim attention=mla")
    key, composer = keys[0], Composer(flags.config_dir)
    with composer.hydra():
        settings = [composer.parse(text) for text in flags.overrides if "=" in text]
        if swept := [setting for setting in settings if setting.is_sweep_override()]:
            raise ConfigError(f"explain: {swept[0].input_line}: give one value")
        cfg = composer.job(settings)
        plain = written(cfg)
        parent, path, lost = walk(plain, key.rpartition(".")[0]) if "." in key else (plain, "", [])
        name = key.rpartition(".")[2]
        kinds = [] if lost else declared(parent, path, name)
        if walk(plain, key)[2] and not kinds:
            composer.job([*settings, composer.parse(f"{key}=null")])  # it names the nearest keys
        place, comment = ("the command line", "") if key in [s.key_or_group for s in settings] else ("", "")
        if not place:
            options = [str(s.input_line) for s in settings if s.key_or_group in GROUPS]
            place, comment = _place(composer, [*implied_options(settings), *options], key)
    target = owner(parent, path) if isinstance(parent, dict) else ""
    facts = {
        "group": f"{ABOUT[key]}; its options: attnlab list {key}" if key in GROUPS else "",
        "type": words(kinds[-1]) if kinds else "",  # the last one is the narrower
        "default": _default(cfg, plain, key, target),
        "set in": place,
        "sets": ", ".join(path for path, raw in leaves(plain) if f"${{{key}}}" in str(raw)),
        "meaning": documentation(target, name) or comment,
        "class": target,
    }
    return "\n".join([key, *(f"  {fact:9}{text}" for fact, text in facts.items() if text)])


def _default(cfg: DictConfig, plain: dict[str, Any], key: str, target: str) -> str:
    """The value of a key and the reference that it comes from; of a group of keys, their names."""
    raw, _, missing = walk(plain, key)
    if missing:
        return f"that of {target}; +{key}=VALUE sets it"
    if raw == "???":
        return f"none; give {key}=VALUE"
    if isinstance(raw, dict):
        return f"a group of keys: {', '.join(raw) or 'none'}"
    try:
        value = OmegaConf.select(cfg, key)
    except (OmegaConfBaseException, ValueError):  # a reference to a key that other settings fill
        return str(raw)
    text = yaml.safe_dump(written(value), default_flow_style=True, width=1000).removesuffix("...\n").strip()
    return f"{text}, from {raw}" if "${" in str(raw) else text


def _place(composer: Composer, options: list[str], key: str) -> tuple[str, str]:
    """The last file that sets a key, with its line, and the last comment beside the key. Empty: there is none."""
    place = comment = ""
    loader: Any = GlobalHydra.instance().config_loader()
    for default in reversed(loader.compute_defaults_list("config", options, RunMode.RUN).defaults):
        package = f"{default.package}." if default.package not in (None, "", "_global_") else ""
        files = [folder / f"{default.config_path}.yaml" for folder in composer.directories]
        file = next((file for file in files if file.is_file()), None)
        if file is None or not key.startswith(package):
            continue
        text = file.read_text(encoding="utf-8")
        line = _line(yaml.compose(text), key.removeprefix(package).split("."))
        if line is not None:
            inside = file.is_relative_to(CONF)
            shown = Path("conf", file.relative_to(CONF)) if inside else file
            place = place or f"{shown}, line {line + 1}"
            comment = comment or text.splitlines()[line].partition(" # ")[2].strip()
    return place, comment


def _line(node: Any, parts: Sequence[str]) -> int | None:
    """The line, from 0, of the key that `parts` lead to in a YAML document."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if name.value == parts[0]:
            line: int = name.start_mark.line
            return line if len(parts) == 1 else _line(value, parts[1:])
    return None
