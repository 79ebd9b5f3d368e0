"""The generated part of the reference: mechanisms, methods, conversions, keys, modes and record fields.

Each build writes docs/reference/generated/ from the classes, the files of conf/ and the signatures that check the
command line.
"""

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from sphinx.application import Sphinx

from attnlab.config.build import ABOUT, CONF, instantiate
from attnlab.config.compose import Composer
from attnlab.config.explain import KEYS, about
from attnlab.config.nodes import FOREIGN, mappings, words
from attnlab.config.schema import signature
from attnlab.config.settings import ARGUMENTS, MODES, SCHEMAS
from attnlab.run.record import EXPECTED

FOLDER = Path(__file__).parents[1] / "reference" / "generated"
CONTEXTS = (64, 1024, 8192)  # positions of the cost tables
EXAMPLE = CONF.parent / "experiments/demo/mtla_14epochs_epyc.json"
GLOBAL = ("recipe", "experiment", "scale", "debug")  # groups whose files set keys from the root
OTHER_PAGES = ("attention", "compress", "convert")  # groups with a page for each option
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|[A-Z]\w*Error(, [A-Z]\w*Error)*):")


# --- text -------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """A line of a docstring or comment as MyST."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    parts = text.split("`")
    parts[::2] = [re.sub(r"([\\*_<\[$~])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def sentence(text: str) -> str:
    return text and escaped(text).rstrip(".") + "."


def code(value: Any) -> str:
    if value is None or isinstance(value, bool | list | dict):
        value = json.dumps(value, default=str)
    return f"`{value}`" if str(value) else '`""`'


def definitions(entries: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{term}\n: {text or '-'}\n" for term, text in entries)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def prose(cls: Any) -> str:
    """The docstring of a class up to its arguments, as reStructuredText."""
    lines = (inspect.getdoc(cls) or "").splitlines()
    end = next((i for i, line in enumerate(lines) if SECTION.match(line)), len(lines))
    return "```{eval-rst}\n" + "\n".join(lines[:end]).strip() + "\n```"


def described(target: Any) -> dict[str, str]:
    """The text of each argument from the docstrings of a class and its bases, or from the comments of its fields."""
    texts: dict[str, str] = {}
    for cls in reversed(inspect.getmro(target)) if inspect.isclass(target) else (target,):
        names: list[str] = []
        inside = False
        documents = (cls.__doc__, cls.__dict__["__init__"].__doc__ if "__init__" in vars(cls) else None)
        for line in "\n".join(inspect.cleandoc(text) for text in documents if text).splitlines():
            if line and not line.startswith(" "):
                inside, names = line in ("Args:", "Attributes:"), []
            elif inside and (match := re.match(r" {4}(\w+(?:, \w+)*)(?: \([^)]*\))?: +(.*)", line)):
                names = match[1].split(", ")
                texts |= dict.fromkeys(names, match[2])
            elif inside and line.startswith(" " * 8):
                texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
            elif line.strip():
                names = []
        if is_dataclass(cls):
            fields = re.findall(r"^    (\w+): [^#\n]*  # (.+)$", inspect.getsource(cls), re.MULTILINE)
            texts |= {name: text for name, text in fields if name not in texts}
    return texts


def comments(file: Path) -> dict[str, str]:
    """The comment behind each key of a YAML file, by its dotted path."""
    texts: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    last = None
    for line in file.read_text(encoding="utf-8").splitlines():
        key = re.match(r"( *)(\w+):(?: |$)", line)
        comment = re.search(r"(?:^|\s)# ?(.*)$", line)
        if key:
            path = [*(part for part in path if part[0] < len(key[1])), (len(key[1]), key[2])]
            last = ".".join(name for _, name in path) if comment else None
            if last and comment:
                texts[last] = comment[1]
        elif comment and last and line.startswith(" " * 16):
            texts[last] += f" {comment[1]}"
        else:
            last = None
    return texts


# --- keys -------------------------------------------------------------------------------------------------------


def default_of(target: Any, name: str) -> Any:
    try:
        parameter = inspect.signature(target).parameters.get(name)
    except (TypeError, ValueError):
        return inspect.Parameter.empty
    return inspect.Parameter.empty if parameter is None else parameter.default


def entry(name: str, annotation: Any, value: str, text: str) -> tuple[str, str]:
    kind = f" ({escaped(words(annotation))})" if annotation is not None else ""
    return f"`{name}`{kind}", " ".join(filter(None, (sentence(text), value)))


def class_keys(target: str, path: str, node: Mapping[str, Any], notes: Mapping[str, str], where: str = "") -> str:
    """The arguments of a `_target_` as a definition list.

    Args:
        target: dotted name.
        path: place of the node in the configuration.
        node: the values of a file, unresolved.
        notes: comments of that file by key, used for arguments without a docstring line.
        where: words for the file.
    """
    built = pkgutil.resolve_name(target)
    texts = described(built)
    entries = []
    for name, annotation in signature(target).parameters.items():
        default = default_of(built, name)
        if default is inspect.Parameter.empty and name not in node:
            continue  # the program passes it
        value = f"{where}{code(node[name])}." if name in node else f"Default {code(default)}."
        if name in node and isinstance(node[name], dict):
            value = ""
        annotation = FOREIGN.get(f"{path}.{name}", annotation)
        entries.append(entry(name, annotation, value, texts.get(name) or notes.get(name, "")))
    return definitions(entries)


def schema_keys(path: str, values: Mapping[str, tuple[str, Any]], notes: Mapping[str, str]) -> str:
    """The fields of a node without a class as a definition list.

    Args:
        values: words for a file, and the value there, by key.
        notes: comments by key.
    """
    schema = SCHEMAS[path]
    texts = described(schema)
    target = f"{schema.__module__}.{schema.__qualname__}"
    entries = []
    for name, annotation in signature(target).parameters.items():
        if (not path and name in (*ABOUT, "choices", "trainer")) or annotation == dict[str, Any]:
            continue
        where, value = values.get(name, ("", None))
        entries.append(
            entry(name, annotation, f"{where}{code(value)}." if where else "", notes.get(name) or texts.get(name, ""))
        )
    return definitions(entries)


class Configuration:
    """The files of conf/: composed options, and the class or value at each place."""

    def __init__(self) -> None:
        self.composer = Composer()
        self.targets: dict[str, dict[str, tuple[str, dict[str, Any], dict[str, str]]]] = {}
        self.values: dict[str, tuple[str, Any]] = {}  # the first file that sets a key, and its value
        self.notes: dict[str, str] = {}
        for file in sorted(CONF.rglob("*.yaml"), key=lambda file: ("paper" in file.stem, file)):
            self._read(file)

    def _read(self, file: Path) -> None:
        option = file.relative_to(CONF).with_suffix("").as_posix()
        group = option.partition("/")[0] if "/" in option else ""
        if group == "hydra":
            return
        prefix = "" if group in GLOBAL or not group else group
        prefix = f"{group}.{file.stem}" if group == "attention" else prefix
        loaded = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        notes = {f"{prefix}.{key}".strip("."): text for key, text in comments(file).items()}
        self.notes = notes | self.notes
        for path, node in mappings(loaded):
            place = f"{prefix}.{path}".strip(".")
            for key, value in node.items():
                self.values.setdefault(f"{place}.{key}".strip("."), (option, value))
            if isinstance(target := node.get("_target_"), str) and "${" not in target:
                below = {key: text for key, text in notes.items() if key.startswith(f"{place}.")}
                below = {key.removeprefix(f"{place}."): text for key, text in below.items()}
                self.targets.setdefault(place, {}).setdefault(target, (option, dict(node), below))

    def node(self, group: str, option: str) -> dict[str, Any]:
        """The node of an option, unresolved; composed if it builds on another."""
        node = OmegaConf.load(CONF / group / f"{option}.yaml")
        if "defaults" in node:
            node = compose("config", [f"{group}={option}"])[group]
        return dict(OmegaConf.to_container(node, resolve=False))  # type: ignore[arg-type]

    def options(self, group: str) -> str:
        files = {name: CONF / group / f"{name}.yaml" for name in self.composer.options(group)}
        return definitions((f"`{name}`", sentence(about(file))) for name, file in files.items())

    def option_page(self, group: str, option: str, extra: str = "") -> str:
        file = CONF / group / f"{option}.yaml"
        node, notes = self.node(group, option), comments(file)
        parts = [f"# {option}", f"`{group}={option}`", sentence(about(file))]
        target = node.get("_target_")
        if target is None:
            keys = definitions(
                entry(name, None, f"Default {code(value)}.", notes.get(name, "")) for name, value in node.items()
            )
            return "\n\n".join([*parts, "## Arguments" if keys else "", keys])
        parts += [f"Class: `{target}`", prose(pkgutil.resolve_name(target)), extra, "## Arguments"]
        parts.append(f"Set as `{group}.NAME=VALUE`. The value is that of `conf/{group}/{option}.yaml`.")
        parts.append(class_keys(target, group, node, notes, "Value "))
        for path, child in mappings(node):
            if path and isinstance(inner := child.get("_target_"), str):
                place = f"{group}.{path}"
                below = {key.removeprefix(f"{path}."): text for key, text in notes.items()}
                parts += [f"## `{place}`", class_keys(inner, place, child, below, "Value ")]
        return "\n\n".join(parts)

    def place(self, place: str) -> str:
        """The classes of a place with their arguments."""
        parts = [f"## `{place}`"] if self.targets[place] else []
        for target, (option, node, notes) in self.targets[place].items():
            built = pkgutil.resolve_name(target)
            first = (inspect.getdoc(built) or "").partition("\n\n")[0].replace("\n", " ")
            parts += [f"### {target.rpartition('.')[2]}", f"`{target}`", escaped(first)]
            parts += [class_keys(target, place, node, notes, f"In `{option}`: ")]
        return "\n\n".join(parts)


# --- pages ------------------------------------------------------------------------------------------------------


def mechanism_costs(option: str) -> tuple[str, list[str]]:
    """The section of a mechanism's costs, and its row in the comparison."""
    cfg = compose("config", [f"attention={option}", "scale=sample"])
    if "_target_" not in cfg.attention:
        return "", []
    with torch.device("meta"):
        attention = instantiate(cfg.attention, path="attention")
    size = sum(parameter.numel() for parameter in attention.parameters())
    most = attention.max_positions
    contexts = [context for context in CONTEXTS if most is None or context <= most]
    rows = [
        (f"{context:,}", f"{attention.cache_elements(1, context):,}", f"{attention.multiply_adds(context):,}")
        for context in contexts
    ]
    per_token = f"{attention.cache_elements_per_token:,g}"
    text = "\n\n".join(
        [
            "## Costs",
            f"With the sizes of `task=mustc scale=sample` (width {cfg.task.model.d_model}, "
            f"{cfg.task.attention_heads} heads), one layer has {size:,} parameters and caches {per_token} numbers per "
            "token in the limit of long texts. A decoding step of one row, without a prefix:",
            table(("positions", "cached numbers", "multiply-adds of the step"), rows),
        ]
    )
    last = rows[min(1, len(rows) - 1)]
    return text, [f"[{option}](generated/mechanisms/{option}.md)", f"{size:,}", per_token, last[2]]


def mechanisms(conf: Configuration) -> dict[str, str]:
    pages, rows = {}, []
    for option in conf.composer.options("attention"):
        costs, row = mechanism_costs(option)
        rows += [row] if row else []
        pages[f"mechanisms/{option}.md"] = conf.option_page("attention", option, costs)
    header = ("mechanism", "parameters", "cached numbers per token", f"multiply-adds at {CONTEXTS[1]:,} positions")
    pages["mechanisms.inc"] = table(header, rows)
    return pages


def methods(conf: Configuration) -> dict[str, str]:
    pages = {}
    for group, folder in (("compress", "compression"), ("convert", "conversion")):
        options = [option for option in conf.composer.options(group) if option != "none"]
        pages |= {f"{folder}/{option}.md": conf.option_page(group, option) for option in options}
    return pages


def keys(conf: Configuration) -> dict[str, str]:
    """A page for each group, each part of the task, the keys of the root, and the trainer."""
    pages = {"root": "# Keys of the root\n\n" + under(conf, "")}
    for group, text in ABOUT.items():
        parts = [f"# {group}", text[:1].upper() + text[1:] + ".", "## Options", conf.options(group)]
        if group in SCHEMAS:
            parts += ["## Keys", under(conf, group)]
        if group in OTHER_PAGES:
            folder = {"attention": "mechanisms", "compress": "compression", "convert": "conversion"}[group]
            parts.append(f"The keys of each option have [a page](../../{folder}.md).")
        elif group != "task":
            parts += [conf.place(place) for place in sorted(conf.targets) if place.split(".")[0] == group]
        pages[group] = "\n\n".join(parts)
    places = [place for place in (*conf.targets, *SCHEMAS) if place.startswith("task.")]
    for part in sorted({place.split(".")[1] for place in places}):
        name = f"task.{part}"
        inside = sorted({place for place in places if f"{place}.".startswith(f"{name}.")})
        texts = [f"# {name}"]
        for place in inside:
            texts.append(conf.place(place) if place in conf.targets else f"## `{place}`\n\n{under(conf, place)}")
        pages[name] = "\n\n".join(texts)
    for node, target in ARGUMENTS.items():
        first = f"Each key is an argument of `{target}`, for instance `trainer.limit_train_batches=10`."
        pages[node] = "\n\n".join([f"# {node}", first, class_keys(target, node, {}, {})])
    return {f"configuration/{name}.md": text for name, text in pages.items()}


def under(conf: Configuration, place: str) -> str:
    """The fields of a node without a class."""
    file = {"": CONF / "config.yaml", "hardware": CONF / "hardware" / "auto.yaml"}.get(place)
    cut = len(place) + 1
    if file:
        loaded = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        assert isinstance(loaded, dict)
        values = {str(key): ("Default ", value) for key, value in loaded.items()}
        notes = {part: text for keys, text in KEYS.items() for part in keys.split(", ")} if not place else {}
        notes |= comments(file)
    else:
        inside = {path[cut:]: found for path, found in conf.values.items() if path.startswith(f"{place}.")}
        values = {path: (f"In `{option}`: ", value) for path, (option, value) in inside.items()}
        notes = {path[cut:]: text for path, text in conf.notes.items() if path.startswith(f"{place}.")}
    text = inspect.cleandoc(SCHEMAS[place].__doc__ or "").replace("\n", " ")
    return escaped(text) + "\n\n" + schema_keys(place, values, notes)


def modes(conf: Configuration) -> dict[str, str]:
    tasks: dict[str, list[str]] = {}
    for task in conf.composer.options("task"):
        texts = [(CONF / "task" / f"{task}.yaml").read_text(encoding="utf-8")]
        bases = re.findall(r"- (base/\w+)@", texts[0])
        texts += [(CONF / "task" / f"{base}.yaml").read_text(encoding="utf-8") for base in bases]
        for mode in next(OmegaConf.create(text).modes for text in texts if re.search("^modes:", text, re.MULTILINE)):
            tasks.setdefault(mode, []).append(task)
    entries = []
    for mode in MODES:
        module = importlib.import_module(f"attnlab.modes.{mode}")
        first = (module.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        text = first.partition(": ")[2].rstrip(".") + "."
        every = getattr(module, "EVERY_TASK", False)
        names = "every task" if every else ", ".join(f"`{task}`" for task in tasks.get(mode, []))
        entries.append((f"`mode={mode}`", f"{escaped(text[:1].upper() + text[1:])} Tasks: {names}."))
    return {"modes.inc": definitions(entries)}


def fields() -> dict[str, str]:
    """The fields of record.json with their kinds, and their values in a committed record."""
    record = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    entries = []
    for key, kind in EXPECTED.items():
        value: Any = record
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        name = {"float": "number or `not run`", "str": "text", "int": "integer", "dict": "mapping"}[kind.__name__]
        shown = "" if value is None or isinstance(value, dict) else f" Example: {code(value)}."
        entries.append((f"`{key}`", f"{name[:1].upper() + name[1:]}.{shown}"))
    return {"record.inc": definitions(entries)}


def generate(app: Sphinx) -> None:
    """Write the pages; a page that did not change keeps its time, so that it is not read again."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        conf = Configuration()
        pages = mechanisms(conf) | methods(conf) | keys(conf) | modes(conf) | fields()
    for path in FOLDER.rglob("*.*"):
        if path.relative_to(FOLDER).as_posix() not in pages:
            path.unlink()
    for name, text in pages.items():
        path, text = FOLDER / name, re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def move_others(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Move "Others are those of ..." out of the arguments, where napoleon would take it for the name of one."""
    others = [i for i, line in enumerate(lines) if re.match(r"\s+(Others|Arguments) are those of", line)]
    for i in reversed(others):
        text = lines.pop(i).strip()
        while i < len(lines) and lines[i].startswith(" " * 4) and not re.match(r" {4}\w+(, \w+)*: ", lines[i]):
            text += " " + lines.pop(i).strip()
        start = next(j for j in range(i, -1, -1) if lines[j].strip() == "Args:")
        lines[start:start] = [text, ""]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", generate)
    app.connect("autodoc-process-docstring", move_others, priority=400)  # before napoleon
    return {"parallel_read_safe": True}
