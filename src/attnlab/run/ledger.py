"""The runs below an outputs folder, an entry for each record.json.

Below the list: removing run directories, only what is one for sure, contains nothing else, and is not in use.
"""

import functools
import logging
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.errors import AttnlabError, DataError
from attnlab.run import identity
from attnlab.run import record as records
from attnlab.run.directory import CONFIG, LOCK, foreign, holder_of, is_run, locked
from attnlab.run.record import NOT_RUN, RECORD
from attnlab.run.store import finite, folders

log = logging.getLogger(__name__)

OUTPUTS = Path("outputs")
TRACES = {CONFIG, "run.log"}  # a folder with both, and no record, is what is left of a run
BROKEN = "broken"  # the status of a file that is not a record
UNRECORDED = "unrecorded"  # that of a folder without one
LAST = ("run.log", CONFIG, RECORD)  # removed at the end: what is left after an error is still seen as a run


@dataclass(frozen=True)
class LedgerEntry:
    """What a list of runs has of a run, as its record has it.

    Args:
        directory: the run's.
        status: also "interrupted" where the record says "running" and the process is gone, and "broken" where the file
            is not a record.
        error: why the run failed or was interrupted, or what is wrong with the file; empty: nothing.
        recipe: the identity without seed, corpus and mode.
        content: the fingerprint of the corpus.
        commit: of the code, with "-dirty" if it was changed.
        metric, quality: the first number of the record's quality and its name; None and empty: nothing was scored.
        cache: cached numbers per token and layer.
    """

    directory: Path
    status: str
    mode: str = ""
    task: str = ""
    attention: str = ""
    compress: str = ""
    scale: str = ""
    experiment: str = ""
    started: str = ""
    corpus: str = ""
    error: str = ""
    seed: int | None = None
    stride: int | None = None
    rank: int | None = None
    tags: tuple[str, ...] = ()
    recipe: str = ""
    content: str = ""
    commit: str = ""
    metric: str = ""
    quality: float | None = None
    cache: float | None = None

    @property
    def mechanism(self) -> str:
        """Attention, stride, rank and compression, for people."""
        words = [self.attention] if self.attention not in ("", "none") else []
        words += [f"s={self.stride}"] if self.stride is not None else []
        words += [self.compress] if self.compress not in ("", "none") else []
        words += [f"r={self.rank}"] if self.rank is not None else []
        return " ".join(words) or "none"


def entries(root: Path) -> list[LedgerEntry]:
    """Every run below a folder, which need not exist; the oldest first."""
    places = folders(root) if root.is_dir() else ()
    runs = [_entry(folder) for folder, names in places if RECORD in names]
    return sorted((run for run in runs if run), key=lambda run: (run.started, run.directory))


def unrecorded(root: Path) -> list[Path]:
    """The folders below a folder that a run has begun and that have no record, nor a run below them."""
    contents = dict(folders(root))
    recorded = {parent for folder, names in contents.items() if RECORD in names for parent in (folder, *folder.parents)}
    return sorted(folder for folder, names in contents.items() if names >= TRACES and folder not in recorded)


def alike(root: Path, key: str, mode: str, seed: int, task: str) -> list[LedgerEntry]:
    """The runs of a job below a folder, whatever corpus they read; the oldest first.

    Args:
        key: :func:`attnlab.run.identity.run` of the job's configuration with the corpus "".
    """
    runs = [run for run in entries(root) if (run.mode, run.seed, run.task) == (mode, seed, task)]
    return [run for run in runs if _key(run) == key]


@functools.cache
def _key(run: LedgerEntry) -> str:
    """The key of a recorded run; empty where its record does not say what it was."""
    try:
        record = records.read(run.directory)
        weights, where = record["identity"]["weights"], record["environment"]
        return identity.run(record["config"], "", weights, where.get("device"), where.get("threads"))
    except (OSError, *records.UNREADABLE, AttnlabError) as error:
        log.debug("%s: no key: %s", run.directory, error)
        return ""


def _entry(folder: Path) -> LedgerEntry | None:
    """The entry of the record in a folder; None: it was removed in the meantime."""
    try:
        record = records.read(folder)
        if not isinstance(record, dict) or record.get("status") not in records.STATUSES:
            raise ValueError("not a record: no status")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return LedgerEntry(folder, BROKEN, error=" ".join(str(error).split()))
    about, where, cache, quality = (
        section if isinstance(section := record.get(name), Mapping) else {}
        for name in ("identity", "environment", "kv_cache", "quality")
    )
    texts = ("status", "mode", "task", "attention", "compress", "scale", "experiment", "started", "corpus", "error")
    values: dict[str, Any] = {name: value for name in texts if isinstance(value := record.get(name), str)}
    values |= {name: finite(record.get(name)) for name in ("seed", "stride", "rank")}
    if values["status"] == "running" and holder_of(folder) is None:
        values |= {"status": "interrupted", "error": "its process is gone"}
    scores = [(name, value) for name, value in quality.items() if finite(value) is not None]
    values |= dict(zip(("metric", "quality"), scores[0], strict=True)) if scores else {}
    tags = record.get("tags")
    return LedgerEntry(
        folder,
        **values,
        tags=tuple(map(str, tags)) if isinstance(tags, list) else (),
        recipe=str(about.get("recipe", NOT_RUN)),
        content=str(about.get("corpus", NOT_RUN)),
        commit=str(where.get("git", NOT_RUN)),
        cache=finite(cache.get("elements_per_token_per_layer")),
    )


# --- removing runs ------------------------------------------------------------------------------------------------


def refusal(directory: Path, root: Path) -> str:
    """Why a directory below `root`, the folder that the user has named, is not removed; empty: it may be."""
    if os.path.realpath(directory) == os.path.realpath(root):
        return "it is the folder that was named; name the one above it"
    parts = directory.relative_to(root).parts
    if any(root.joinpath(*parts[:n]).is_symlink() for n in range(1, len(parts) + 1)):
        return "it is reached through a link"
    if not is_run(directory):
        return "not a run for sure: expected a record.json of a run, or its config.yaml with its run.log"
    try:
        names = foreign(directory)
    except OSError as error:
        return f"{error.filename or directory}: cannot be read ({error.strerror})"
    return f"it holds what no run has written: {', '.join(names[:5])}{', …' * (len(names) > 5)}" if names else ""


def remove(directory: Path, root: Path, what: Collection[str]) -> None:
    """Remove a run directory of one of the statuses `what`. Links in it are removed, not what they lead to.

    Raises:
        LockedError: a process uses it.
        DataError: it is not to be removed (see :func:`refusal`), or is of another status now.
        OSError: a file cannot be removed; what is left is still a run.
    """
    with locked(directory, wait=0):
        entry = _entry(directory) if os.path.lexists(directory / RECORD) else None
        status = entry.status if entry else UNRECORDED
        status = "interrupted" if status == "running" else status  # this process has the lock
        if why := f"it is {status} now" * (status not in what) or refusal(directory, root):
            raise DataError(why)
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in (*LAST, LOCK):
                path.unlink()
        for name in LAST:
            (directory / name).unlink(missing_ok=True)
    if not os.listdir(directory):  # else another run has just taken the name
        directory.rmdir()
