"""The index of an outputs folder: an entry for each record.json, in a JSON file that can be deleted at any time.

The index has what lists and sweeps ask for, so that ten thousand records need not be read again: each call walks the
folder, and reads the records whose size or time of change differs. An index that is damaged or was made by other code
is made again.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlab.errors import AttnlabError, WriteError
from attnlab.run import identity, lock
from attnlab.run import record as records
from attnlab.run.directory import CONFIG, RECORD
from attnlab.run.files import write_text
from attnlab.run.record import NOT_RUN
from attnlab.run.store import folders

log = logging.getLogger(__name__)

OUTPUTS = Path("outputs")
FILE = ".ledger.json"
TRACES = {CONFIG, "run.log"}  # a folder with both, and no record, is what is left of a run
BROKEN = "broken"  # the status of a file that is not a record
UNRECORDED = "unrecorded"  # that of a folder without one
CODE = (__file__, identity.__file__, str(Path(identity.__file__).parents[1] / "config" / "renames.py"))
# of the code that makes entries and keys, read with it: files may change while a sweep is in progress
VERSION = hashlib.sha256(b"".join(Path(path).read_bytes() for path in CODE)).hexdigest()


@dataclass(frozen=True)
class LedgerEntry:
    """What the index has of a run, as its record has it.

    Args:
        directory: the run's; in the index it is relative to the index's folder.
        status: also "interrupted" where the record says "running" and the process is gone, and "broken" where the file
            is not a record.
        error: why the run failed or was interrupted, or what is wrong with the file; empty: nothing.
        recipe, run: the identity.
        content: the fingerprint of the corpus.
        commit: of the code, with "-dirty" if it was changed.
        metric, quality: the first number of the record's quality and its name; None and empty: nothing was scored.
        cache: cached numbers per token and layer.
        key: of the job, see :func:`key_of`; None: nobody has asked for it.
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
    key: str | None = None

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
        return self._present(entry for _, _, entry in self._refreshed().values())

    def alike(self, key: str, mode: str, seed: int, task: str) -> list[LedgerEntry]:
        """Bring the index up to date, and return the runs of a job, whatever corpus they read; the oldest first."""
        rows, changed, alike = self._refreshed(), False, []
        for path, (mtime, size, entry) in rows.items():
            if (entry.mode, entry.seed, entry.task) != (mode, seed, task):
                continue
            if entry.key is None:
                entry, changed = replace(entry, key=_key(self.root / path)), True
                rows[path] = mtime, size, entry
            if entry.key == key:
                alike.append(entry)
        if changed:
            self._write(rows)
        return self._present(alike)

    def _present(self, entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
        """Entries in order, with their directories and what their processes do now."""
        present = []
        for entry in sorted(entries, key=lambda entry: (entry.started, entry.directory)):
            entry = replace(entry, directory=self.root / entry.directory)
            if entry.status == "running" and lock.holder_of(entry.directory) is None:
                entry = replace(entry, status="interrupted", error="its process is gone")
            present.append(entry)
        return present

    def _refreshed(self) -> dict[str, tuple[int, int, LedgerEntry]]:
        """Time of change, size and entry of each record by its folder, of an index that is up to date."""
        before, rows, left = self._read(), {}, []
        for folder, names in folders(self.root) if self.root.is_dir() else ():
            path = os.path.relpath(folder, self.root)
            try:
                state = (folder / RECORD).stat() if RECORD in names else None
            except OSError:  # removed in the meantime, or a link to nothing
                continue
            if state is not None:
                about = state.st_mtime_ns, state.st_size
                row = before.get(path)
                rows[path] = row if row and row[:2] == about else (*about, _entry(folder, Path(path)))
            elif names >= TRACES:
                left.append(folder)
        above = {parent for path in rows for parent in (self.root / path).parents} if left else set()
        self.unrecorded = sorted(folder for folder in left if folder not in above)
        if rows != before:
            self._write(rows)
        return rows

    def _read(self) -> dict[str, tuple[int, int, LedgerEntry]]:
        """The index in the file; empty where there is none that this code has written."""
        try:
            version, rows = json.loads(self.file.read_bytes())
            if version != VERSION:
                return {}
            return {
                path: (mtime, size, LedgerEntry(Path(path), **values | {"tags": tuple(values["tags"])}))
                for path, (mtime, size, values) in rows.items()
            }
        except (OSError, *records.UNREADABLE):
            return {}

    def _write(self, rows: Mapping[str, tuple[int, int, LedgerEntry]]) -> None:
        plain = {
            path: (mtime, size, {name: value for name, value in vars(entry).items() if name != "directory"})
            for path, (mtime, size, entry) in rows.items()
        }
        try:
            write_text(self.file, json.dumps([VERSION, plain]))
        except WriteError as error:
            log.warning("%s; every record is read each time", error)


def status_of(directory: Path) -> str:
    """The status of a run as its record has it now; BROKEN or UNRECORDED where that has none."""
    return _entry(directory, directory).status if os.path.lexists(directory / RECORD) else UNRECORDED


def key_of(
    config: identity.Config,
    weights: Mapping[str, str] | None = None,
    device: str | None = None,
    threads: int | None = None,
) -> str:
    """What a job is, from its configuration alone: :func:`attnlab.run.identity.run` but for the corpus."""
    return identity.run(config, "", weights, device, threads)


def _key(directory: Path) -> str:
    """The key of a recorded run; empty where its record does not say what it was."""
    try:
        record = records.read(directory)
        about, where = record["identity"], record["environment"]
        weights = about["weights"] if isinstance(about["weights"], Mapping) else {}
        return key_of(record["config"], weights, where.get("device"), where.get("threads"))
    except (OSError, *records.UNREADABLE, AttnlabError) as error:
        log.debug("%s: no key: %s", directory, error)
        return ""


def _entry(folder: Path, directory: Path) -> LedgerEntry:
    """The entry of the record in a folder."""
    try:
        if not (folder / RECORD).is_file():
            raise ValueError("not a record: no file")
        record = records.read(folder)
        if not isinstance(record, dict) or record.get("status") not in records.STATUSES:
            raise ValueError("not a record: no status")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return LedgerEntry(directory, BROKEN, error=" ".join(str(error).split()))
    texts = ("status", "mode", "task", "attention", "compress", "scale", "experiment", "started", "corpus", "error")
    values: dict[str, Any] = {name: value for name in texts if isinstance(value := record.get(name), str)}
    values |= {name: _number(record.get(name)) for name in ("seed", "stride", "rank")}
    about, where = _mapping(record, "identity"), _mapping(record, "environment")
    values |= {name: str(about.get(name, NOT_RUN)) for name in ("recipe", "run")}
    values |= {"content": str(about.get("corpus", NOT_RUN)), "commit": str(where.get("git", NOT_RUN))}
    scores = {name: value for name, value in _mapping(record, "quality").items() if _number(value) is not None}
    values["metric"] = next(iter(scores), "")
    values["quality"] = scores.get(values["metric"])
    values["cache"] = _number(_mapping(record, "kv_cache").get("elements_per_token_per_layer"))
    tags = record.get("tags")
    return LedgerEntry(directory, **values, tags=tuple(map(str, tags)) if isinstance(tags, list) else ())


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> Any:
    """A finite number; None for any other value. An int of JSON may be larger than every float."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return value if number else None
