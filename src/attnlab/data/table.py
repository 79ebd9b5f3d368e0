"""Own data: a table of examples as JSON lines, CSV or TSV, whose columns can be named, and a folder of recordings.

<root>/{train,dev,test}.{jsonl,json,csv,tsv}     one example each; `valid`, `val` and `validation` mean dev
<root>/{data,manifest}.{jsonl,json,csv,tsv}      one table: every `hold_out`-th example is tested, the next ones are dev
<root>/{train,dev,test}/**/NAME.{wav,flac,ogg}   recordings with their texts beside them, NAME.txt
<root>/**/NAME.{wav,flac,ogg}                    the same, without splits
"""

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, MinLen

from attnlab.data.corpus import Kind, Reader, Segment, Utterance, read_records, read_text, refuse_empty, whole
from attnlab.errors import DataError

SPELLINGS = {"train": ("train", "training"), "dev": ("dev", "valid", "val", "validation"), "test": ("test",)}
TOGETHER = ("data", "manifest", "metadata")
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
AUDIO = (".wav", ".flac", ".ogg")
Name = Annotated[str, MinLen(1)]


def tables(root: Path, spellings: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """The files of `root` with one of these names; at most one is expected.

    Args:
        root: of the corpus.
        spellings: names without suffix.
        suffixes: of the kinds of tables.
    """
    return [path for name in spellings for suffix in suffixes if (path := root / f"{name}{suffix}").is_file()]


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, columns) of each row of a table: JSON objects, or comma- or tab-separated values below a header.

    Args:
        path: the file; its suffix says which kind it is.

    Raises:
        DataError: the file is not such a table; names the line.
    """
    if path.suffix in (".jsonl", ".json"):
        yield from read_records(path)
        return
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a document may be long; the library's own limit is 131,072
    table = csv.DictReader(io.StringIO(read_text(path), newline=""), delimiter="\t" if path.suffix == ".tsv" else ",")
    if not table.fieldnames:
        raise DataError(f"{path}: an empty file; expected a header with the names of the columns")
    if twice := [name for name, count in Counter(table.fieldnames).items() if count > 1]:
        raise DataError(f"{path}: the header has the column {twice[0]!r} twice; rename one of them")
    try:
        for row in table:
            if None in row or None in row.values():
                raise DataError(
                    f"{path} line {table.line_num}: expected {len(table.fieldnames)} columns as in the header"
                )
            yield table.line_num, row
    except csv.Error as error:
        raise DataError(f"{path} line {table.line_num}: not a table ({error})") from error


class Table(Reader):
    """Examples of one's own: texts, or recordings with texts.

    Args:
        source: the column with the input text; of recordings, with their transcript.
        target: the column with the text to be written; of recognition, the same as `source`.
        audio: the column with the path of a recording, from `data_root` on; null: the input is a text.
        id: the column with a unique name; null: the line's number.
        name: of the corpus, for records; null: that of the folder.
        hold_out: where no files give dev and test: every `hold_out`-th example is in the test split, and the one after
            it in dev.
    """

    unit = "examples"

    def __init__(
        self,
        source: Name = "source",
        target: Name = "target",
        audio: Name | None = None,
        id: Name | None = None,
        name: Name | None = None,
        hold_out: Annotated[int, Ge(3)] = 10,
    ) -> None:
        self.columns, self.audio, self.id, self.hold_out = (source, target), audio, id, hold_out
        self.kinds = ("audio",) if audio else ("text",)
        self.named, self.name = name, name or "own data"
        names = [*self.columns, *([audio] if audio else [])]
        self.layout = "data_root must hold train, dev and test, or data, as .jsonl, .csv or .tsv with the columns "
        self.layout += ", ".join(dict.fromkeys(names))
        if audio:
            self.layout += "; or folders of .wav or .flac files, each with a .txt file of the same name"

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self.name = self.named or root.name
        wanted = dict(zip(("source", "target", "audio"), (*self.columns, self.audio), strict=True))
        for path in self._places(root).values():
            if path.is_dir() and not any(file.suffix.lower() in AUDIO for file in path.rglob("*")):
                raise DataError(f"{path}: no examples; {self.layout}")
            header = _header(path) if path.is_file() else None
            for key, column in wanted.items():
                if header and column and column not in header:
                    raise DataError(
                        f"{path}: the column {column!r} is missing (found: {', '.join(header)}); "
                        f"task.data.reader.{key} names it"
                    )

    def _places(self, root: Path) -> dict[str, Path]:
        """The table or folder of each split; of a corpus without splits, of "all".

        Raises:
            DataError: there is none, or two of one name.
        """
        found = {split: tables(root, names) for split, names in SPELLINGS.items()} | {"all": tables(root, TOGETHER)}
        for paths in found.values():
            if len(paths) > 1:
                raise DataError(f"data_root={root}: both {paths[0].name} and {paths[1].name}; keep one of them")
        places = {split: paths[0] for split, paths in found.items() if paths}
        if not places and self.audio:
            folders = [(split, root / name) for split, names in SPELLINGS.items() for name in names]
            parts = [(split, folder) for split, folder in folders if folder.is_dir()]
            places = dict(parts) or {"all": root}
            if twice := [folder.name for split, folder in parts if folder != places[split]]:
                name = next(places[split].name for split, folder in parts if folder.name == twice[0])
                raise DataError(f"data_root={root}: both {twice[0]} and {name}; keep one of them")
        if "train" in places:
            places.pop("all", None)
        if "train" not in places and "all" not in places:
            self.missing(root / "train.jsonl")
        return places

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        self.name = self.named or root.name
        places = self._places(root)
        if split in places and split != "train":
            return self._examples(root, places[split], split, drop_empty)
        first = "train" if "train" in places else "all"
        every = self._examples(root, places[first], first, drop_empty)
        missing = [name for name in ("test", "dev") if name not in places]
        part = {name: range(i, len(every), self.hold_out) for i, name in enumerate(missing)}
        if split in part:
            if not part[split]:
                raise DataError(f"{places[first]}: {len(every)} examples are too few to hold some out for {split}")
            return [every[i] for i in part[split]]
        held = {i for chosen in part.values() for i in chosen}
        return [example for i, example in enumerate(every) if i not in held]

    def _examples(self, root: Path, place: Path, split: str, drop_empty: bool) -> list[Utterance]:
        found = [*(self._recordings(place) if place.is_dir() else self._rows(root, place, split))]
        if not found:
            raise DataError(f"{place}: no examples; {self.layout}")
        for where, example in found:
            refuse_empty(example.target, where, drop_empty)
        ids = [example.id for _, example in found]
        if len(set(ids)) < len(ids):
            twice = next(id for id in ids if ids.count(id) > 1)
            raise DataError(f"{place}: the id {twice!r} stands twice")
        return [example if example.source else replace(example, target="") for _, example in found]

    def _rows(self, root: Path, path: Path, split: str) -> Iterator[tuple[str, Utterance]]:
        for line, row in rows(path):
            where = f"{path} line {line}"
            source, target = (self._text(row, column, where) for column in self.columns)
            if self.id and not isinstance(row.get(self.id), str | int):
                raise DataError(f"{where}: no {self.id!r}, the column that task.data.reader.id names")
            id = str(row[self.id]) if self.id else f"{split}_{line}"
            texts: dict[str, Any] = {"id": id, "source": source, "target": target}
            if self.audio is None:
                yield where, Utterance(**texts)
            else:
                yield where, Segment(**texts, **whole(root / self._text(row, self.audio, where), where))

    @staticmethod
    def _text(row: dict[str, Any], column: str, where: str) -> str:
        if not isinstance(row.get(column), str):
            found = f"is {row[column]!r:.40}" if column in row else f"is missing (found: {', '.join(map(str, row))})"
            raise DataError(
                f"{where}: the column {column!r} {found}; expected a text (task.data.reader.* names columns)"
            )
        return " ".join(row[column].split())

    @staticmethod
    def _recordings(folder: Path) -> Iterator[tuple[str, Utterance]]:
        for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in AUDIO):
            beside = path.with_suffix(".txt")
            if not beside.is_file():
                raise DataError(f"{beside} is missing: the text of {path.name}")
            text = " ".join(read_text(beside).split())
            id = path.relative_to(folder).with_suffix("").as_posix()
            yield str(beside), Segment(id=id, source=text, target=text, **whole(path, str(beside)))


def _header(path: Path) -> list[str] | None:
    """The columns of a table by its first row; None where that row is none: the reader then says what is wrong."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix in (".csv", ".tsv"):
                return next(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ","), None)
            row = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError, csv.Error):
        return None
    return [str(key) for key in row] if isinstance(row, dict) else None
