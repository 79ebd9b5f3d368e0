"""Finding and reading records. A broken one is named and skipped: the others can still be read."""

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attnlab.config.build import at
from attnlab.errors import DataError, printable
from attnlab.run import identity
from attnlab.run.record import RECORD, SCHEMA, UNREADABLE, problems, upgraded

log = logging.getLogger(__name__)

KEYS = {"schema", "status", "mode", "command"}  # any other JSON file lacks one of these
SURROGATE = re.compile(r"(?<!\\)(\\u[dD][89a-fA-F])")  # of a file's name that is no UTF-8: shown as it is written
WEIGHTS = {"checkpoints", "compressed", "exported"}  # folders of a run in which no other run lies


@dataclass(frozen=True)
class SavedRecord:
    """A record of the present schema and its file."""

    path: Path
    record: dict[str, Any]

    def number(self, dotted: str) -> float | None:
        """The value of a dotted key, for instance quality.bleu; None where nothing was measured, or nothing finite."""
        return finite(at(self.record, dotted))

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
        stride, attention = self.record["stride"], self.record["attention"]
        if pattern := (self.record["config"].get("attention") or {}).get("pattern"):
            attention += f" [{','.join(pattern)}]"
        return attention + (f" s={stride}" if stride is not None else "")


def near(path: Path) -> Path:
    """A path relative to the working directory if it lies below that."""
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


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


def record_files(place: Path) -> Iterator[tuple[Path, bool]]:
    """The files in which records may be, each with whether a record is expected there.

    In a folder without a record.json every JSON file counts. DataError: the place does not exist.
    """
    if place.is_file():
        yield place, True
        return
    if not place.exists():
        raise DataError(f"{place}: no such file or folder; expected a record of a run, or a folder with records")
    for folder, names in folders(place):
        if RECORD in names:
            yield folder / RECORD, True
        else:
            yield from ((folder / name, False) for name in sorted(names) if name.endswith(".json") and name[0] != ".")


def collect(places: Iterable[Path]) -> list[SavedRecord]:
    """Every record in these files and folders, the oldest first. DataError: a place does not exist."""
    paths = {path: expected for place in places for path, expected in record_files(place)}
    records = [record for path, expected in sorted(paths.items()) if (record := _read(path, expected))]
    if not records:
        log.warning("no records in %s: a run leaves its record.json in its directory", ", ".join(map(str, places)))
    return sorted(records, key=lambda saved: saved.record["started"])


def read(path: Path) -> SavedRecord | None:
    """The record in a file, of the present schema; None of a JSON file that is something else.

    DataError: it is not JSON, or it is a record of another schema or a damaged one.
    """
    try:
        record = json.loads(SURROGATE.sub(r"\\\1", path.read_text(encoding="utf-8")))
        if not isinstance(record, dict) or not record.keys() >= KEYS:
            return None
        record = upgraded(record)
        wrong = problems(record)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: skipped, not readable as JSON: {' '.join(str(error).split())}") from error
    if wrong:
        raise DataError(f"{path}: skipped, not a record of schema {SCHEMA}: {wrong[0]}")
    return SavedRecord(path, record)


def _read(path: Path, expected: bool) -> SavedRecord | None:
    """The record in a file; None if it is damaged, or not a record, with a warning if one is `expected`."""
    try:
        record = read(path)
    except DataError as error:
        log.warning("%s", error)
        return None
    if record is None and expected:
        log.warning("%s: skipped, not a record: expected a mapping with %s", path, ", ".join(sorted(KEYS)))
    return record
