"""record.json: everything that tables and plots know about a run (schema 2).

One per run, in its run directory, written atomically. :func:`new` returns the skeleton and the modes fill it. A number
that was not measured is NOT_RUN, never 0.
"""

import errno
import hashlib
import json
import logging
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnlab.errors import AttnlabError, DataError
from attnlab.run import identity
from attnlab.run.files import write_bytes

log = logging.getLogger(__name__)

SCHEMA = 2
NOT_RUN = "not run"
BUSY = 0.25  # cores that other programs keep busy, above which times are not comparable
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # of values of another kind
DEEPEST = 50  # levels of a configuration
MAPPINGS = (  # nodes of every configuration that has them, a parent before what it holds
    "task", "task.data", "task.data.reader", "task.train", "task.model", "task.model.encoder", "attention", "compress",
    "bench", "hardware", "choices",
)  # fmt: skip
STATUSES = ("running", "finished", "failed", "interrupted")
ROOT = Path(__file__).resolve().parents[3]

SECTIONS = {
    "parameters": "total attention trainable",
    "kv_cache": "elements_per_token_per_layer bytes_predicted bytes_measured",
    "quality": "",  # the task's own metrics and their signature
    "inference": "seconds tokens_per_second peak_memory_mib mean_memory_mib batch beam dtype protocol",
    "training": "steps seconds tokens_per_second final_loss",
    "environment": "torch python device threads git packages_hash",
    "config": "",  # resolved: what the run worked with
    "identity": "recipe run corpus weights",  # see run/identity.py
}
TEXTS = {
    "signature",
    "dtype",
    "protocol",
    "torch",
    "python",
    "device",
    "git",
    "packages_hash",
    "recipe",
    "run",
    "corpus",
}


def new(cfg: DictConfig, command: str, weights: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The record of a run that begins: the values of its configuration, and NOT_RUN for everything else.

    `stride` and `rank` are the values in use; null: the mechanism has no such option.

    Args:
        cfg: the resolved configuration.
        command: the command that repeats the run.
        weights: the content of the pretrained weights, see :func:`attnlab.run.identity.contents`; None: computed.

    Raises:
        ConfigError, DataError: the run has no identity (see :mod:`attnlab.run.identity`).
    """
    choices = cfg.choices
    weights = identity.contents(cfg) if weights is None else weights
    skeleton: dict[str, Any] = {
        "schema": SCHEMA,
        "status": "running",
        "mode": cfg.mode,
        "command": command,
        "task": cfg.task.name,
        "corpus": NOT_RUN,
        "attention": mechanism_of(choices),
        "stride": cfg.stride,
        "rank": cfg.rank,
        "compress": choices.compress,
        "scale": choices.scale,
        "hardware": choices.hardware,
        "experiment": choices.experiment,
        "seed": cfg.seed,
        "tags": list(cfg.tags),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **{section: dict.fromkeys(keys.split(), NOT_RUN) for section, keys in SECTIONS.items()},
    }
    skeleton["config"] = OmegaConf.to_container(cfg, resolve=True)
    skeleton["identity"] |= {"recipe": identity.recipe(cfg, weights), "weights": weights}
    return skeleton


def mechanism_of(choices: Mapping[str, Any]) -> str:
    """The name of the attention that a run ends with: of a converted model that which its own became.

    Args:
        choices: the option taken from each group.

    Returns:
        The name of the conversion, else of the attention; "none": the model brings its own.
    """
    convert = choices.get("convert")
    return str(choices["attention"] or "none") if convert in (None, "none") else str(convert)


def identify(record: dict[str, Any], corpus: str) -> None:
    """Complete a record's identity once its corpus is known.

    Args:
        record: the record, with its environment.
        corpus: the corpus' fingerprint, or identity.NOTHING_READ.
    """
    about, environment = record["identity"], record["environment"]
    device, threads = environment["device"], environment["threads"]
    about["corpus"] = corpus
    about["run"] = identity.run(record["config"], corpus, about["weights"], device, threads)


def environment(accelerator: str) -> dict[str, Any]:
    """What the run ran on. Imports torch. `accelerator`: the hardware group's word (auto, cpu, gpu, ...)."""
    import torch

    gpu = accelerator != "cpu" and torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"cuda: {torch.cuda.get_device_name()}" if gpu else f"cpu: {_processor()} x {os.cpu_count()}",
        "threads": torch.get_num_threads(),
        "git": commit(),
        "packages_hash": _packages_hash(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit, with "-dirty" if tracked files differ from it; why not, where there is none."""
    if not (ROOT / ".git").exists():
        return "not a checkout"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"


@cache
def _packages_hash() -> str:
    """sha256 of the sorted lines name==version of everything installed."""
    lines = sorted({f"{d.metadata['Name'].lower().replace('_', '-')}=={d.version}" for d in distributions()})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def first_process() -> bool:
    """Whether this is the one process of a run that writes (rank 0)."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"]) == 0
    return all(int(os.environ.get(name, 0)) == 0 for name in ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def dumps(record: Mapping[str, Any]) -> str:
    """The record as JSON. A number that is not finite becomes its name ("nan"), for JSON has none.

    Args:
        record: scalars of numpy and torch and paths are allowed as values.
    """
    return json.dumps(_plain(record), indent=2, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write(record: Mapping[str, Any], directory: Path) -> None:
    """Replace `directory`/record.json: a reader finds the old record or the new one, never half of one.

    A full disk has no room for a second file: the new record is then written over the old one.

    Args:
        record: the whole record.
        directory: the run's.

    Raises:
        WriteError: it cannot be written.
    """
    path = directory / "record.json"
    data = (dumps(record) + "\n").encode(
        "utf-8", "backslashreplace"
    )  # a file's name may be no text: \\udcff, as in JSON
    try:
        write_bytes(path, data)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.is_file():
            raise
        with open(path, "r+b") as file:
            file.write(data)
            file.truncate()


def read(directory: Path) -> dict[str, Any]:
    """The record of a run directory.

    Args:
        directory: the run's.
    """
    return json.loads((directory / "record.json").read_text(encoding="utf-8"))


def recorded(directory: Path) -> dict[str, Any]:
    """The record of a run directory. Empty: there is none that can be read."""
    try:
        record = read(directory)
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def upgraded(record: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A record of schema 1 as one of schema 2, and the speed of an older training on images by its name; else as it is.

    The configuration is read from `directory`/config.yaml. Where there is none, nothing says what the recipe was:
    `config` is empty and the identity is NOT_RUN.

    Args:
        record: of any schema.
        directory: the folder of its file.
    """
    if record.get("schema") != 1:
        return _images_per_second(record)
    record = {key: value for key, value in record.items() if key != "config_hash"} | {"schema": SCHEMA}
    about: dict[str, Any] = {"recipe": NOT_RUN, "run": NOT_RUN, "corpus": NOT_RUN, "weights": {}}
    config: Any = {}
    try:
        loaded: Any = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"), resolve=True)
        if wrong := _misshapen(loaded):
            raise DataError(f"config.yaml: {wrong}")
        about["weights"] = identity.contents(loaded)
        about["recipe"] = identity.recipe(loaded, about["weights"])
        config = loaded
    except (*UNREADABLE, OSError, yaml.YAMLError, OmegaConfBaseException, AttnlabError) as error:
        log.warning("%s: the recipe of this old record is unknown: %s", directory, " ".join(str(error).split()))
    for row in _rows(record) or ():
        if "prompt" in row:
            row["prefix"] = row.pop("prompt")
    return record | {"config": config, "identity": about}


def _images_per_second(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose training counted images, in a field that is named for tokens, with the field's right name."""
    training, node = record.get("training"), record.get("config")
    for key in ("task", "train", "batch"):
        node = node.get(key) if isinstance(node, Mapping) else None
    images = isinstance(node, Mapping) and "images" in node
    if not images or not isinstance(training, Mapping) or "images_per_second" in training:
        return record
    speed = {"images_per_second": training.get("tokens_per_second", NOT_RUN), "tokens_per_second": NOT_RUN}
    return record | {"training": {**training, **speed}}


def problems(record: Mapping[str, Any]) -> list[str]:
    """What is wrong with a record of schema 2, one text each; empty for a good one.

    Args:
        record: of any content.
    """
    found = []
    expected = {"schema": int, "seed": int} | dict.fromkeys(
        ("status", "mode", "command", "task", "corpus", "attention", "compress", "scale", "started"), str
    )
    for key, kind in expected.items():
        if type(record.get(key)) is not kind:
            found.append(f"{key}: expected {kind.__name__}, got {record.get(key)!r}")
    if record.get("schema") != SCHEMA or record.get("status") not in STATUSES:
        found.append(f"schema {record.get('schema')!r}, status {record.get('status')!r}")
    if (record.get("status") in ("failed", "interrupted")) != bool(record.get("error")):
        found.append("an error belongs to a failed or interrupted run, and only there")
    if "bench" in record and _rows(record) is None:
        found.append("bench: expected a mapping with rows, each of them a mapping")
    found += [f"{knob}: missing" for knob in ("stride", "rank") if knob not in record]
    for section, keys in SECTIONS.items():
        values = record.get(section)
        if not isinstance(values, Mapping):
            found.append(f"{section}: expected a mapping, got {values!r}")
            continue
        found += [f"{section}.{key}: missing" for key in keys.split() if key not in values]
        found += [
            f"{section}.{key}: expected a number or {NOT_RUN!r}, got {value!r}"
            for key, value in values.items()
            if key in keys.split()
            and key not in TEXTS
            and not _is_number(value)
            and value != NOT_RUN
            and section != "identity"
        ]
    if isinstance(config := record.get("config"), Mapping) and (wrong := _misshapen(config)):
        found.append(f"config.{wrong}")
    about = record.get("identity")
    if isinstance(about, Mapping):
        found += [
            f"identity.{key}: expected str, got {about[key]!r}"
            for key in ("recipe", "run", "corpus")
            if key in about and not isinstance(about[key], str)
        ]
        if not isinstance(about.get("weights", {}), Mapping):
            found.append(f"identity.weights: expected a mapping, got {about['weights']!r}")
    return found


def _misshapen(config: Any) -> str:
    """The first part of a configuration, read from a file, that is not what it is in every run; empty: there is none.

    Reading the recipe of any other ends with a TypeError or an AttributeError somewhere.
    """
    if not isinstance(config, Mapping):
        return f"expected a mapping, got {str(config)[:40]!r}"
    for key in MAPPINGS:
        node: Any = config
        for part in key.split("."):
            node = (node or {}).get(part)
        if node is not None and not isinstance(node, Mapping):
            return f"{key}: expected a mapping, got {str(node)[:40]!r}"
    nodes: list[tuple[Any, str, int]] = [(config, "", 0)]
    while nodes:
        node, key, depth = nodes.pop()
        if depth > DEEPEST:
            return f"{key[:40]}: more than {DEEPEST} levels"
        if isinstance(node, Mapping):
            if not isinstance(target := node.get("_target_", ""), str):
                return f"{key}_target_: expected a text, got {str(target)[:40]!r}"
            nodes += [(value, f"{key}{name}.", depth + 1) for name, value in node.items()]
        elif isinstance(node, list):
            nodes += [(value, f"{key}{i}.", depth + 1) for i, value in enumerate(node)]
    return ""


def _rows(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The rows of a benchmark, empty where it has none; None: they are something else."""
    bench = record.get("bench", {})
    rows = bench.get("rows", []) if isinstance(bench, dict) else None
    return rows if isinstance(rows, list) and all(isinstance(row, dict) for row in rows) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) or value in ("nan", "inf", "-inf")
