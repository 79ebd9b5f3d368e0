"""Identity of runs: one definition for records, checkpoints and tables.

The recipe is the resolved configuration without the keys that decide where and how fast it runs. The run is the recipe
with its seed, corpus and mode.
"""

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from attnlab.config.build import PATTERN, at
from attnlab.config.nodes import mappings
from attnlab.config.schema import definition, modules_of_names
from attnlab.config.settings import ABSENT
from attnlab.errors import DataError
from attnlab.run.cache import digest, file_digests

DOTTED = re.compile(r"attnlab(\.[A-Za-z_]\w*)+")  # a class or function of this package, by its path
MISSING = object()

# All keys are exact paths from the root: a key of the same name elsewhere counts, and so does every key not listed.
LEFT_OUT = (
    "hydra", "choices", "scale", "task.name", "task.modes",  # names of options: what they hold counts
    "stride", "rank", "task.grids", "task.attention_heads", "task.attention_head_dim", "task.attention_bias",
    "task.attention_dropout", "task.attention_prefix", "task.attention_rank", "task.attention_window",  # feed others
    "model", "data_root", "cache_dir", "resume", "task.data.root", "task.data.cache_dir",  # paths: the content counts
    "input", "output",  # of mode=predict and mode=describe, which measure nothing
    "format", "dtype", "prove", "baseline",  # of an exported model, and of a comparison
    "retry", "rerun",  # say which jobs of a sweep are done
    "tags", "logger", "task.train.log_every", "callbacks.learning_rate", "callbacks.device_stats",  # only watch
    "trainer.profiler", "trainer.enable_model_summary", "trainer.barebones", "trainer.detect_anomaly",
    "task.data.num_workers", "task.data.batch_size", "task.data.max_frames",  # task.train.batch is what an update sees
    "hardware.accelerator", "hardware.devices", "hardware.num_nodes", "hardware.strategy", "hardware.compile",
    "hardware.gradient_checkpointing", "hardware.loss_chunk", "hardware.find_batch", "hardware.find_batch_gib",
)  # fmt: skip
OPTIONAL = ("callbacks", "trainer", "convert", "cache")  # nodes that say nothing while they are empty
OF_THE_RUN = ("mode", "seed", "checkpoint", "prompt", "bench")  # not part of the recipe
SEEDS = ("task.data.seed", "task.sampling.seed", "compress.start_seed")  # copies of `seed`, left out if equal to it
WEIGHTS = ("checkpoint", "task.encoder_checkpoint", "task.model.weights", "task.weights", "task.data.vocabulary.file")
READ_BENCH = ("bench", "describe")  # the modes that read the `bench` node
LOADED = ("manifest.json", "compressed/manifest.json", "checkpoints/averaged.safetensors")  # of a folder of weights
ARCHITECTURE = {"mechanism": "attention", "model": "task.model", "compression": "compress"}  # of a checkpoint
LARGEST = 256 * 2**20  # bytes of a corpus file whose content is read; of a larger one, only the size counts
BINARY = frozenset((  # recordings, images, archives and arrays: name and size identify them
    ".ark", ".arrow", ".bin", ".bmp", ".bz2", ".flac", ".gz", ".h5", ".hdf5", ".jpeg", ".jpg", ".mp3", ".npy", ".npz",
    ".ogg", ".opus", ".parquet", ".png", ".pt", ".safetensors", ".sph", ".tar", ".tgz", ".wav", ".webp", ".xz", ".zip",
    ".zst",
))  # fmt: skip
NOTHING_READ = "none"  # the fingerprint of a run without a corpus

Config = DictConfig | Mapping[str, Any]


def recipe(cfg: Config, weights: Mapping[str, str] | None = None) -> str:
    """The SHA-256 of :func:`canonical`, 64 hexadecimal digits. Two runs of one recipe differ in seed or corpus."""
    return digest(canonical(cfg, weights))


def run(
    cfg: Config,
    corpus: str,
    weights: Mapping[str, str] | None = None,
    device: str | None = None,
    threads: int | None = None,
) -> str:
    """The SHA-256 of recipe, seed, corpus, mode, and the values that the mode reads.

    `corpus` is its fingerprint, or NOTHING_READ. `weights`: see :func:`canonical`. mode=bench alone reads `device` and
    `threads`.
    """
    plain = renamed(cfg)
    weights = contents(plain) if weights is None else weights
    mode = plain["mode"]
    about: dict[str, Any] = {"recipe": recipe(plain, weights), "corpus": corpus, "mode": mode, "seed": plain["seed"]}
    about |= {key: weights.get(key, plain[key]) for key in ("checkpoint", "prompt") if plain.get(key) is not None}
    if mode in READ_BENCH:
        about["bench"] = _normal(plain["bench"]) | {"published": "of"}  # a key of older runs, always with this value
    if mode == "bench":
        about |= {"device": device, "threads": threads}
    return digest(about)


def canonical(cfg: Config, weights: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The part of a configuration that changes numbers, in one form. Runs of one recipe share it.

    Keys and classes have today's names (:mod:`attnlab.config.settings`). A `_target_` is the name of a class without
    its module, a whole number is an int, the pattern of a hybrid stack is its shortest period. Pretrained weights are
    replaced by their content, `weights` as a record stores them; None: computed from the files.
    """
    plain = renamed(cfg)
    weights = contents(plain) if weights is None else weights
    _remove_copied_seeds(plain)
    for key in (*LEFT_OUT, *OF_THE_RUN):
        _pop(plain, key)
    for key in OPTIONAL:
        if not plain.get(key):
            _pop(plain, key)
    for key, content in weights.items():
        if at(plain, key) is not None:
            parent, last = _parent(plain, key)
            parent[last] = content
    return _normal(plain)


def contents(cfg: Config) -> dict[str, str]:
    """The content of each file of weights that a configuration names, by key. DataError: one cannot be read."""
    plain = renamed(cfg)
    named = {key: value for key in WEIGHTS if isinstance(value := at(plain, key), str)}
    return {key: weights_content(value, Path(plain["cache_dir"])) for key, value in named.items()}


def weights_content(source: str, cache_dir: Path) -> str:
    """Pretrained weights by content: "sha256:..." of a local file or folder; a hub name stays as it is written.

    Of a run directory or a compressed model the files that a run loads count; of any other folder all files but
    hidden ones. DataError: a file cannot be read.
    """
    path = Path(source).expanduser()
    memo = cache_dir.expanduser() / "digests.json"
    if path.is_file():
        return f"sha256:{file_digests([path], memo)[path]}"
    if not path.is_dir():
        return source
    files = [file for name in LOADED if (file := path / name).is_file()]
    # other programs write files named manifest.json too
    files = [file for file in files if file.suffix != ".json" or any(file.parent.glob("weights-*.safetensors"))]
    files = files or sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    digests = file_digests(files, memo)
    if len(files) == 1 and files[0].suffix == ".safetensors":
        return f"sha256:{digests[files[0]]}"  # a run directory and its file are the same weights
    return f"sha256:{digest([[file.relative_to(path).as_posix(), digests[file]] for file in files])}"


def corpus_content(root: Path, cache_dir: Path) -> str:
    """A corpus by the names and sizes of its files, and by the content of those that are not in BINARY.

    The place of the corpus and hidden files do not count. Returns "sha256:" and 64 hexadecimal digits. DataError: a
    file or folder cannot be read.
    """
    seen, texts, listed = set(), list[Path](), list[list[str]]()

    def refuse(error: OSError) -> NoReturn:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    for place, inner, names in os.walk(root, followlinks=True, onerror=refuse):
        folder, binary = Path(place), []
        inner[:] = sorted((name for name in inner if name[0] != "."), reverse=True)
        if (real := os.path.realpath(place)) in seen:  # through a link
            inner.clear()
            continue
        seen.add(real)
        for path in (folder / name for name in names if name[0] != "." and (folder / name).is_file()):
            if path.suffix.lower() in BINARY or path.stat().st_size > LARGEST:
                binary.append((path.name, path.stat().st_size))
            else:
                texts.append(path)
        listed.append([folder.relative_to(root).as_posix(), digest(sorted(binary))])
    digests = file_digests(texts, cache_dir.expanduser() / "digests.json")
    contents = [[path.relative_to(root).as_posix(), content] for path, content in digests.items()]
    return f"sha256:{digest([sorted(listed), sorted(contents)])}"


def architecture(cfg: Config) -> dict[str, Any]:
    """Mechanism, model and compression as canonical nodes, without dropout rates, which later training may change."""
    plain = renamed(cfg)
    for key in WEIGHTS:
        _pop(plain, key)
    _remove_copied_seeds(plain)
    return {name: _without_dropout(_normal(at(plain, key))) for name, key in ARCHITECTURE.items()}


def of_checkpoint(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The identity stored in a checkpoint, which may be old, with today's names."""
    nodes = renamed({name: stored[name] for name in ARCHITECTURE if name in stored})
    return dict(stored) | {name: _without_dropout(_normal(node)) for name, node in nodes.items()}


def renamed(cfg: Config) -> dict[str, Any]:
    """A plain copy of a configuration with the keys and classes of today, without values that absent keys meant."""
    written = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else cfg
    plain: dict[str, Any] = _changed(written, lambda value: stable_name(value) if isinstance(value, str) else value)
    for node, key, meant in _absent(plain):
        if node.get(key, MISSING) == meant:
            del node[key]
    match at(plain, "task.score"):
        case {"name": str(name), "tokenize": None}:  # as older records have it
            plain["task"]["score"] = name
    if isinstance(pattern := at(plain, PATTERN), list):
        lengths = (n for n in range(1, len(pattern)) if pattern[:n] * (len(pattern) // n) == pattern)
        plain["attention"]["pattern"] = pattern[: next(lengths, len(pattern))]
    return plain


def current(plain: dict[str, Any]) -> dict[str, Any]:
    """A configuration that may be old as today's code takes it: keys and classes of today, at their dotted names."""
    plain = renamed(plain)
    if isinstance(name := at(plain, "task.score"), str):
        plain["task"]["score"] = {"name": name, "tokenize": None}
    for node, key, meant in _absent(plain):
        node.setdefault(key, copy.deepcopy(meant))  # the names of classes in it are changed below
    for _, node in mappings(plain):
        target = node.get("_target_")
        if isinstance(target, str) and (modules := modules_of_names().get(target.partition(".")[0])):
            node["_target_"] = f"{modules[0]}.{target}"
    return plain


def _remove_copied_seeds(plain: dict[str, Any]) -> None:
    for key in SEEDS:
        if at(plain, key) == plain.get("seed"):
            _pop(plain, key)


def stable_name(target: str) -> str:
    """The name of a class or function without its module: `MTLA` for attnlab.attention.MTLA. Other texts stay.

    A definition outside this package keeps its dotted path.
    """
    if not DOTTED.fullmatch(target):
        return target
    words = target.split(".")[1:]
    defined = definition(target)
    if defined is None:  # of an older tree
        first = next((i for i, word in enumerate(words) if word[:1].isupper()), len(words) - 1)
        return ".".join(words[first:])
    return defined[1] if defined[0].partition(".")[0] == "attnlab" else ".".join(defined)


def _changed(node: Any, change: Callable[[Any], Any]) -> Any:
    """Nested mappings and lists as plain ones, with every value changed."""
    if isinstance(node, Mapping):
        return {str(key): _changed(value, change) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_changed(value, change) for value in node]
    return change(node)


def _normal(node: Any) -> Any:
    """Numbers in one form: 1.0 and 1 are written alike."""
    return _changed(node, lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)


def _absent(plain: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Each node that ABSENT describes, with a key and its value in the table."""
    nodes = [node for _, node in mappings(plain)]
    for owner, values in ABSENT.items():
        places = [node for node in nodes if node.get("_target_") == owner] if owner[0].isupper() else [at(plain, owner)]
        for node in places:
            yield from ((node, *item) for item in values.items() if isinstance(node, dict))


def _without_dropout(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_dropout(value) for key, value in node.items() if "dropout" not in key}
    return node


def _parent(plain: Any, key: str) -> tuple[Any, str]:
    path, _, last = key.rpartition(".")
    return at(plain, path) if path else plain, last


def _pop(plain: dict[str, Any], key: str) -> None:
    parent, last = _parent(plain, key)
    if isinstance(parent, dict):
        parent.pop(last, None)
