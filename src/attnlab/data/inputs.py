"""What `input=` names: a text, a file, a folder, or a file with one input in each line."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from attnlab.config.check import check_lines
from attnlab.data.corpus import is_unicode
from attnlab.errors import DataError

LINES, OBJECTS = (".txt",), (".jsonl", ".ndjson")  # files with one input a line: as it is, or in a JSON object


@dataclass(frozen=True)
class InputKind:
    """What a model reads.

    Args:
        name: for messages, "audio file".
        suffixes: of such files; none: the input is a text, not a file.
        keys: under which a JSON object has it, the first that is there.
        check: raises DataError where a file is not of this kind; reads its header alone.
    """

    name: str
    suffixes: tuple[str, ...]
    keys: tuple[str, ...]
    check: Callable[[Path], None] = lambda path: None


@dataclass(frozen=True)
class Item:
    """One input: a text or the path of a file, and the JSON object that it stands in.

    Args:
        value: a text, or the path of a file.
        given: the object's other keys; empty where there is none.
    """

    value: str
    given: dict[str, Any] = field(default_factory=dict)


class Inputs:
    """The inputs that a person names. All are looked at once when it is made: a wrong one costs seconds, not hours.

    Args:
        given: a text or a path; for a kind of file, a folder too, which is searched with its subfolders. A Path is
            never a text.
        kind: what the model reads.

    Attributes:
        form: "one", "folder", "lines" (a text file) or "objects" (JSONL: paths in it are relative to its folder).

    Raises:
        DataError: there is no such file, it is empty, or an input in it is; names the line.
    """

    form: Literal["one", "folder", "lines", "objects"]

    def __init__(self, given: str | Path, kind: InputKind) -> None:
        if not isinstance(given, str | Path):
            raise DataError(f"input {given!r:.40}: expected {_article(kind)}, as a str or a Path")
        self.kind, self.given, self._path = kind, str(given), Path(given).expanduser()
        self._is_path = isinstance(given, Path)
        if not self.given.strip():
            raise DataError(f"input= is empty; expected {self._expected()}")
        if not kind.suffixes and not is_unicode(self.given):
            raise DataError(f"input={self.given[:40]!r}: not UTF-8 text")
        self._files: Sequence[Path] = ()
        try:
            self.form = self._form()
        except OSError as error:  # a text that is too long for a path
            if kind.suffixes:
                raise DataError(f"input={self.given[:80]}: cannot be read ({error.strerror})") from error
            self.form = "one"
        if self.form == "lines":
            check_lines(self._path)
        self.count = sum(1 for _ in self._checked())

    def _form(self) -> Literal["one", "folder", "lines", "objects"]:
        path, kind = self._path, self.kind
        if path.is_dir():
            if not kind.suffixes:
                raise DataError(f"input={path}: a folder; expected a text, a {LINES[0]} file or a {OBJECTS[0]} file")
            self._files = sorted(file for file in path.rglob("*") if file.suffix.lower() in kind.suffixes)
            if not self._files:
                raise DataError(f"input={path}: no {kind.name} in this folder; expected {', '.join(kind.suffixes)}")
            return "folder"
        looks_like_a_file = path.suffix.lower() in (*LINES, *OBJECTS) and not self.given.split()[1:]
        if (kind.suffixes or self._is_path or looks_like_a_file) and not path.is_file():
            raise DataError(f"input={self.given}: no such file")
        if path.is_file() and path.suffix.lower() in OBJECTS:
            return "objects"
        if path.is_file() and not kind.suffixes:
            return "lines"
        return "one"

    def _checked(self) -> Iterator[Item]:
        empty = True
        for item in self:
            empty = False
            if self.kind.suffixes:
                self.kind.check(Path(item.value))
            yield item
        if empty:
            raise DataError(f"input={self.given}: empty; expected {self._expected()}")

    def _expected(self) -> str:
        return _article(self.kind)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Item]:
        if self.form == "folder":
            yield from (Item(str(path)) for path in self._files)
        elif self.form == "one":
            yield Item(str(self._path) if self.kind.suffixes else self.given)
        else:
            yield from self._lines()

    def _lines(self) -> Iterator[Item]:
        try:
            with self._path.open(encoding="utf-8-sig") as file:
                for number, line in enumerate(file, 1):
                    where = f"{self._path} line {number}"
                    if self.form == "objects":
                        if line.strip():
                            yield self._object(line, where)
                    else:
                        yield Item(line.rstrip("\n"))
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path}: not UTF-8 text ({error.reason})") from error
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read ({error.strerror})") from error

    def _object(self, line: str, where: str) -> Item:
        try:
            given = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error}); expected one object in every line") from error
        if not isinstance(given, dict):
            raise DataError(f"{where}: expected a JSON object, got {str(given)[:40]!r}")
        key = next((key for key in self.kind.keys if key in given), None)
        if key is None:
            raise DataError(f"{where}: none of the keys {', '.join(self.kind.keys)}; expected {self._expected()} there")
        value = given[key]
        if isinstance(value, str) and not is_unicode(value):
            raise DataError(f"{where}: {key}={value[:40]!r}: half of a surrogate pair (\\ud8..), which is no letter")
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{where}: {key}={str(value)[:40]!r}: expected {self._expected()}")
        if self.kind.suffixes:
            value = str(self._path.parent / Path(value).expanduser())
            if not Path(value).is_file():
                raise DataError(f"{where}: {value}: no such file")
        return Item(value, given)


def _article(kind: InputKind) -> str:
    """What is expected, for messages: "the path of an audio file"."""
    return f"the path of {'an' if kind.name[0] in 'aeiou' else 'a'} {kind.name}" if kind.suffixes else "a text"


def chunks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """The items, so many at a time.

    Args:
        items: what is cut.
        size: items of a chunk; the last may have fewer.
    """
    while chunk := list(islice(items, size)):
        yield chunk
