"""The index of an outputs folder: a row for each record.json, in a SQLite file that can be deleted at any time.

The records are the truth. The index holds what lists and sweeps ask for, so that ten thousand records need not be read
again: each call walks the folder and reads the records whose size or time of change differs. A folder in which nothing
can be written is indexed in memory.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

from attnlab.errors import AttnlabError
from attnlab.run import identity, lock
from attnlab.run import record as records
from attnlab.run.record import NOT_RUN

log = logging.getLogger(__name__)

OUTPUTS = Path("outputs")
FILE = ".ledger.sqlite"
RECORD = "record.json"
TRACES = {"config.yaml", "run.log"}  # a folder with both, and no record, is what is left of a run
WEIGHTS = {"checkpoints", "compressed"}  # folders of a run in which no other run lies
PATIENCE = 1.0  # seconds to wait for another process that writes the index: writing takes much less
BROKEN = "broken"  # the status of a file that is not a record
UNRECORDED = "unrecorded"  # that of a folder without one
FORMAT = 1
TEXTS = ("status", "mode", "task", "attention", "compress", "scale", "experiment", "started", "corpus", "error")
NUMBERS = ("seed", "stride", "rank")


@dataclass(frozen=True)
class Run:
    """What the index knows of a run.

    Args:
        directory: the run's.
        status: as in the record; "interrupted" where the record says "running" and the process is gone; "broken" where
            the file is not a record.
        mode, task, attention, compress, scale, experiment: names, as in the record.
        started: when, ISO 8601.
        corpus: what was read, for people.
        error: why the run failed or was interrupted, or what is wrong with the file; empty: nothing.
        seed, stride, rank: as in the record; None: the mechanism has no such knob.
        tags: words of the user.
        recipe, run: the identity, as recorded.
        content: the fingerprint of the corpus.
        commit: of the code, with "-dirty" if it was changed.
        metric: the name of the first number of the quality; empty: nothing was scored.
        quality: that number.
        cache: cached numbers per token and layer.
    """

    directory: Path
    status: str
    mode: str
    task: str
    attention: str
    compress: str
    scale: str
    experiment: str
    started: str
    corpus: str
    error: str
    seed: int | None
    stride: int | None
    rank: int | None
    tags: tuple[str, ...]
    recipe: str
    run: str
    content: str
    commit: str
    metric: str
    quality: float | None
    cache: float | None

    @property
    def mechanism(self) -> str:
        """Attention, stride, rank and compression, for people."""
        words = [self.attention] if self.attention not in ("", "none") else []
        words += [f"s={self.stride}"] if self.stride is not None else []
        words += [self.compress] if self.compress not in ("", "none") else []
        words += [f"r={self.rank}"] if self.rank is not None else []
        return " ".join(words) or "none"


NAMES = tuple(field.name for field in fields(Run) if field.name != "directory")
SELECTED = ", ".join(f'"{name}"' for name in NAMES)  # commit is a word of SQL


class Ledger:
    """The runs below a folder.

    Args:
        root: the folder; it need not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / FILE
        self.unrecorded: list[Path] = []

    def runs(self) -> list[Run]:
        """Bring the index up to date, and return every run, the oldest first.

        `unrecorded` then has the folders that a run has begun and that have no record.
        """
        rows = self._ask(f"SELECT path, {SELECTED} FROM runs ORDER BY started, path", ())
        return [self._run(row) for row in rows]

    def alike(self, key: str, mode: str, seed: int, task: str) -> list[Run]:
        """Bring the index up to date, and return the runs of a job, whatever corpus they read; the oldest first.

        Args:
            key: of the job, see :func:`key_of`.
            mode: the job's.
            seed: the job's.
            task: the job's.
        """
        where = "mode = ? AND seed = ? AND task = ?"
        statement = f"SELECT key, path, {SELECTED} FROM runs WHERE {where} ORDER BY started, path"
        rows = self._ask(statement, (mode, seed, task))
        return [self._run(row[1:]) for row in rows if row[0] == key]

    def _run(self, row: tuple[Any, ...]) -> Run:
        values = dict(zip(NAMES, row[1:], strict=True))
        directory = self.root / row[0]
        if values["status"] == "running" and not lock.alive(values, directory):
            values |= {"status": "interrupted", "error": "its process is gone"}
        return Run(directory, **values | {"tags": tuple(json.loads(values["tags"]))})

    def _key(self, path: str) -> str:
        """The key of a recorded run; empty where its record does not say what it was."""
        try:
            record = records.read(self.root / path)
            about, where = record["identity"], record["environment"]
            weights = about["weights"] if isinstance(about["weights"], Mapping) else {}
            return key_of(record["config"], weights, where.get("device"), where.get("threads"))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, AttnlabError) as error:
            log.debug("%s: no key: %s", self.root / path, error)
            return ""

    def _ask(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The rows of a query, of an index that is up to date: in its file, or in memory where there can be none.

        Rows that have a column `key` come first with it, computed where nobody has asked for it before.
        """
        if not self.root.is_dir():
            return []
        linked = self.file.is_symlink()  # to a file that may be somebody's: nothing in it is replaced
        why = "it is a link" if linked else "damaged again while it was made"
        for _ in range(0 if linked else 2):
            try:
                with closing(_opened(str(self.file))) as index:
                    return self._answer(index, statement, values)
            except sqlite3.Error as error:
                if not _is_damaged(error):  # read-only, full, in use, or a file system without locks
                    why = str(error)
                    break
                self._remove()
        _warn(f"{self.file}: cannot be used ({why}); every record is read")
        with closing(_opened(":memory:")) as index:
            return self._answer(index, statement, values)

    def _answer(self, index: sqlite3.Connection, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        self._refresh(index)
        asked = index.execute(statement, values)
        keyed = asked.description[0][0] == "key"
        rows: list[tuple[Any, ...]] = asked.fetchall()
        if not all(_is_sound(row[keyed + 1 :]) for row in rows):
            raise Damaged("a row is not what a record gives")
        fresh = {row[1]: self._key(row[1]) for row in rows if keyed and row[0] is None}
        _write(index, "UPDATE runs SET key = ? WHERE path = ?", [(key, path) for path, key in fresh.items()])
        if index.execute("PRAGMA user_version").fetchone()[0] != _version():
            raise sqlite3.OperationalError("another version of the code has made it again meanwhile")
        return [(fresh.get(row[1], row[0]), *row[1:]) for row in rows] if keyed else rows

    def _remove(self) -> None:
        """Delete the index, and its journal: that of another file would be played back into the next one."""
        for end in ("", "-journal", "-wal", "-shm"):
            with contextlib.suppress(OSError):  # the next attempt says what is wrong
                Path(f"{self.file}{end}").unlink()

    def _refresh(self, index: sqlite3.Connection) -> None:
        known = {path: (mtime, size) for path, mtime, size in index.execute("SELECT path, mtime, size FROM runs")}
        left: list[str] = []
        found: dict[str, tuple[int, int]] = {}
        for path, state in self._walk():
            if state is None:
                left.append(path)
            else:
                found[path] = state.st_mtime_ns, state.st_size
        above = {str(folder) for path in found for folder in PurePosixPath(path).parents} if left else set()
        self.unrecorded = [self.root / path for path in sorted(left) if (path or ".") not in above]
        changed = {path: state for path, state in found.items() if known.get(path) != state}
        rows = [(path, *state, *_row(self.root / path / RECORD)) for path, state in changed.items()]
        marks = ", ".join("?" * (3 + len(NAMES)))
        _write(index, f"INSERT OR REPLACE INTO runs (path, mtime, size, {SELECTED}) VALUES ({marks})", rows)
        _write(index, "DELETE FROM runs WHERE path = ?", [(path,) for path in known.keys() - found.keys()])

    def _walk(self) -> Iterator[tuple[str, os.stat_result | None]]:
        """Every folder with a record, and the state of that; None of a folder that only has traces of a run.

        A folder is visited once, whatever links lead to it, and by its own name if that lies below the root. A link to
        a folder above the root is not followed.
        """
        top = os.path.realpath(self.root)
        folders, links, seen = [("", top)], list[tuple[str, str]](), set[str]()
        while folders or links:
            folder, real = folders.pop() if folders else links.pop(0)
            if real in seen:
                continue
            seen.add(real)
            names, state = set(), None
            try:
                with os.scandir(self.root / folder) as entries:
                    for entry in entries:
                        names.add(entry.name)
                        with contextlib.suppress(OSError):  # a link to itself or to nothing
                            if entry.name == RECORD:
                                state = entry.stat()
                            elif entry.name.startswith(".") or entry.name in WEIGHTS or not entry.is_dir():
                                continue
                            elif _is_text(entry.path):
                                inner = f"{folder}/{entry.name}" if folder else entry.name
                                if not entry.is_symlink():
                                    folders.append((inner, f"{real}/{entry.name}"))
                                elif not Path(top).is_relative_to(aim := os.path.realpath(entry.path)):
                                    links.append((inner, aim))
            except FileNotFoundError:  # removed in the meantime
                continue
            except OSError as error:
                log.warning("%s: cannot be read (%s)", self.root / folder, error.strerror)
                continue
            if state is not None or names >= TRACES:
                yield folder, state


def status_of(directory: Path) -> str:
    """The status of a run as its record has it now; BROKEN or UNRECORDED where that says nothing.

    Args:
        directory: the run's.
    """
    path = directory / RECORD
    return str(_row(path)[NAMES.index("status")]) if os.path.lexists(path) else UNRECORDED


def key_of(
    config: identity.Config,
    weights: Mapping[str, str] | None = None,
    device: str | None = None,
    threads: int | None = None,
) -> str:
    """What a job is, from its configuration alone: the identity of its run but for the corpus.

    Args:
        config: resolved.
        weights: the content of pretrained weights, see :func:`attnlab.run.identity.contents`; None: computed.
        device: what mode=bench measures on; other modes ignore it.
        threads: the threads of mode=bench; other modes ignore them.
    """
    return identity.run(config, "", weights, device, threads)


def _opened(file: str) -> sqlite3.Connection:
    """The index in a file, empty if it is new or another version's."""
    index = sqlite3.connect(file, timeout=PATIENCE)
    try:
        index.execute("PRAGMA synchronous = OFF")  # it can be made again
        version = _version()
        if index.execute("PRAGMA user_version").fetchone()[0] != version:
            with index:
                index.execute("BEGIN IMMEDIATE")
                index.execute("DROP TABLE IF EXISTS runs")
                index.execute(f"CREATE TABLE runs (path PRIMARY KEY, mtime, size, {SELECTED}, key)")
                index.execute("CREATE INDEX jobs ON runs (mode, seed, task)")
                index.execute(f"PRAGMA user_version = {version}")
    except BaseException:
        index.close()
        raise
    return index


def _sources() -> int:
    sources = (Path(__file__), Path(identity.__file__), Path(identity.__file__).parents[1] / "config" / "renames.py")
    text = b"".join(path.read_bytes() for path in sources)
    return int(hashlib.sha256(text).hexdigest()[:7], 16)


SOURCES = _sources()  # read with the code itself: files may change while a multirun is in progress


def _version() -> int:
    """Changes with the code that makes the rows and the keys."""
    return FORMAT + SOURCES


class Damaged(sqlite3.DatabaseError):
    """A row of the index is of another form than what this code writes."""

    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


def _is_sound(row: tuple[Any, ...]) -> bool:
    """Whether the values of NAMES are of their types."""
    values = dict(zip(NAMES, row, strict=True))
    numbers = {name: values.pop(name) for name in (*NUMBERS, "quality", "cache")}
    if not all(type(value) is str for value in values.values()):
        return False
    if not all(value is None or type(value) in (int, float) for value in numbers.values()):
        return False
    try:
        tags = json.loads(values["tags"])
    except (ValueError, RecursionError):
        return False
    return type(tags) is list and all(type(tag) is str for tag in tags)


def _is_damaged(error: sqlite3.Error) -> bool:
    """Whether the file is no index, rather than one that cannot be read or written now."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@functools.cache
def _warn(text: str) -> None:
    """Once in a process: each job of a multirun asks."""
    log.warning("%s", text)


def _is_text(path: str) -> bool:
    """Whether the name of a folder is UTF-8, as all that attnlab makes are."""
    try:
        path.encode()
    except UnicodeEncodeError:
        _warn(f"{path!r}: not UTF-8; what it holds is left out")
        return False
    return True


def _write(index: sqlite3.Connection, statement: str, rows: list[tuple[Any, ...]]) -> None:
    if rows:
        with index:
            index.executemany(statement, rows)


def _row(path: Path) -> tuple[Any, ...]:
    """The values of NAMES, of a record."""
    blank: dict[str, Any] = dict.fromkeys(NAMES, "") | dict.fromkeys((*NUMBERS, "quality", "cache")) | {"tags": "[]"}
    try:
        if not path.is_file():
            raise ValueError("not a record: no file")
        record = json.loads(path.read_bytes())
        if not isinstance(record, dict) or record.get("status") not in records.STATUSES:
            raise ValueError("not a record: no status")
        values = _values(record, blank)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        values = blank | {"status": BROKEN, "error": " ".join(str(error).split())}
    row = (values[name] for name in NAMES)
    return tuple(value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for value in row)


def _values(record: Mapping[str, Any], blank: dict[str, Any]) -> dict[str, Any]:
    values = blank | {name: value for name in TEXTS if isinstance(value := record.get(name), str)}
    values |= {name: int(value) for name in NUMBERS if isinstance(value := record.get(name), int) and _fits(value)}
    tags = record.get("tags")
    values["tags"] = json.dumps([str(tag) for tag in tags] if isinstance(tags, list) else [])
    about, where = _mapping(record, "identity"), _mapping(record, "environment")
    values |= {name: str(about.get(name, NOT_RUN)) for name in ("recipe", "run")}
    values |= {"content": str(about.get("corpus", NOT_RUN)), "commit": str(where.get("git", NOT_RUN))}
    scores = {name: value for name, value in _mapping(record, "quality").items() if _is_number(value)}
    values["metric"] = next(iter(scores), "")
    values["quality"] = scores.get(values["metric"])
    cache = _mapping(record, "kv_cache").get("elements_per_token_per_layer")
    values["cache"] = cache if _is_number(cache) else None
    return values


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = record.get(key)
    return found if isinstance(found, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and _fits(value))


def _fits(value: int) -> bool:
    """Whether SQLite can hold an integer."""
    return -(2**63) <= value < 2**63
