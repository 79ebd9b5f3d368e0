"""The visible configuration as text beside this file, which a change of the code must not change.

- configurations.txt: every task resolved, a value in each line; of every other option and of every overlay in
  conf/experiment/ what it changes.
- outputs.txt: what `attnlab --help` and `attnlab list` print.
- refusals.tsv: wrong command lines with the key that the error names, and the nearest names that it gives.

python -m tests.golden.frozen writes the first two again, after a change that must alter them.
"""

import contextlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

from omegaconf import OmegaConf

from attnlab.cli import command
from attnlab.config.build import CONF, leaves
from attnlab.config.check import check
from attnlab.errors import ConfigError
from attnlab.run.loading import load

FOLDER = Path(__file__).parent
CONFIGURATIONS, OUTPUTS, REFUSALS = FOLDER / "configurations.txt", FOLDER / "outputs.txt", FOLDER / "refusals.tsv"
GROUPS = {"wikitext2": ["attention", "callbacks", "debug"], "imagenet": ["compress"]}  # by task
SPELLINGS = [  # knobs, items of lists, keys that no file has, stacks of mechanisms
    "task=mustc attention=mtla stride=3", "task=mustc attention=mla rank=64", "task=mustc attention=mha",
    "task=mustc +task.optimizer.eps=1e-9 task.model.encoder.conv_kernels.0=7",
    "task=wikitext2 attention.pattern=[mtla,mtla,mha]",
]  # fmt: skip
PRINTED = ["--help", "list", *(f"list {group}" for group in ("task", "attention", "compress", "convert", "experiment"))]


def options(group: str) -> list[str]:
    folder = CONF / group
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in sorted(folder.rglob("*.yaml"))]
    return [name for name in names if not name.startswith("base/")]


def command_lines() -> list[str]:
    """Every task, every other option with a task that has it, every overlay."""
    lines = [f"task={task}" for task in options("task")]
    pairs = [(task, group) for task, groups in GROUPS.items() for group in groups]
    lines += [f"task={task} {group}={name}" for task, group in pairs for name in options(group)]
    recipes = set(options("recipe"))
    scales = [name for name in options("scale") if name != "sample"]
    lines += [f"task={task} scale={name}" for task in options("task") for name in scales if f"{task}_{name}" in recipes]
    return lines + [f"experiment={name}" for name in options("experiment")] + SPELLINGS


def configuration(line: str) -> dict[str, str]:
    """The resolved configuration of a command line, without the user's folders: JSON by dotted key."""
    cfg = check(line.split()).jobs[0]
    values = {key: json.dumps(value) for key, value in leaves(OmegaConf.to_container(cfg, resolve=True))}
    return {key: value for key, value in values.items() if not key.endswith("cache_dir")}


def block(line: str, values: Mapping[str, str], task: Mapping[str, str]) -> str:
    """The text of one command line: what it has besides its task's configuration, and what it lacks."""
    added = [f"{key}: {value}" for key, value in values.items() if task.get(key) != value]
    lines = [*added, *(f"- {key}" for key in task if key not in values)]
    return "".join(f"{text}\n" for text in [f"## {line}", *lines])


def configurations(lines: Sequence[str]) -> dict[str, str]:
    """The texts of these command lines, by line."""
    texts, tasks = {}, {}
    for line in lines:
        try:
            values = configuration(line)
        except ConfigError as error:
            texts[line] = f"## {line}\nrefused: {error}\n"
            continue
        name = f"task={json.loads(values['choices.task'])}"
        if line != name and name not in tasks:
            tasks[name] = configuration(name)
        texts[line] = block(line, values, {} if line == name else tasks[name])
    return texts


def printed(line: str) -> str:
    """What the command prints, with its prompt."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), mock.patch("sys.argv", ["attnlab", *line.split()]):
        assert command() == 0
    return f"$ attnlab {line}\n{text.getvalue()}"


def refusal(arguments: Sequence[str]) -> str:
    """The message of the error."""
    try:
        check(arguments, load)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{arguments}: accepted")


def nearest(message: str) -> str:
    match = re.search(r"nearest: ([^;]+)", message)
    return match.group(1) if match else ""


def refusals() -> Iterator[tuple[list[str], str, str]]:
    """The arguments of each wrong command line, the key in its error, and the nearest names."""
    for line in REFUSALS.read_text(encoding="utf-8").splitlines():
        arguments, key, names = line.split("\t")
        yield json.loads(arguments), key, names


def main() -> None:
    """Write the configurations and the printed texts again; refusals.tsv is edited by hand."""
    CONFIGURATIONS.write_text("\n".join(configurations(command_lines()).values()), encoding="utf-8")
    OUTPUTS.write_text("\n".join(map(printed, PRINTED)), encoding="utf-8")


if __name__ == "__main__":
    main()
