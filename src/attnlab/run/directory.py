"""The directory of a run: what is written there, its lock, and how `checkpoint=` and `resume=` name it.

`.lock` is locked (flock) while a process uses the directory, and names that process.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from attnlab.errors import ConfigError, LockedError
from attnlab.run.files import writing
from attnlab.run.record import RECORD, recorded

CONFIG = "config.yaml"
LOCK = ".lock"
DENSE = "dense.predictions.tsv"  # of the model before its compression
UNTUNED = "compressed.predictions.tsv"  # of the compressed model before its fine-tuning
PREDICTIONS, WINDOWS = "predictions.tsv", "windows.tsv"
ORIGINAL = "original."  # begins the names of the scored files of the model before its conversion
EXPORTED = "exported"  # the folder of mode=export
WEIGHTS = {"checkpoints", "compressed", "exported"}  # folders of a run in which no other run lies
CURVES = ("curves", "curves-[0-9]*", "pretraining/curves")
# the manifest or config.json, and a tokenizer's files
SETTINGS = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")
STEPS = ("fit", "validate", "test")  # of trainer.profiler
# All that is ever written in a run directory, as patterns of paths. A new file of a mode, a task or a logger is added
# here: a run is refused in a directory with other files, and `attnlab runs prune` leaves it.
WRITTEN = (
    LOCK,
    "run.log",
    CONFIG,
    RECORD,
    PREDICTIONS,
    DENSE,
    UNTUNED,
    WINDOWS,
    f"{ORIGINAL}{PREDICTIONS}",
    f"{ORIGINAL}{WINDOWS}",
    "tokenizer.model",
    "ctc_tokenizer.model",
    "limits.json",
    "vocabulary.json",
    "classes.json",
    "conversion.json",
    "checkpoints/step[0-9]*.ckpt",
    "checkpoints/last.ckpt",
    "checkpoints/averaged.safetensors",
    "checkpoints/SHA256SUMS",
    "curves.png",  # of older runs
    *(f"{curves}/{name}" for curves in CURVES for name in ("metrics.csv", "hparams.yaml")),
    *(f"compressed/{name}" for name in ("weights-*.safetensors", *SETTINGS)),
    *(f"{EXPORTED}/{name}" for name in ("README.md", "*.py", "*.safetensors", *SETTINGS)),
    *(f"{place}{step}-profile*.{kind}" for place in ("", "pretraining/") for step in STEPS for kind in ("txt", "json")),
    *("tensorboard/**/*", "wandb/**/*", "mlflow/**/*"),  # other programs name these files
    *("**/.*.partial", "**/.*.partial/*", ".*.old/*"),  # unfinished, see run/files.py
)
OF_A_RECORD = {"schema", "status", "mode", "command", "task", "started", "quality", "kv_cache", "environment"}
OF_A_CONFIG = {"mode", "task", "choices", "attention", "hardware", "seed", "data_root", "cache_dir"}
ENDING = 60.0  # seconds that a run may take to end once its record says that it does not go on


def near(path: Path) -> Path:
    """A path relative to the working directory if it lies below that."""
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def is_run(directory: Path) -> bool:
    """Whether a folder has a record.json of attnlab's form, or a config.yaml of that form."""
    config = directory / CONFIG
    lines = config.read_text(encoding="utf-8", errors="replace").splitlines() if config.is_file() else []
    keys = {line.partition(":")[0] for line in lines}  # those below the top level are indented
    return recorded(directory).keys() >= OF_A_RECORD or keys >= OF_A_CONFIG


def foreign(directory: Path) -> list[str]:
    """Relative paths of the files in a directory that no run has written; links are not followed."""
    patterns = WRITTEN if is_run(directory) else (LOCK, "run.log")
    written = {path for pattern in patterns for path in directory.glob(pattern)}
    others = {path for path in directory.rglob("*") if not path.is_dir()} - written
    return sorted(path.relative_to(directory).as_posix() for path in others)


def refuse_used(directory: Path) -> None:
    """ConfigError for a directory with files that no run has written, or with a run that has weights or has finished.

    The configuration and the record of such a run would be replaced.
    """
    if names := foreign(directory):
        more = ", …" * (len(names) > 3)
        files = ", ".join(names[:3]) + more
        raise ConfigError(f"hydra.run.dir={directory}: it holds {files}, which no run has written; take a new one")
    trained = any((directory / "checkpoints" / name).is_file() for name in ("averaged.safetensors", "last.ckpt"))
    if trained or recorded(directory).get("status") == "finished":
        raise ConfigError(
            f"hydra.run.dir={directory}: {'a trained' if trained else 'a finished'} run, whose config.yaml and "
            f"record.json would be replaced; take another directory, or remove this one (checkpoint={directory} uses "
            f"the run, resume={directory} continues it)"
        )


def directory_of(key: str, value: str) -> Path | None:
    """The run directory that `checkpoint=` or `resume=` names, itself or by a file in its checkpoints/; else None.

    ConfigError: the path does not exist, a directory of checkpoints has no configuration, or `resume=` names no run.
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
    if run is None and (path / "checkpoints").is_dir():
        raise ConfigError(f"{path / CONFIG}: no such file; a run directory has it: copy the whole directory")
    return run


# --- its lock -----------------------------------------------------------------------------------------------------


def holder_of(directory: Path) -> str | None:
    """A description of the live process that uses a run directory, or None."""
    with contextlib.suppress(OSError), (directory / LOCK).open(encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(200) or "another process"
    return None


@contextlib.contextmanager
def locked(directory: Path, wait: float = ENDING) -> Iterator[None]:
    """Hold the lock of an existing directory inside the block; `wait` seconds for a run that is ending.

    LockedError: another process uses the directory. WriteError: the lock file cannot be written.
    """
    path = directory / LOCK
    lock, ending = FileLock(path), recorded(directory).get("status", "running") != "running"
    with writing(path):
        try:
            lock.acquire(timeout=wait if ending else 0.5, poll_interval=0.05)
        except Timeout:
            raise _refusal(directory, holder_of(directory)) from None
    try:
        with writing(path):
            since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}")
        yield
    finally:
        with contextlib.suppress(OSError):  # the directory may be gone
            path.unlink()
        lock.release()


def refuse_live(directory: Path) -> None:
    """LockedError for a run that is in progress."""
    if holder := holder_of(directory):
        raise _refusal(directory, holder)


def _refusal(directory: Path, holder: str | None) -> LockedError:
    by = holder or "another process"
    then = "wait for its end, end it, or take another hydra.run.dir (mode=export: output=)"
    return LockedError(f"{directory}: a run is in progress there: {by}; {then}")
