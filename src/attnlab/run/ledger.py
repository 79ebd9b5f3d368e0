"""The runs below an outputs folder, an entry for each record.json.

Below the list: removing run directories, only what is one for sure, contains nothing else, and is not in use.
"""

import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlab.config.build import at
from attnlab.errors import DataError
from attnlab.run.directory import CONFIG, LOCK, foreign, holder_of, is_run, locked
from attnlab.run.record import RECORD, corpus_of
from attnlab.run.store import finite, folders, read

OUTPUTS = Path("outputs")
BROKEN = "broken"  # the status of a file that is not a record
LAST = ("run.log", CONFIG, RECORD)  # removed at the end: what is left after an error is still seen as a run
PLACES = {"recipe": "identity.recipe", "commit": "environment.git"}  # of filters, in the record


@dataclass(frozen=True)
class LedgerEntry:
    """A run of the list.

    `status` is also "interrupted" if the record says "running" and the process is gone, and "broken" if the file is
    not a record. `error` says why.
    """

    directory: Path
    status: str
    error: str = ""
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def value(self, key: str) -> Any:
        """The status, or what the record has at a dotted key or a key of PLACES; None: nothing."""
        return self.status if key == "status" else at(self.record, PLACES.get(key, key))

    @property
    def started(self) -> str:
        return str(self.record.get("started", ""))

    @property
    def score(self) -> tuple[str, float] | None:
        """The first number of the record's quality, with its name; None: nothing was scored."""
        scores = ((name, value) for name, value in self.record.get("quality", {}).items() if finite(value) is not None)
        return next(scores, None)

    @property
    def corpus(self) -> str:
        """The name of the corpus, without its place and sizes."""
        return re.split(r" at |: ", corpus_of(self.record), maxsplit=1)[0]

    @property
    def mechanism(self) -> str:
        """Attention, stride, rank and compression, for people."""
        parts = ((key, self.value(key)) for key in ("attention", "stride", "compress", "rank"))
        marks = {"stride": "s=", "rank": "r="}
        return " ".join(f"{marks.get(key, '')}{part}" for key, part in parts if part not in (None, "none")) or "none"


def entries(root: Path) -> list[LedgerEntry]:
    """Every run below a folder, which need not exist; the oldest first."""
    places = folders(root) if root.is_dir() else ()
    runs = [_entry(folder) for folder, names in places if RECORD in names]
    return sorted((run for run in runs if run), key=lambda run: (run.started, run.directory))


def _entry(folder: Path) -> LedgerEntry | None:
    """The entry of the record in a folder; None: it was removed in the meantime."""
    try:
        saved = read(folder / RECORD)
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        return LedgerEntry(folder, BROKEN, str(error).removeprefix(f"{folder / RECORD}: skipped, "))
    if saved is None:
        return LedgerEntry(folder, BROKEN, "not a record")
    status, why = saved.record["status"], str(saved.record.get("error") or "")
    if status == "running" and holder_of(folder) is None:
        status, why = "interrupted", "its process is gone"
    return LedgerEntry(folder, status, why, saved.record)


# --- removing runs ------------------------------------------------------------------------------------------------


def refusal(directory: Path, root: Path) -> str:
    """Why a directory below `root`, the folder that the user has named, is not removed; empty: it may be."""
    if os.path.realpath(directory) == os.path.realpath(root):
        return "it is the folder that was named; name the one above it"
    parts = directory.relative_to(root).parts
    if any(root.joinpath(*parts[:n]).is_symlink() for n in range(1, len(parts) + 1)):
        return "it is reached through a link"
    if not is_run(directory):
        return "not a run for sure: expected a record.json or a config.yaml of a run"
    names = foreign(directory)
    return f"it holds what no run has written: {', '.join(names[:5])}{', …' * (len(names) > 5)}" if names else ""


def remove(directory: Path, root: Path, what: Collection[str]) -> None:
    """Remove a run directory of one of the statuses `what`. Links in it are removed, not what they lead to.

    LockedError: a process uses it. DataError: :func:`refusal`, or another status now. OSError: a file cannot be
    removed; the rest is still a run.
    """
    with locked(directory, wait=0):
        entry = _entry(directory)
        status = entry.status if entry else "removed"
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
