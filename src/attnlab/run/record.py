"""record.json: everything that tables and plots know about a run (schema 2).

:func:`new` returns the skeleton and the modes fill it. A number that was not measured is NOT_RUN, never 0.
"""

import hashlib
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnlab.config.build import at
from attnlab.run import identity
from attnlab.run.files import write_bytes

SCHEMA = 2
RECORD = "record.json"
NOT_RUN = "not run"
PUBLISHED = "the published splits"  # quality.held_out
EMBEDDED = "embedded sample"  # begins the `corpus` of a sample corpus
BUSY = 0.25  # cores that other programs keep busy, above which times are not comparable
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # of values of another kind
STATUSES = ("running", "finished", "failed", "interrupted")
ROOT = Path(__file__).resolve().parents[3]

SECTIONS = {  # every record must have these keys, older ones too
    "parameters": "total attention trainable",
    "kv_cache": "elements_per_token_per_layer bytes_predicted bytes_measured",
    "quality": "",  # the metrics of the task and their signature
    "inference": "seconds tokens_per_second peak_memory_mib mean_memory_mib batch beam dtype protocol",
    "training": "steps seconds tokens_per_second final_loss",
    "environment": "torch python device threads git packages_hash",
    "config": "",  # resolved: what the run worked with
    "identity": "recipe run corpus weights",  # see run/identity.py
}
TEXTS = {
    "signature", "dtype", "protocol", "torch", "python", "device", "git", "packages_hash", "recipe", "run", "corpus",
}  # fmt: skip
NUMBERS = (NOT_RUN, "nan", "inf", "-inf")  # texts in place of numbers
EXPECTED: dict[str, type] = {  # kinds of values by dotted key; float: a number, or NOT_RUN
    **dict.fromkeys(("schema", "seed"), int),
    **dict.fromkeys(("status", "mode", "command", "task", "corpus"), str),
    **dict.fromkeys(("attention", "compress", "scale", "started"), str),
    **{f"{name}.{key}": str if key in TEXTS else float for name, keys in SECTIONS.items() for key in keys.split()},
    **dict.fromkeys((*SECTIONS, "identity.weights"), dict),
}


def new(cfg: DictConfig, command: str, weights: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The record of a run that begins: the values of its configuration, and NOT_RUN for everything else.

    `weights`: see :func:`attnlab.run.identity.contents`; None: computed. DataError: a file of weights cannot be read.
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
    """The name of the conversion, else of the attention, by the options taken. "none": that of the model."""
    convert = choices.get("convert")
    return str(choices["attention"] or "none") if convert in (None, "none") else str(convert)


def identify(record: dict[str, Any], corpus: str) -> None:
    """Complete the identity of a record with an environment. `corpus`: its fingerprint, or identity.NOTHING_READ."""
    identities, environment = record["identity"], record["environment"]
    device, threads = environment["device"], environment["threads"]
    identities["corpus"] = corpus
    identities["run"] = identity.run(record["config"], corpus, identities["weights"], device, threads)


def environment(accelerator: str, packages: bool = True) -> dict[str, Any]:
    """The machine and the versions of a run. Imports torch. `accelerator`: auto, cpu, gpu, ..."""
    import torch

    gpu = accelerator != "cpu" and torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"cuda: {torch.cuda.get_device_name()}" if gpu else f"cpu: {_processor()} x {os.cpu_count()}",
        "threads": torch.get_num_threads(),
        "git": commit(),
        "packages_hash": _packages_hash() if packages else NOT_RUN,  # it takes half a second
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit, with "-dirty" if tracked files differ from it; without one the reason."""
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
    texts = (one.read_text("METADATA") or one.read_text("PKG-INFO") or "" for one in distributions())
    headers = (dict(re.findall("^(Name|Version): *(.*?) *$", text, re.M)[:2]) for text in texts)  # parsing takes 0.2 s
    lines = sorted({f"{header['Name'].lower().replace('_', '-')}=={header['Version']}" for header in headers})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def first_process() -> bool:
    """Whether this is the one process of a run that writes (rank 0)."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"]) == 0
    return all(int(os.environ.get(name, 0)) == 0 for name in ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def dumps(record: Mapping[str, Any]) -> str:
    """The record as JSON. Paths and scalars of numpy and torch are converted, NaN and infinity become texts."""
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
    """Replace `directory`/record.json at once. WriteError: it cannot be written."""
    text = dumps(record) + "\n"
    write_bytes(directory / RECORD, text.encode("utf-8", "backslashreplace"))  # the name of a file may be no Unicode


def read(directory: Path) -> dict[str, Any]:
    """The record of a run directory."""
    return json.loads((directory / RECORD).read_text(encoding="utf-8"))


def embedded(layout: str) -> str:
    """The `corpus` of a record whose run read the sample corpus in this layout."""
    return f"{EMBEDDED} of {layout}'s layout"


def corpus_of(record: Mapping[str, Any]) -> str:
    """The `corpus` of a record; earlier versions wrote "sample" for every sample corpus."""
    corpus = str(record.get("corpus", NOT_RUN))
    return f"{EMBEDDED} corpus" if corpus == "sample" else corpus


def recorded(directory: Path) -> dict[str, Any]:
    """The record of a run directory; empty if it is missing or damaged."""
    try:
        record = read(directory) if (directory / RECORD).is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def upgraded(record: dict[str, Any]) -> dict[str, Any]:
    """A record in today's words: the speed of an older training on images has its right name."""
    training, images = record.get("training"), at(record, "config.task.train.batch.images")
    if images is None or not isinstance(training, Mapping) or "images_per_second" in training:
        return record
    speed = {"images_per_second": training.get("tokens_per_second", NOT_RUN), "tokens_per_second": NOT_RUN}
    return record | {"training": {**training, **speed}}


def problems(record: Mapping[str, Any]) -> list[str]:
    """The errors of a record, one text each."""
    wrong = [
        f"{key}: expected {kind.__name__}, got {value!r}"
        for key, kind in EXPECTED.items()
        if not _is(kind, value := at(record, key))
    ]
    if not isinstance(task := at(record, "config.task", {}), dict):
        wrong.append(f"config.task: expected dict, got {task!r}")
    status, bench = record.get("status"), record.get("bench", {})
    rows = bench.get("rows", []) if isinstance(bench, dict) else None
    if record.get("schema") != SCHEMA or status not in STATUSES:
        wrong.append(f"schema {record.get('schema')!r}, status {status!r}")
    if (status in ("failed", "interrupted")) != bool(record.get("error")):
        wrong.append("an error belongs to a failed or interrupted run, and only there")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        wrong.append("bench: expected a mapping with rows, each of them a mapping")
    return wrong + [f"{key}: missing" for key in ("stride", "rank") if key not in record]


def _is(kind: type, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, kind) or (kind is float and (isinstance(value, int) or value in NUMBERS))
