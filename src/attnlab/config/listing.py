"""The texts of `attnlab --help` and `attnlab list`, from the first comment of each configuration file."""

import re
import textwrap
from pathlib import Path

from attnlab.config.build import ABOUT, CONF, GROUPS
from attnlab.config.compose import Composer
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


def listing(names: list[str]) -> str:
    """The text of `attnlab list`: the groups, or the options of some, a line each. ConfigError: no such group."""
    composer = Composer()
    if not names:
        return "\n".join(f"{group:12}{ABOUT[group]} ({len(composer.options(group))})" for group in GROUPS)
    for name in names:
        if name not in GROUPS:
            raise ConfigError(f"list {name}: no such group{nearest(name, GROUPS)}")
    blocks = []
    for group in names:
        options = composer.options(group)
        width = max(map(len, options)) + 2
        lines = [f"  {option:{width}}{about(CONF / group / f'{option}.yaml')}" for option in options]
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
