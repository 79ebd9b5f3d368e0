"""The directory of a run: what is written there, and how `checkpoint=` and `resume=` name it."""

import contextlib
import errno
import json
import os
import re
import stat
from fnmatch import fnmatchcase
from pathlib import Path

from attnlab.errors import ConfigError
from attnlab.run.record import STATUSES

CONFIG = "config.yaml"
RECORD = "record.json"
BEGUN = (".lock", "run.log", ".ledger.*")  # may be left by a run that ended before it wrote its configuration
CURVES = ("curves", "curves-[0-9]*", "pretraining/curves")
SETTINGS = ("*.json", "*.txt", "*.model", "*.jinja")  # the manifest or config.json, and a tokenizer's files
STEPS = ("fit", "validate", "test")  # of trainer.profiler
# All that is ever written in a run directory, as patterns of paths. A new file of a mode, a task or a logger is added
# here: a run is refused where there is anything else, and `attnlab runs prune` leaves a directory with anything else.
WRITTEN = (
    *BEGUN,
    CONFIG,
    RECORD,
    "predictions.tsv",
    "tokenizer.model",
    "ctc_tokenizer.model",
    "vocabulary.json",
    "classes.json",
    "conversion.json",
    "checkpoints/step[0-9]*.ckpt",
    "checkpoints/last.ckpt",
    "checkpoints/averaged.safetensors",
    "checkpoints/SHA256SUMS",
    "curves.png",
    *(f"{curves}/{name}" for curves in CURVES for name in ("metrics.csv", "hparams.yaml")),
    *(f"compressed/{name}" for name in ("weights-*.safetensors", *SETTINGS)),
    *(f"exported/{name}" for name in ("README.md", "*.py", "*.safetensors", *SETTINGS)),
    *(f"{place}{step}-profile*.{kind}" for place in ("", "pretraining/") for step in STEPS for kind in ("txt", "json")),
    *("tensorboard/**", "wandb/**", "mlflow/**"),  # other programs name these files
)
UNFINISHED = re.compile(r"^\.(.+?)(\.[0-9a-f]{32})?\.(partial|old)$")  # the names of run/files.py
OF_A_RECORD = {"schema", "status", "mode", "command", "task", "started", "quality", "kv_cache", "environment"}
OF_A_CONFIG = {"mode", "task", "choices", "attention", "hardware", "seed", "data_root", "cache_dir"}
LARGEST = 2**20  # bytes of a config.yaml


def is_run(directory: Path) -> bool:
    """Whether a folder has a record.json of attnlab's own form, or a config.yaml of that form and a run.log."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = json.loads(_content(directory / RECORD))
        known = isinstance(record, dict) and record.keys() >= OF_A_RECORD and type(record["schema"]) is int
        if known and record["status"] in STATUSES:
            return True
    with contextlib.suppress(OSError):
        text = _content(directory / CONFIG, LARGEST).decode("utf-8", "replace")
        keys = {line.partition(":")[0] for line in text.splitlines()}  # of the top level: those below are indented
        return keys >= OF_A_CONFIG and stat.S_ISREG((directory / "run.log").lstat().st_mode)
    return False


def foreign(directory: Path) -> list[str]:
    """Relative paths of what is in a directory and was written by no run; of an unknown folder, the folder alone.

    In a directory that is no run, everything is foreign but the first traces of one. Links are not followed.

    Raises:
        OSError: a folder in it cannot be read.
    """
    patterns = [pattern.split("/") for pattern in (WRITTEN if is_run(directory) else BEGUN)]

    def fail(error: OSError) -> None:
        raise error

    names = []
    for folder, folders, files in os.walk(directory, onerror=fail):
        for name in (*folders, *files):
            path = Path(folder, name).relative_to(directory)
            parts = [UNFINISHED.sub(r"\1", part) for part in path.parts]
            if not any(_matches(parts, pattern, name in folders) for pattern in patterns):
                names.append(path.as_posix())
        folders[:] = [name for name in folders if Path(folder, name).relative_to(directory).as_posix() not in names]
    return sorted(names)


def _matches(parts: list[str], pattern: list[str], folder: bool) -> bool:
    """Whether a path is what a pattern names, or a folder above it. `**` stands for all that is below a folder."""
    if pattern[-1] == "**" and len(parts) >= len(pattern):
        parts, pattern = parts[: len(pattern) - 1], pattern[:-1]
    elif folder:
        pattern = pattern[:-1][: len(parts)]
    return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))


def refuse_foreign(directory: Path) -> None:
    """Refuse to begin a run in a directory with anything that no run has written.

    Raises:
        ConfigError: names an entry.
    """
    if names := foreign(directory):
        more = ", …" * (len(names) > 3)
        raise ConfigError(
            f"hydra.run.dir={directory}: it holds {', '.join(names[:3])}{more}, which no run has written; take a new "
            "or an empty directory"
        )


def _content(path: Path, largest: int = -1) -> bytes:
    """The content of a file that is no link, pipe or device."""
    state = path.lstat()
    if not stat.S_ISREG(state.st_mode) or 0 <= largest < state.st_size:
        raise OSError(errno.EINVAL, "not a file of a run", str(path))
    return path.read_bytes()


def directory_of(key: str, value: str) -> Path | None:
    """The run directory that a path names, itself or by a file in its checkpoints/; None where it names none.

    Args:
        key: `checkpoint` or `resume`, for the errors.
        value: of that key.

    Raises:
        ConfigError: there is no such path, the directory has checkpoints and no configuration, `resume=` names no run,
            or a pipe or a folder is in the place of a file.
    """
    if not value.strip():
        raise ConfigError(f"{key}= is empty: name the directory of a run, or leave it out")
    path = Path(value).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"{key}={value}: no such file or directory")
    places = [path] if path.is_dir() else [path.parent, path.parent.parent]
    run = next((place for place in places if (place / CONFIG).is_file()), None)
    if key == "resume" and run != path:
        raise ConfigError(
            f"resume={value}: {'a file' if path.is_file() else f'no run: it has no {CONFIG}'}; resume= takes the "
            f"directory of a run, with {CONFIG} and checkpoints/last.ckpt"
        )
    if run is None:
        if (path / "checkpoints").is_dir():
            raise ConfigError(f"{path / CONFIG}: no such file; a run directory has it: copy the whole directory")
        return None
    record, checkpoints = run / RECORD, run / "checkpoints"
    if record.exists() and not record.is_file():
        raise ConfigError(f"{record}: expected the record of a run, a file")
    if checkpoints.exists() and not checkpoints.is_dir():
        raise ConfigError(f"{checkpoints}: expected the directory of a run's checkpoints")
    return run
