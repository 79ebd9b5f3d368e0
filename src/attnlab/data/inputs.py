"""The inputs of `input=`: a text, a file, a folder, or a file with one input in each line."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from attnlab.data.corpus import Row, files_below, is_unicode, read_lines, rows
from attnlab.data.report import Report
from attnlab.errors import DataError

log = logging.getLogger(__name__)

PATHS = (".txt", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".md", ".gz", ".wav", ".png", ".jpg")  # of a file
LINES = (".txt",)  # files with one input a line
OBJECTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")  # tables: one input in each JSON object or row
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".parquet")  # of tables that are not read


@dataclass(frozen=True)
class InputKind:
    """A kind of input.

    Args:
        name: for messages, "audio file".
        suffixes: of such files; empty: the input is a text.
        keys: of a JSON object, in order of preference.
        check: raises DataError where a file is not of this kind; reads its header alone.
        of_row: the value of a file that a row names, which may be a part of it; also raises DataError.
    """

    name: str
    suffixes: tuple[str, ...]
    keys: tuple[str, ...]
    check: Callable[[Path], object] = lambda path: None
    of_row: Callable[[Path, Row], Any] = lambda path, row: str(path)


@dataclass(frozen=True)
class Item:
    """One input, and `fields`, the row that holds it, or nothing.

    `value` is a text, the path of a file or, from Python, an object.
    """

    value: Any
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def blank(self) -> bool:
        """Whether it is a blank line of a file."""
        return isinstance(self.value, str) and not self.value.strip()


class Inputs:
    """The inputs that `source` names; all are checked at once.

    Args:
        source: a text or a path; for a kind of file also a folder, with its subfolders. A Path is never a text.

    Attributes:
        form: "one", "folder", "lines" (a text file) or "objects" (a table, whose paths are relative to its folder).

    Raises:
        DataError: a file is missing or empty, or a text in a JSON object is empty; names the line.
    """

    form: Literal["one", "folder", "lines", "objects"]

    def __init__(self, source: str | Path, kind: InputKind) -> None:
        self.kind, self.source, self._path = kind, str(source), Path(source).expanduser()
        self._expected = f"the path of a file ({kind.name})" if kind.suffixes else "a text"
        if not self.source.strip():
            raise DataError(f"input= is empty; expected {self._expected}")
        if not is_unicode(self.source):
            raise DataError(f"input={self.source[:40]!r}: not UTF-8 text")
        with Report().of("checks"):  # the inputs are read again, and reported then
            self._check(isinstance(source, Path))

    def _check(self, is_path: bool) -> None:
        kind = self.kind
        try:
            self.form = self._form(is_path)
        except OSError as error:  # a text that is too long for a path
            if kind.suffixes:
                raise DataError(f"input={self.source[:80]}: cannot be read ({error.strerror})") from error
            self.form = "one"
        self.count = 0
        for item in self:
            self.count += 1
            if kind.suffixes and isinstance(item.value, str):
                kind.check(Path(item.value))
        if not self.count:
            raise DataError(f"input={self.source}: empty; expected {self._expected}")

    def _form(self, is_path: bool) -> Literal["one", "folder", "lines", "objects"]:
        path, kind, suffix = self._path, self.kind, self._path.suffix.lower()
        if path.is_dir():
            if not kind.suffixes:
                raise DataError(f"input={path}: a folder; expected a text, a {LINES[0]} file or a {OBJECTS[0]} file")
            with Report().of(str(path)) as unread:
                self._files = files_below(path, kind.suffixes, kind.name)
            if unread.left_out:
                log.warning("input=%s: %s", path, unread)
            if not self._files:
                raise DataError(f"input={path}: no {kind.name} in this folder; expected {', '.join(kind.suffixes)}")
            return "folder"
        if path.is_file():
            if suffix in PACKED and (suffix == ".parquet" or {x.lower() for x in path.suffixes} & {*OBJECTS}):
                raise DataError(f"input={path}: a {suffix} table; unpack it, or convert it to a {OBJECTS[0]} file")
            return "objects" if suffix in OBJECTS else "one" if kind.suffixes else "lines"
        if kind.suffixes or is_path:
            raise DataError(f"input={self.source}: no such file")
        if not self.source.split()[1:] and (os.sep in self.source or suffix in PATHS):
            text = json.dumps({kind.keys[0]: self.source}, ensure_ascii=False)
            raise DataError(f"input={self.source}: no such file; if it is a text, give {text} in a {OBJECTS[0]} file")
        return "one"

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Item]:
        match self.form:
            case "folder":
                yield from (Item(str(path)) for path in self._files)
            case "one":
                yield Item(str(self._path) if self.kind.suffixes else self.source)
            case "objects":
                yield from map(self._item, rows(self._path))
            case "lines":
                yield from map(Item, read_lines(self._path))

    def _item(self, row: Row) -> Item:
        key = next((key for key in self.kind.keys if key in row.values), self.kind.keys[0])
        value = row.value(key, str)
        if not value.strip():
            raise DataError(f"{row.where}: {key} is empty; expected {self._expected}")
        if self.kind.suffixes:
            file = self._path.parent / Path(value).expanduser()
            if not file.is_file():
                raise DataError(f"{row.where}: {file}: no such file")
            return Item(self.kind.of_row(file, row), row.values)
        return Item(value, row.values)


def items_of(value: Any, kind: InputKind) -> "Inputs | list[Item]":
    """The inputs that a value of Python names: a text or path, a row of a dataset, or an object of the kind itself.

    DataError: a row has none of the kind's keys.
    """
    if isinstance(value, str | Path):
        return Inputs(value, kind)
    if not isinstance(value, Mapping) or "array" in value:  # a recording as `datasets` decodes it
        return [Item(value)]
    if key := next((key for key in kind.keys if key in value), None):
        named, row = value[key], Row(dict(value), Path("input"), 1, "row")
        is_file = bool(kind.suffixes) and isinstance(named, str | Path)
        return [Item(kind.of_row(Path(named), row) if is_file else named, row.values)]
    raise DataError(f"a row has the keys {', '.join(map(str, value))}; expected one of {', '.join(kind.keys)}")


def chunks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """The items, `size` at a time; the last chunk may have fewer."""
    while chunk := list(islice(items, size)):
        yield chunk
