"""Rows of JSON, JSON Lines and Parquet files, with the place of each for error messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from attnlab.data.corpus import read_text
from attnlab.errors import DataError

SUFFIXES = (".jsonl", ".json", ".parquet")
SHARD = "-of-"  # in the names of files that together are one split

_DEEP = "JSON nested too deeply to be read; expected flat objects"


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        values: by column.
        where: the file with the line, item or row, counted from 1.
        name: the same with the file's name alone.
    """

    values: dict[str, Any]
    where: str
    name: str


def find(root: Path, names: Sequence[str]) -> list[Path]:
    """The files of one split: those of the first pattern that has any.

    Args:
        root: the folder.
        names: patterns relative to it, without suffix; each is tried with .jsonl, .json and .parquet.

    Raises:
        DataError: several files match that are not shards of one split.
    """
    for name in names:
        found = sorted(path for suffix in SUFFIXES for path in root.glob(f"{name}{suffix}") if path.is_file())
        if len(found) > 1 and not all(SHARD in path.name for path in found):
            listed = ", ".join(path.name for path in found)
            raise DataError(f"{found[0].parent}: {listed} are files of the same split; keep one of them")
        if found:
            return found
    return []


def rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a file.

    Args:
        path: .jsonl: an object on each line. .json: a list of objects, an object whose `examples` is such a list
            (BIG-bench), or an object on each line. .parquet: a table.
        columns: of a table, those that are read.

    Raises:
        DataError: the file cannot be read, or is not of its format; names the line.
    """
    if path.suffix == ".parquet":
        yield from _table(path, columns)
        return
    text = read_text(path)
    if path.suffix == ".json" and text.lstrip()[:1] in ("[", "{"):
        listed = _document(path, text)
        if listed is not None:
            yield from _items(path, listed)
            return
    yield from _lines(path, text)


def field(row: Row, key: str, kind: type | tuple[type, ...]) -> Any:
    """A value of a row. DataError: it is missing or of another type.

    Args:
        row: of a file of questions.
        key: of the value.
        kind: its type, or the types that it may have.
    """
    value = row.values.get(key)
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    found = f"is {value!r:.40}" if key in row.values else f"is missing (found: {', '.join(row.values) or 'nothing'})"
    raise DataError(f"{row.where}: {key!r} {found}; expected a {' or '.join(one.__name__ for one in kinds)}")


def _document(path: Path, text: str) -> list[Any] | None:
    """The list of a JSON document; None: it has an object on each line."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{"):
            first = text.lstrip().partition("\n")[0]
            try:
                json.loads(first)
            except json.JSONDecodeError:
                pass
            else:
                return None
        raise DataError(f"{path} line {error.lineno}: malformed JSON ({error.msg})") from error
    except RecursionError as error:
        raise DataError(f"{path}: {_DEEP}") from error
    if isinstance(content, dict):
        listed = content.get("examples", [content] if "examples" not in content else None)
    else:
        listed = content
    if not isinstance(listed, list):
        raise DataError(f"{path}: expected a list of objects, found {type(listed).__name__}")
    return listed


def _items(path: Path, listed: list[Any]) -> Iterator[Row]:
    for number, value in enumerate(listed, 1):
        yield _row(path, f"item {number}", value)


def _lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path} line {number}: malformed JSON ({error.msg})") from error
        except RecursionError as error:
            raise DataError(f"{path} line {number}: {_DEEP}") from error
        yield _row(path, f"line {number}", value)


def _row(path: Path, place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{path} {place}: expected an object, found {type(value).__name__}")
    return Row(value, f"{path} {place}", f"{path.name} {place}")


def _table(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    try:
        with parquet.ParquetFile(path) as table:
            there = table.schema_arrow.names
            wanted = [name for name in columns if name in there]
            if not wanted:
                raise DataError(f"{path}: none of the columns {', '.join(columns)} (found: {', '.join(there)})")
            number = 0
            for batch in table.iter_batches(columns=wanted):
                for value in batch.to_pylist():
                    number += 1
                    yield _row(path, f"row {number}", value)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file ({' '.join(str(error).split())[:160]})") from error
