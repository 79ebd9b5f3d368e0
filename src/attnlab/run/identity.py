"""What makes two runs the same: one definition for records, checkpoints and tables.

The recipe is the resolved configuration without the keys that decide where and how fast it runs. The run is the recipe
with its seed, its corpus, its mode and what that mode reads. Neither imports torch.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnlab.config.build import PATTERN
from attnlab.config.renames import RENAMES
from attnlab.config.schema import definition, definitions
from attnlab.errors import ConfigError
from attnlab.run import fingerprint

OURS = re.compile(r"attnlab(\.[A-Za-z_]\w*)+")  # a function given by its dotted path

# All keys are exact paths from the root: a key of the same name elsewhere counts, and so does every key not listed.
LEFT_OUT = (
    "hydra",
    "choices",  # names of options: what they hold counts
    "scale",
    "stride",  # these four only feed other keys
    "rank",
    "task.grids",
    "model",
    "data_root",  # directories; the corpus itself is part of the run
    "cache_dir",
    "resume",
    "input",  # of mode=predict, which measures nothing
    "output",
    "task.data.root",
    "task.data.cache_dir",
    "task.name",
    "task.modes",
    "task.attention_heads",  # these seven only feed the attention's own keys
    "task.attention_head_dim",
    "task.attention_bias",
    "task.attention_dropout",
    "task.attention_prefix",
    "task.attention_rank",
    "task.attention_window",
    "task.data.num_workers",
    "task.data.batch_size",  # these two limit a batch of one process; task.train.batch is what an update sees
    "task.data.max_frames",
    "task.train.log_every",
    "logger",
    "tags",
    "retry",  # these two say which jobs of a multirun are done
    "rerun",
    "callbacks.learning_rate",  # these two only watch
    "callbacks.device_stats",
    "trainer.profiler",  # these four change no numbers
    "trainer.enable_model_summary",
    "trainer.barebones",
    "trainer.detect_anomaly",
    "format",  # of an exported model
    "baseline",
    "hardware.accelerator",
    "hardware.devices",
    "hardware.num_nodes",
    "hardware.strategy",
    "hardware.compile",
    "hardware.gradient_checkpointing",
    "hardware.loss_chunk",
    "hardware.find_batch",
    "hardware.find_batch_gib",
)
OPTIONAL = ("callbacks", "trainer", "convert")  # nodes that say nothing while they are empty
OF_THE_RUN = ("mode", "seed", "checkpoint", "prompt", "bench")  # not part of the recipe
SEEDS = ("task.data.seed", "task.sampling.seed", "compress.start_seed")  # copies of `seed`, left out if equal to it
WEIGHTS = ("checkpoint", "task.encoder_checkpoint", "task.model.weights", "task.weights", "task.data.vocabulary.file")
READ_BENCH = ("bench", "describe")  # the modes that read the `bench` node
ARCHITECTURE = {"mechanism": "attention", "model": "task.model", "compression": "compress"}  # of a checkpoint
NOTHING_READ = "none"  # the fingerprint of a run without a corpus

Config = DictConfig | Mapping[str, Any]


def recipe(cfg: Config, weights: Mapping[str, str] | None = None) -> str:
    """The SHA-256 of :func:`canonical`, 64 hexadecimal digits. Two runs of one recipe differ in seed or corpus."""
    return _digest(canonical(cfg, weights))


def run(
    cfg: Config,
    corpus: str,
    weights: Mapping[str, str] | None = None,
    device: str | None = None,
    threads: int | None = None,
) -> str:
    """The SHA-256 of what makes this run itself: recipe, seed, corpus, mode, and what the mode reads.

    Args:
        cfg: a resolved configuration, or the `config` of a record.
        corpus: the corpus' fingerprint (:func:`attnlab.run.fingerprint.corpus`), or NOTHING_READ.
        weights: see :func:`canonical`.
        device: what mode=bench measured on. Other modes ignore it.
        threads: the threads of mode=bench. Other modes ignore them.
    """
    plain = renamed(_plain(cfg))
    weights = contents(plain) if weights is None else weights
    mode = plain["mode"]
    about: dict[str, Any] = {"recipe": recipe(plain, weights), "corpus": corpus, "mode": mode, "seed": plain["seed"]}
    about |= {key: weights.get(key, plain[key]) for key in ("checkpoint", "prompt") if plain.get(key) is not None}
    if mode in READ_BENCH:
        about["bench"] = _normal(plain["bench"])
    if mode == "bench":
        about |= {"device": device, "threads": threads}
    return _digest(about)


def canonical(cfg: Config, weights: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The part of a configuration that changes numbers, in one form: what two runs must share to be one recipe.

    Keys and classes have today's names (see :mod:`attnlab.config.renames`). A `_target_` is the name of a class without
    its module, a number is an int where it can be one, the pattern of a hybrid stack is its shortest period, and
    pretrained weights are replaced by their content.

    Args:
        cfg: a resolved configuration, or the `config` of a record.
        weights: content by key, as :func:`contents` returns and a record stores. None: computed from the files.

    Raises:
        ConfigError: two classes of this package have the name that a `_target_` needs.
    """
    plain = renamed(_plain(cfg))
    weights = contents(plain) if weights is None else weights
    _remove_copied_seeds(plain)
    for key in (*LEFT_OUT, *OF_THE_RUN):
        _pop(plain, key)
    for key in OPTIONAL:
        if not plain.get(key):
            _pop(plain, key)
    for key, content in weights.items():
        if _get(plain, key) is not None:
            _set(plain, key, content)
    return _normal(plain)


def contents(cfg: Config) -> dict[str, str]:
    """The content of each file of weights that a configuration names, by key. Hub names stay as they are written.

    Raises:
        DataError: a file is there and cannot be read.
    """
    plain = renamed(_plain(cfg))
    named = {key: value for key in WEIGHTS if isinstance(value := _get(plain, key), str)}
    return {key: fingerprint.weights(value, Path(plain["cache_dir"])) for key, value in named.items()}


def architecture(cfg: Config) -> dict[str, Any]:
    """What weights need of a model: mechanism, model and compression as canonical nodes, without dropout rates.

    Weights that were trained with one dropout rate may be trained further with another.
    """
    plain = renamed(_plain(cfg))
    for key in WEIGHTS:
        _pop(plain, key)
    _remove_copied_seeds(plain)
    return {name: _without_dropout(_normal(_get(plain, key))) for name, key in ARCHITECTURE.items()}


def of_checkpoint(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The identity stored in a checkpoint, which may be old, with today's names."""
    nodes = {name: node for name in ARCHITECTURE if isinstance(node := stored.get(name), Mapping)}
    config: dict[str, Any] = {}
    for name, node in nodes.items():
        _set(config, ARCHITECTURE[name], copy.deepcopy(dict(node)))
    today = renamed(config)
    return dict(stored) | {name: _without_dropout(_normal(_get(today, ARCHITECTURE[name]))) for name in nodes}


def renamed(plain: dict[str, Any]) -> dict[str, Any]:
    """A configuration of plain mappings with the keys and classes of today.

    Values equal to what an absent key meant are dropped. The pattern of a hybrid stack becomes its shortest period.
    """
    for rewrite in RENAMES.rewrite:
        rewrite(plain)
    plain = _stable(plain)
    for old, new in RENAMES.keys.items():
        for node in _owners(plain, old):
            if _has(node, _inner(old)):
                _set(node, _inner(new), _pop(node, _inner(old)))
    for key in RENAMES.removed:
        for node in _owners(plain, key):
            _pop(node, _inner(key))
    for key, meant in RENAMES.absent.items():
        for node in _owners(plain, key):
            if _has(node, _inner(key)) and _get(node, _inner(key)) == meant:
                _pop(node, _inner(key))
    if isinstance(pattern := _get(plain, PATTERN), list):
        lengths = (n for n in range(1, len(pattern)) if pattern[:n] * (len(pattern) // n) == pattern)
        _set(plain, PATTERN, pattern[: next(lengths, len(pattern))])
    return plain


def current(plain: dict[str, Any]) -> dict[str, Any]:
    """A configuration that may be old as today's code takes it: keys and classes of today, at their dotted names."""
    plain = renamed(plain)
    for key, meant in RENAMES.absent.items():
        for node in _owners(plain, key):
            parent, last = _parent(node, _inner(key))
            if isinstance(parent, dict):
                parent.setdefault(last, copy.deepcopy(meant))  # the names of classes in it are changed below
    for node in _nodes(plain):
        if isinstance(target := node.get("_target_"), str) and (modules := definitions(target.partition(".")[0])):
            node["_target_"] = f"{modules[0]}.{target}"
    return plain


def _remove_copied_seeds(plain: dict[str, Any]) -> None:
    for key in SEEDS:
        if _get(plain, key) == plain.get("seed"):
            _pop(plain, key)


def stable_name(target: str) -> str:
    """The name of a class or function that survives its move to another module: `MTLA` for attnlab.attention.MTLA.

    What is defined outside this package keeps its dotted path.

    Args:
        target: the dotted path of a `_target_`.

    Raises:
        ConfigError: another module of this package defines the same name, so that it would not tell them apart.
    """
    package, *words = target.split(".")
    if target in RENAMES.classes or package != "attnlab" or not words:
        return RENAMES.classes.get(target, target)
    defined = definition(target)
    if defined is None:  # of an older tree
        first = next((i for i, word in enumerate(words) if word[:1].isupper()), len(words) - 1)
        name = ".".join(words[first:])
    elif defined[0].partition(".")[0] != "attnlab":
        return ".".join(defined)
    else:
        name = defined[1]
        modules = definitions(name.partition(".")[0])
        if len(modules) > 1:
            raise ConfigError(
                f"{target}: {' and '.join(modules)} define the same name {name}; rename one, "
                "or runs of the two could not be told apart"
            )
    return RENAMES.classes.get(name, name)


def _stable(node: Any) -> Any:
    """Class paths, as `_target_` and as plain values, by their stable names."""
    if isinstance(node, dict):
        return {str(key): stable_name(value) if key == "_target_" else _stable(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_stable(value) for value in node]
    if isinstance(node, str) and (node in RENAMES.classes or OURS.fullmatch(node)):
        return stable_name(node)
    return node


def _owners(plain: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """The nodes that a key of the tables belongs to: the root, or every node of its class."""
    first = key.partition(".")[0]
    if first[0].isupper():
        yield from [node for node in _nodes(plain) if node.get("_target_") == first]
    else:
        yield plain


def _inner(key: str) -> str:
    """A key of the tables, seen from the node that it belongs to."""
    return key.partition(".")[2] if key[0].isupper() else key


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _nodes(child)


def _normal(value: Any) -> Any:
    """Numbers in one form: 1.0 and 1 are written alike."""
    if isinstance(value, dict):
        return {key: _normal(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_normal(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_dropout(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_dropout(value) for key, value in node.items() if "dropout" not in key}
    return node


def _plain(cfg: Config) -> dict[str, Any]:
    plain = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else copy.deepcopy(dict(cfg))
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _parent(plain: Any, key: str) -> tuple[Any, str]:
    *path, last = key.split(".")
    for part in path:
        plain = plain.get(part) if isinstance(plain, dict) else None
    return plain, last


def _has(plain: dict[str, Any], key: str) -> bool:
    parent, last = _parent(plain, key)
    return isinstance(parent, dict) and last in parent


def _get(plain: dict[str, Any], key: str) -> Any:
    parent, last = _parent(plain, key)
    return parent.get(last) if isinstance(parent, dict) else None


def _pop(plain: dict[str, Any], key: str) -> Any:
    parent, last = _parent(plain, key)
    return parent.pop(last, None) if isinstance(parent, dict) else None


def _set(plain: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        plain = plain.setdefault(part, {})
    plain[last] = value


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
