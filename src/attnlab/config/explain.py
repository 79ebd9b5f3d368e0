"""The texts of `attnlab --help`, `attnlab list` and `attnlab explain KEY`, from the files in conf/ and docstrings."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnlab.config.build import ABOUT, CONF, GROUPS, leaves, written
from attnlab.config.check import parse_flags
from attnlab.config.compose import Composer, walk
from attnlab.config.nodes import declared, owner, words
from attnlab.config.rules import TRAINER
from attnlab.config.schema import documentation
from attnlab.errors import ConfigError, nearest

WIDTH = 110
SHORT = ("task", "attention", "compress", "convert", "scale", "hardware", "logger", "callbacks")  # in --help
KEYS = {
    "mode": "train, test, predict, generate, evaluate, compress, convert, export, bench, describe; unset: the "
    "task's first",
    "stride, rank": "the one knob of a mechanism or method; unset: the paper's value",
    "seed": "of weights, order and dropout",
    "data_root": "the corpus in its published layout; unset: the embedded sample corpus",
    "model": "pretrained weights: a local file or folder first, a hub name second",
    "checkpoint": "a run to use, with its own configuration: mode=test, predict, generate, export, evaluate",
    "input, output": "mode=predict: a text, file or folder, and a file for results; prompt: of mode=generate",
    "resume": "a run to continue; -m does that, and skips what is finished (rerun=true, retry=false: not)",
    "baseline": "a run to compare the speed of scoring with",
    "trainer.*": "any argument of Lightning's Trainer: trainer.limit_train_batches=10",
    "tags": "words for the record",
}
EXAMPLES = (
    ("speech translation on the sample corpus", "task=mustc attention=mtla stride=2"),
    ("three mechanisms, one after the other", "-m task=wikitext2 attention=mha,mla,mtla"),
    ("parameters and cache, without data", "mode=describe task=fineweb_edu scale=paper_medium attention=tpa"),
    ("a trained model on a file of one's own", "mode=predict checkpoint=outputs/mustc/mtla/RUN input=speech.wav"),
    ("a pretrained model, compressed and asked", "task=reasoning compress=tensorllm compress.keep=0.5"),
)


def help_text(program: str) -> str:
    """The text of --help. `program`: the command in the examples."""
    lines = [
        "attnlab trains, compresses, decodes and compares compact attention. One command is one row of a paper.",
        "",
        f"Groups, group=option. What an option is: {program} list GROUP",
    ]
    composer = Composer()
    for group in SHORT:
        lines += _entry(group, " ".join(composer.options(group)))
    lines.append(f"  experiment, bench, recipe, debug: {program} list experiment")
    lines += ["", "Keys, key=value:"]
    for key, about in KEYS.items():
        lines += _entry(key, about)
    lines += ["", "Examples:"]
    lines += [f"  {program} {command}  # {about}" for about, command in EXAMPLES]
    lines += [
        "",
        f"What a key means: {program} explain task.train.max_steps task=mustc",
        f"All values of a command: {program} ... --cfg job --resolve. Results: {program} runs; as a page: report.",
        'Completion in bash: eval "$(attnlab -sc install=bash)"; fish and zsh too. Hydra\'s help: --hydra-help.',
    ]
    return "\n".join(lines)


def listing(arguments: Sequence[str]) -> str:
    """The text of `attnlab list`: the groups, or the options of some, a line each. ConfigError: no such group."""
    flags = parse_flags(arguments)
    names, composer = flags.overrides, Composer(flags.config_dir)
    if not names:
        return "\n".join(f"{group:12}{ABOUT[group]} ({len(composer.options(group))})" for group in GROUPS)
    for name in names:
        if name not in GROUPS:
            raise ConfigError(f"list {name}: no such group{nearest(name, GROUPS)}")
    blocks = []
    for group in names:
        options = composer.options(group)
        width = max(map(len, options)) + 2
        lines = []
        for option in options:
            places = (folder / group / f"{option}.yaml" for folder in composer.directories)
            lines.append(f"  {option:{width}}{about(next(file for file in places if file.is_file()))}")
        blocks.append("\n".join([f"{group}: {ABOUT[group]}", *lines]))
    return "\n\n".join(blocks)


def about(file: Path) -> str:
    """The first sentence of the first comment of a file, without lines for Hydra."""
    lines: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.lstrip("# "))
    text = " ".join(" ".join(lines).split())
    return re.split(r"(?<=[a-z0-9)]\.) ", text)[0]


def _entry(name: str, text: str) -> list[str]:
    head = f"  {name:15}"
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


# --- one key ------------------------------------------------------------------------------------------------------


def explain(arguments: Sequence[str]) -> str:
    """Return a line for each fact about a key. `arguments`: the key, and settings such as `task=wikitext2`.

    ConfigError: there is no such key, or a setting is wrong.
    """
    flags = parse_flags(arguments)
    keys = [text.lstrip("+") for text in flags.overrides if "=" not in text]
    if len(keys) != 1:
        raise ConfigError("explain: give one key, and settings if they matter: explain attention.stride attention=mtla")
    key, composer = keys[0], Composer(flags.config_dir)
    with composer.hydra():
        settings = composer.settings([text for text in flags.overrides if "=" in text])
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
            place, comment = _place(composer, composer.options_of(settings), key)
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
    group, _, name = key.partition(".")
    if how := next((how for how, names in TRAINER.items() if group == "trainer" and name in names), ""):
        return f"attnlab sets it {how}"
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
