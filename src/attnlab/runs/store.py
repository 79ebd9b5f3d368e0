"""Finding records.  A broken one is named and skipped: it must not keep the others from being read."""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.errors import DataError
from attnlab.runs.record import problems

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A record and the file it stands in."""

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
        """The file, seen from where the command is given."""
        path = self.path.absolute()
        return path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else str(self.path)

    @property
    def mechanism(self) -> str:
        stride = self.record["stride"]
        return self.record["attention"] + (f" s={stride}" if stride is not None else "")


def collect(places: Iterable[Path]) -> list[Found]:
    """Every good record in these files and folders, the oldest first.  DataError: a place does not exist."""
    paths: set[Path] = set()
    for place in places:
        if not place.exists():
            raise DataError(f"{place}: no such file or folder; it should hold the record.json files of runs")
        paths |= set(place.rglob("record.json")) if place.is_dir() else {place}
    read = [found for path in sorted(paths) if (found := _read(path))]
    if not read:
        log.warning("no records in %s: a run leaves its record.json in its directory", ", ".join(map(str, places)))
    return sorted(read, key=lambda found: found.record["started"])


def _read(path: Path) -> Found | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        log.warning("%s: skipped, not readable as JSON: %s", path, " ".join(str(error).split()))
        return None
    wrong = problems(record) if isinstance(record, dict) else ["a mapping was expected"]
    if wrong:
        log.warning("%s: skipped, not a record of schema 1: %s", path, wrong[0])
        return None
    return Found(path, record)
