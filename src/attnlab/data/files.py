"""Files of corpora. Each error is one line with the file, the line, and what was expected there. Imports no torch."""

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from attnlab.errors import DataError

Value = TypeVar("Value", bound=Hashable)


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Turns errors of reading a file into a DataError that names it; `expected` is such as "a Parquet file"."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # libraries raise many classes for damaged files
        if isinstance(error, OSError) and error.strerror:
            what = "a directory" if path.is_dir() else f"cannot be read ({error.strerror})"
            raise DataError(f"{path}: {what}; expected {expected}") from error
        raise DataError(f"{path}: expected {expected} ({' '.join(str(error).split())[:160]})") from error


def check_folder(root: Path, layout: str) -> None:
    """Raise DataError where `data_root` is not a folder; `layout` says what belongs there."""
    if not root.is_dir():
        raise DataError(f"data_root={root}: {'is a file' if root.exists() else 'no such directory'}; {layout}")


def contents(folder: Path) -> str:
    """The first names in a folder, for errors."""
    return ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"


def first_of(root: Path, names: Iterable[str], what: str) -> Path:
    """The first of the files `names` that exists under `root`, plain or gzipped; `what` they hold, for the error."""
    paths = [root / f"{name}{suffix}" for name in names for suffix in ("", ".gz")]
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path}: a directory; expected a file ({what})")
        if path.is_file():
            return path
    raise DataError(f"{paths[0]}: no such file ({what}); data_root names the directory that holds it")


def only(paths: Sequence[Path]) -> Path | None:
    """The one of these that exists; None: none does. DataError: several do."""
    if len(paths) > 1:
        raise DataError(f"data_root={paths[0].parent}: both {paths[0].name} and {paths[1].name}; keep one of them")
    return paths[0] if paths else None


def repeated(values: Iterable[Value]) -> Value | None:
    """The first value that occurs a second time; None: all differ."""
    seen: set[Value] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: JSON and shells may give lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def squeeze(text: str) -> str:
    """`text` with each run of white space as one space."""
    return " ".join(text.split())


# --- text and JSON -------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark."""
    with reading(path, "a text file"):
        data = path.read_bytes()
    return _decoded(data, path, 1)


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file without their ends; a `.gz` file is decompressed. An empty file is an error.

    Only a line feed ends a line: published lines hold U+2028, U+0085 and others, at which str.splitlines breaks.
    """
    number = 0
    with reading(path, "a text file"), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield _decoded(line, path, number).rstrip("\r\n")
    if not number:
        raise DataError(f"{path}: an empty file; expected a text in every line")


def _decoded(data: bytes, path: Path, line: int) -> str:
    """The text of bytes that begin at a line."""
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise DataError(f"{path} line {line}: {error.reason}; expected UTF-8 text") from error


def read_json(path: Path) -> Any:
    """The one JSON value of a file."""
    values = [value for _, value in _json(path)]
    if len(values) != 1:
        raise DataError(f"{path}: {len(values)} JSON values; expected one")
    return values[0]


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, value) of each JSON value of a file; a value may extend over several lines."""
    text = read_text(path)
    decoder, at, line = json.JSONDecoder(), 0, 1
    while begin := re.compile(r"\S").search(text, at):
        line += text.count("\n", at, begin.start())
        at = begin.start()
        try:
            value, end = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError) as error:
            line += text.count("\n", at, min(getattr(error, "pos", at), len(text.rstrip())))
            raise DataError(f"{path} line {line}: malformed JSON ({error})") from error
        if "\\ud" in text[at:end].lower() and not is_unicode(json.dumps(value, ensure_ascii=False)):
            raise DataError(f"{path} line {line}: invalid Unicode: lone surrogate (\\ud8..)")
        yield line, value
        line += text.count("\n", at, end)
        at = end


# --- tables --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table or one JSON object, with its place for errors: the `number` of a line, item or row, from 1."""

    values: dict[str, Any]
    path: Path
    number: int
    unit: str = "line"

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.path} {self.unit} {self.number}"

    def value(self, key: str, *types: type) -> Any:
        """The value of a column. DataError: it is missing or not of these types."""
        value = self.values.get(key)
        if isinstance(value, types) and (not isinstance(value, bool) or bool in types):
            return value
        there = f"is {value!r:.40}" if key in self.values else f"is missing (found: {', '.join(map(str, self.values))})"
        raise DataError(f"{self.where}: {key!r} {there}; expected {' or '.join(t.__name__ for t in types)}")

    def text(self, key: str) -> str:
        """A text column, with each run of white space as one space."""
        return squeeze(self.value(key, str))


def rows(path: Path, columns: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a table.

    .csv and .tsv: a header and rows. .jsonl and .json: JSON objects; .json also a list of objects or an object whose
    `examples` is such a list (BIG-bench). .parquet: those of `columns` that it has.
    """
    if path.suffix in (".csv", ".tsv"):
        yield from _separated(path)
    elif path.suffix == ".parquet":
        yield from (Row(values, path, number, "row") for number, values in enumerate(read_parquet(path, columns), 1))
    else:
        for line, value in _json(path):
            if path.suffix == ".json" and isinstance(value, dict):
                value = value.get("examples", value)
            listed = path.suffix == ".json" and isinstance(value, list)
            for number, item in enumerate(value, 1) if listed else ((line, value),):
                row = Row(item, path, number, "item" if listed else "line")
                if not isinstance(item, dict):
                    raise DataError(f"{row.where}: expected a JSON object, not {type(item).__name__}")
                yield row


def _separated(path: Path) -> Iterator[Row]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a document may be long; the library's limit is 131,072
    table = csv.DictReader(io.StringIO(read_text(path), newline=""), delimiter="\t" if path.suffix == ".tsv" else ",")
    with reading(path, "a table"):
        if not table.fieldnames:
            raise DataError(f"{path}: an empty file; expected a header with the names of the columns")
        if (name := repeated(table.fieldnames)) is not None:
            raise DataError(f"{path}: the header has the column {name!r} twice; rename one of them")
        for values in table:
            row = Row(values, path, table.line_num)
            if None in values or None in values.values():
                raise DataError(f"{row.where}: expected {len(table.fieldnames)} columns as in the header")
            yield row


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, with those of `columns` that it has. DataError: it has none of them."""
    from pyarrow import parquet

    with reading(path, "a Parquet file"), parquet.ParquetFile(path) as table:
        there = table.schema_arrow.names
        chosen = [name for name in columns if name in there]
        if not chosen:
            raise DataError(f"{path}: no column {' or '.join(columns)} (found: {', '.join(there)})")
        for batch in table.iter_batches(batch_size=256, columns=chosen):
            yield from batch.to_pylist()
