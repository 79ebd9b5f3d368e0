"""The records of runs: found, read, listed, and removed with their directories.

A broken record is named and skipped: the others can still be read. A run directory is removed only if it is one for
sure, contains nothing else, and is not in use.
"""

import json
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attnlab.config.build import at
from attnlab.errors import DataError, printable
from attnlab.run import identity
from attnlab.run.directory import CONFIG, LOCK, WEIGHTS, foreign, holder_of, is_run, locked, near
from attnlab.run.record import RECORD, SCHEMA, UNREADABLE, corpus_of, problems, upgraded

log = logging.getLogger(__name__)

KEYS = {"schema", "status", "mode", "command"}  # any other JSON file lacks one of these
OUTPUTS = Path("outputs")
PACKED = "records.jsonl"  # many records: a line each, with its path, relative to the folder of this file, as `file`
BROKEN = "broken"  # the status of a file that is not a record
LAST = ("run.log", CONFIG, RECORD)  # removed at the end: what is left after an error is still seen as a run
PLACES = {"recipe": "identity.recipe", "commit": "environment.git"}  # of filters, in the record
SHOWN = {  # settings that lists and pages show, and those that change no number
    "task", "attention", "compress", "stride", "rank", "seed", "scale", "mode", "data_root", "cache_dir", "tags",
    "logger", "checkpoint", "resume",
}  # fmt: skip
SURROGATE = re.compile(r"(?<!\\)(\\u[dD][89a-fA-F])")  # of a file's name that is no UTF-8: shown as it is written


@dataclass(frozen=True)
class SavedRecord:
    """A record of the present schema and its file. A line of a PACKED file has the path that the file would have."""

    path: Path
    record: dict[str, Any]

    def number(self, dotted: str) -> float | None:
        """The value of a dotted key, for instance quality.bleu; None where nothing was measured, or nothing finite.

        `A / B` and `A - B` of two keys, with the spaces, are computed.
        """
        first, *rest = dotted.split(" ")
        value = finite(at(self.record, first))
        if not rest or value is None:
            return value
        other = self.number(rest[1])
        if rest[0] == "-":
            return None if other is None else value - other
        return value / other if other else None

    @property
    def name(self) -> str:
        """The file's path, relative to the working directory if it lies below that."""
        return printable(near(self.path).as_posix())

    @cached_property
    def canonical(self) -> dict[str, Any]:
        """The recipe with the keys and classes of today; empty where an old record does not have it.

        Raises DataError: a value is of another kind than in every run.
        """
        config = self.record["config"]
        try:
            return identity.canonical(config, self.record["identity"]["weights"]) if config else {}
        except UNREADABLE as error:
            raise DataError(f"{self.name}: the recipe cannot be read: {type(error).__name__}: {error}") from error

    @property
    def mechanism(self) -> str:
        """Attention, of a hybrid its pattern, and stride, for people."""
        stride, attention = self.record.get("stride"), str(self.record.get("attention", "none"))
        if pattern := at(self.record, "config.attention.pattern"):
            attention += f" [{','.join(map(str, pattern))}]"
        return attention + (f" s={stride}" if stride is not None else "")

    @property
    def method(self) -> str:
        """The mechanism and the compression method, as far as the run has them."""
        names = [self.mechanism, self.record.get("compress", "none")]
        return " ".join(name for name in names if not name.startswith("none")) or "none"

    @property
    def label(self) -> str:
        """The method and its rank, as lists, tables, titles and pictures name the run."""
        rank = self.record.get("rank")
        return self.method if rank is None else f"{self.method} r={rank}"

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the run's command that neither its label nor other columns show."""
        try:
            words = shlex.split(str(self.record.get("command", "")))
        except ValueError:  # a quotation without its end
            return {}
        pairs = (word.lstrip("+").partition("=") for word in words if "=" in word and word[0] != "-")
        return {key: value for key, _, value in pairs if key not in SHOWN and not key.startswith("hydra")}

    @property
    def score(self) -> tuple[str, float] | None:
        """The first number of the record's quality, with its name; None: nothing was scored."""
        scores = ((name, value) for name, value in self.record.get("quality", {}).items() if finite(value) is not None)
        return next(scores, None)

    @property
    def corpus(self) -> str:
        """The name of the corpus, without its place and sizes."""
        return re.split(r" at |: ", corpus_of(self.record), maxsplit=1)[0]

    def state(self) -> tuple[str, str]:
        """Status and error; "interrupted" if the record says "running" and the process is gone."""
        status, error = self.record["status"], " ".join(str(self.record.get("error") or "").split())
        gone = status == "running" and holder_of(self.path.parent) is None
        return ("interrupted", "its process is gone") if gone else (status, error)


def finite(value: Any) -> Any:
    """A finite number; None for any other value. JSON has NaN, and ints larger than every float."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return value if number else None


def folders(root: Path) -> Iterator[tuple[Path, set[str]]]:
    """Each folder with its file names, once, real ones before links.

    Folders above `root`, hidden folders and a run's folders of weights are passed over.
    """
    seen = {*map(str, root.resolve().parents)}

    def skipped(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # removed in the meantime
            log.warning("%s: cannot be read (%s)", error.filename, error.strerror)

    for folder, inner, files in os.walk(root, followlinks=True, onerror=skipped):
        if (real := os.path.realpath(folder)) in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = [name for name in inner if name[0] != "." and name not in WEIGHTS]
        inner.sort(key=lambda name: (os.path.islink(os.path.join(folder, name)), name))
        yield Path(folder), set(files)


def record_files(place: Path) -> Iterator[Path]:
    """The files that may have records: in a folder without a record.json every JSON file and the PACKED one.

    DataError: no such place.
    """
    if place.is_file():
        yield place
        return
    if not place.exists():
        raise DataError(f"{place}: no such file or folder; expected a record of a run, or a folder with records")
    for folder, names in folders(place):
        files = [name for name in names if (name.endswith(".json") and name[0] != ".") or name == PACKED]
        yield from (folder / name for name in ([RECORD] if RECORD in names else files))


def collect(places: Iterable[Path]) -> list[SavedRecord]:
    """Every record in these files and folders, the oldest first. DataError: a place does not exist."""
    places = list(places)
    records: dict[Path, SavedRecord] = {}
    for path in sorted({path for place in places for path in record_files(place)}):
        packed = path.suffix == ".jsonl" and os.access(path, os.R_OK)
        for number, line in enumerate(path.read_bytes().splitlines() if packed else [None], 1):
            name = f"{path}, line {number}" if packed else str(path)
            try:
                saved = read(path, line, name)
                if saved and records.setdefault(saved.path, saved) is not saved:
                    log.warning("%s: skipped, another record has the path %s: remove one", name, saved.path)
                elif not saved and (packed or path.name == RECORD or path in places):
                    log.warning("%s: skipped, not a record: expected a mapping with %s", name, ", ".join(sorted(KEYS)))
            except DataError as error:
                log.warning("%s", error)
    if not records:
        log.warning("no records in %s: a run leaves its record.json in its directory", ", ".join(map(str, places)))
    return sorted(records.values(), key=lambda saved: (saved.record["started"], saved.path))


def read(path: Path, line: bytes | None = None, name: str | Path = "") -> SavedRecord | None:
    """The record in a file or its `line`, of the present schema; None of JSON that is something else.

    DataError: it is not JSON, or it is a record of another schema or a damaged one. It has the `name` of the line.
    """
    name = name or path
    try:
        text = (path.read_bytes() if line is None else line).decode()
        record = json.loads(SURROGATE.sub(r"\\\1", text))
        if not isinstance(record, dict) or not record.keys() >= KEYS:
            return None
        record = upgraded(record)
        wrong = problems(record)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{name}: skipped, not readable as JSON: {' '.join(str(error).split())}") from error
    file = path.name if line is None else record.pop("file", None)
    if wrong or not isinstance(file, str):
        why = wrong[0] if wrong else f"file: expected the path of the record, got {file!r}"
        raise DataError(f"{name}: skipped, not a record of schema {SCHEMA}: {why}")
    return SavedRecord(path.parent / file, record)


# --- a list of runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LedgerEntry(SavedRecord):
    """A run of the list, with its :meth:`state`. "broken": the file is not a record, and `error` says why."""

    status: str
    error: str

    @property
    def directory(self) -> Path:
        return self.path.parent

    def value(self, key: str) -> Any:
        """The status, or what the record has at a dotted key or a key of PLACES; None: nothing."""
        return self.status if key == "status" else at(self.record, PLACES.get(key, key))

    @property
    def started(self) -> str:
        return str(self.record.get("started", ""))


def entries(root: Path) -> list[LedgerEntry]:
    """Every run below a folder, which need not exist; the oldest first."""
    places = folders(root) if root.is_dir() else ()
    runs = [_entry(folder) for folder, names in places if RECORD in names]
    return sorted((run for run in runs if run), key=lambda run: (run.started, run.directory))


def _entry(folder: Path) -> LedgerEntry | None:
    """The entry of the record in a folder; None: it was removed in the meantime."""
    file = folder / RECORD
    try:
        saved = read(file)
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        return LedgerEntry(file, {}, BROKEN, str(error).removeprefix(f"{file}: skipped, "))
    return LedgerEntry(file, saved.record, *saved.state()) if saved else LedgerEntry(file, {}, BROKEN, "not a record")


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
