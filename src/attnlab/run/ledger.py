"""The index of an outputs folder: an entry for each record.json, in a JSON file that can be deleted at any time.

Each call walks the folder and reads the records whose size or time of change differs, so that ten thousand records need
not be read again. An index that is damaged or was made by other code is made again.

Below the index: removing run directories, only what is one for sure, contains nothing else, and is not in use.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlab.errors import AttnlabError, DataError, WriteError
from attnlab.run import identity
from attnlab.run import record as records
from attnlab.run.directory import CONFIG, LOCK, foreign, holder_of, is_run, locked
from attnlab.run.files import write_text
from attnlab.run.record import NOT_RUN, RECORD
from attnlab.run.store import folders

log = logging.getLogger(__name__)

OUTPUTS = Path("outputs")
FILE = ".ledger.json"
TRACES = {CONFIG, "run.log"}  # a folder with both, and no record, is what is left of a run
BROKEN = "broken"  # the status of a file that is not a record
UNRECORDED = "unrecorded"  # that of a folder without one
VERSION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # of the code that makes entries
LAST = ("run.log", CONFIG, RECORD)  # removed at the end: what is left after an error is still seen as a run

Rows = dict[str, tuple[list[int], dict[str, Any]]]  # by folder: time of change and size of its record, and its entry


@dataclass(frozen=True)
class LedgerEntry:
    """What the index has of a run, as its record has it.

    Args:
        directory: the run's.
        status: also "interrupted" where the record says "running" and the process is gone, and "broken" where the file
            is not a record.
        error: why the run failed or was interrupted, or what is wrong with the file; empty: nothing.
        recipe, run: the identity.
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
    run: str = ""
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


class Ledger:
    """The runs below a folder, which need not exist."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / FILE
        self.unrecorded: list[Path] = []

    def runs(self) -> list[LedgerEntry]:
        """Bring the index up to date, and return every run, the oldest first.

        `unrecorded` then has the folders that a run has begun and that have no record.
        """
        runs = []
        for path, (_, values) in self._refreshed().items():
            entry = LedgerEntry(self.root / path, **values | {"tags": tuple(values.get("tags", ()))})
            if entry.status == "running" and holder_of(entry.directory) is None:
                entry = replace(entry, status="interrupted", error="its process is gone")
            runs.append(entry)
        return sorted(runs, key=lambda entry: (entry.started, entry.directory))

    def alike(self, key: str, mode: str, seed: int, task: str) -> list[LedgerEntry]:
        """The runs of a job, whatever corpus they read; the oldest first.

        Args:
            key: :func:`attnlab.run.identity.run` of the job's configuration with the corpus "".
        """
        runs = [run for run in self.runs() if (run.mode, run.seed, run.task) == (mode, seed, task)]
        return [run for run in runs if _key(run) == key]

    def _refreshed(self) -> Rows:
        """An index that is up to date."""
        before: Rows = {}
        with contextlib.suppress(OSError, *records.UNREADABLE):  # none that this code has written
            before = json.loads(self.file.read_bytes())[VERSION]
        rows: Rows = {}
        left = []
        for folder, names in folders(self.root) if self.root.is_dir() else ():
            path = os.path.relpath(folder, self.root)
            try:
                state = (folder / RECORD).stat() if RECORD in names else None
            except OSError:  # removed in the meantime, or a link to nothing
                continue
            if state is not None:
                row, about = before.get(path), [state.st_mtime_ns, state.st_size]
                rows[path] = row if row and row[0] == about else (about, _entry(folder))
            elif names >= TRACES:
                left.append(folder)
        above = {parent for path in rows for parent in (self.root / path).parents} if left else set()
        self.unrecorded = sorted(folder for folder in left if folder not in above)
        if rows != before:
            try:
                write_text(self.file, json.dumps({VERSION: rows}))
            except WriteError as error:
                log.warning("%s; every record is read each time", error)
        return rows


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


def _entry(folder: Path) -> dict[str, Any]:
    """What a :class:`LedgerEntry` has of the record in a folder."""
    try:
        if not (folder / RECORD).is_file():
            raise ValueError("not a record: no file")
        record = records.read(folder)
        if not isinstance(record, dict) or record.get("status") not in records.STATUSES:
            raise ValueError("not a record: no status")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return {"status": BROKEN, "error": " ".join(str(error).split())}
    about, where, cache, quality = (
        section if isinstance(section := record.get(name), Mapping) else {}
        for name in ("identity", "environment", "kv_cache", "quality")
    )
    texts = ("status", "mode", "task", "attention", "compress", "scale", "experiment", "started", "corpus", "error")
    values: dict[str, Any] = {name: value for name in texts if isinstance(value := record.get(name), str)}
    values |= {name: _number(record.get(name)) for name in ("seed", "stride", "rank")}
    values |= {name: str(about.get(name, NOT_RUN)) for name in ("recipe", "run")}
    values |= {"content": str(about.get("corpus", NOT_RUN)), "commit": str(where.get("git", NOT_RUN))}
    scores = [(name, value) for name, value in quality.items() if _number(value) is not None]
    values |= dict(zip(("metric", "quality"), scores[0], strict=True)) if scores else {}
    tags = record.get("tags")
    values["tags"] = [*map(str, tags)] if isinstance(tags, list) else []
    return values | {"cache": _number(cache.get("elements_per_token_per_layer"))}


def _number(value: Any) -> Any:
    """A finite number; None for any other value. An int of JSON may be larger than every float."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return value if number else None


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
        status = _entry(directory)["status"] if os.path.lexists(directory / RECORD) else UNRECORDED
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
