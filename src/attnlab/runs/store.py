"""Finding records. A broken one is named and skipped: it must not keep the others from being read."""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attnlab.errors import DataError
from attnlab.runs import identity
from attnlab.runs.record import SCHEMA, problems, upgraded

log = logging.getLogger(__name__)


RECORD = {"schema", "status", "mode", "command"}  # any other JSON file lacks one of these


@dataclass(frozen=True)
class Found:
    """A record and its file.

    Args:
        path: the file.
        record: its content, of the present schema.
    """

    path: Path
    record: dict[str, Any]

    def number(self, dotted: str) -> float | None:
        """The value of a dotted key, for instance quality.bleu; None where nothing was measured."""
        value: Any = self.record
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def name(self) -> str:
        """The file's path, relative to the working directory if it lies below that."""
        path = self.path.absolute()
        return path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else str(self.path)

    @cached_property
    def canonical(self) -> dict[str, Any]:
        """The recipe with the keys and classes of today; empty where an old record does not say it."""
        config = self.record["config"]
        return identity.canonical(config, self.record["identity"]["weights"]) if config else {}

    @property
    def mechanism(self) -> str:
        """Attention, of a hybrid its pattern, and stride, for people."""
        stride, attention = self.record["stride"], self.record["attention"]
        if pattern := (self.record["config"].get("attention") or {}).get("pattern"):
            attention += f" [{','.join(pattern)}]"
        return attention + (f" s={stride}" if stride is not None else "")


def collect(places: Iterable[Path]) -> list[Found]:
    """Every record in these files and folders, whatever its file's name, the oldest first.

    In a folder every .json file is looked at; those that are not records are passed over. Raises DataError: a place
    does not exist.

    Args:
        places: folders and files.
    """
    paths: dict[Path, bool] = {}
    for place in places:
        if not place.exists():
            raise DataError(f"{place}: no such file or folder; expected a record of a run, or a folder with records")
        paths |= {path: path.name == "record.json" for path in place.rglob("*.json")} if place.is_dir() else {}
        paths |= {place: True} if place.is_file() else {}
    read = [found for path, expected in sorted(paths.items()) if (found := _read(path, expected))]
    if not read:
        log.warning("no records in %s: a run leaves its record.json in its directory", ", ".join(map(str, places)))
    return sorted(read, key=lambda found: found.record["started"])


def read(path: Path) -> Found | None:
    """The record in a file, of the present schema; None of a JSON file that is something else.

    Args:
        path: the file.

    Raises:
        DataError: it is not JSON, or it is a record of another schema or a damaged one.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: skipped, not readable as JSON: {' '.join(str(error).split())}") from error
    if not isinstance(record, dict) or not record.keys() >= RECORD:
        return None
    record = upgraded(record, path.parent)
    if wrong := problems(record):
        raise DataError(f"{path}: skipped, not a record of schema {SCHEMA}: {wrong[0]}")
    return Found(path, record)


def _read(path: Path, expected: bool) -> Found | None:
    """The record in a file; None if it is damaged, or not a record. `expected`: a file that is none is named."""
    try:
        found = read(path)
    except DataError as error:
        log.warning("%s", error)
        return None
    if found is None and expected:
        log.warning("%s: skipped, not a record: expected a mapping with %s", path, ", ".join(sorted(RECORD)))
    return found
