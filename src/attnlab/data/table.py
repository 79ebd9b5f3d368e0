"""User data: a table of examples as JSON lines, CSV or TSV, whose columns can be named, and a folder of recordings.

<root>/{train,dev,test}.{jsonl,json,csv,tsv}     one example each; SPLITS has other names of dev
<root>/NAME.{jsonl,json,csv,tsv}                 one table: every `hold_out`-th example is tested, the next ones are dev
<root>/{train,dev,test}/**/NAME.{wav,flac,mp3}   recordings with their texts beside them, NAME.txt; see AUDIO
<root>/**/NAME.{wav,flac,mp3}                    the same, without splits

A row of a recording may name a part of it, in seconds: offset and duration, or start and end.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, MinLen

from attnlab.data.corpus import (
    AUDIO,
    Kind,
    Reader,
    Row,
    Segment,
    Utterance,
    by_split,
    entries,
    files_below,
    held_out,
    is_data,
    only,
    part_of_recording,
    read_text,
    recording,
    refuse_empty,
    repeated,
    rows,
    squeeze,
)
from attnlab.data.report import left_out
from attnlab.errors import DataError

TOGETHER = ("data", "manifest", "metadata")  # names of a table that is preferred to others
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
Name = Annotated[str, MinLen(1)]


def tables_of(root: Path, suffixes: Sequence[str] = SUFFIXES) -> tuple[dict[str, Path], list[Path]]:
    """The table of each split, "all" for one of TOGETHER, and the other tables.  DataError: two are of one split."""
    tables = [path for path in entries(root) if path.suffix.lower() in suffixes and path.is_file()]
    together = only([path for path in tables if path.stem.lower() in TOGETHER])
    places = by_split(tables, words=together is None)
    if "train" not in places and together:
        places["all"] = together
    return places, [path for path in tables if path not in places.values()]


def report_unread(root: Path, read: Collection[Path], tables: Collection[Path] = ()) -> None:
    """Report what `root` holds and no split reads, each file of a folder too.

    Recordings count where folders are read, because the rows of a table name others.
    """
    folders = any(place.is_dir() for place in read)
    for path in sorted(root.iterdir()):
        if not is_data(path.name):
            left_out("hidden file or folder", str(path))
        elif path in read:
            continue
        elif path.is_dir():
            files = [file for file in files_below(path) if folders or file.suffix.lower() not in AUDIO]
            left_out(f"file in the folder {path.name}, which no split reads", str(next(iter(files), "")), len(files))
        elif folders or path.suffix.lower() not in AUDIO:
            left_out(f"{'table' if path in tables else 'file'} that no split reads", str(path))


def texts_of(folder: Path) -> dict[Path, Path]:
    """The text files of a folder and those below it, by their path without suffix, which is in any case."""
    return {path.with_suffix(""): path for path in files_below(folder, [".txt"])}


class Table(Reader):
    """Examples of the user: texts, or recordings with texts.

    Args:
        source: the column with the input text; of recordings, with their transcript.
        target: the column with the text to be written; of recognition, the same as `source`.
        audio: the column with the path of a recording, from `data_root` on; null: the input is a text.
        id: the column with a unique name; null: the line's number.
        name: of the corpus; null: that of the folder.
        hold_out: without files for dev and test, every `hold_out`-th example is in test, the one after it in dev.
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
        self.named, self.name = name, name or "data"
        names = [*self.columns, *([audio] if audio else [])]
        self.layout = "data_root must hold train, dev and test, or one table, as .jsonl, .csv or .tsv with the columns "
        self.layout += ", ".join(dict.fromkeys(names))
        if audio:
            self.layout += "; or folders of recordings (.wav, .flac, .mp3 ...), each with a .txt file of the same name"

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self.name = self.named or root.name
        columns = dict(zip(("source", "target", "audio"), (*self.columns, self.audio), strict=True))
        places, others = self._places(root)
        for path in places.values():
            every = rows(path) if path.is_file() else iter(())
            row = next(every, None)
            for key, column in columns.items():
                if row and column and column not in row.values and not any(column in x.values for x in every):
                    missing = f"the column {column!r} is missing (found: {', '.join(row.values)})"
                    raise DataError(f"{path}: {missing}; task.data.reader.{key} names it")
        if split == self.splits[0]:
            folders = [path for path in places.values() if path.is_dir()]
            if root not in folders:
                report_unread(root, places.values(), others)
            for folder in folders:
                self._check_recordings(folder)

    def _places(self, root: Path) -> tuple[dict[str, Path], list[Path]]:
        """The table or folder of each split, or of "all", and other tables.  DataError: none, or two of a split."""
        places, others = tables_of(root)
        if not places and self.audio:
            places = by_split(path for path in entries(root) if path.is_dir())
            first = next(rows(others[0]), None) if len(others) == 1 else None
            if not places and not (first and self.audio in first.values):
                places["all"] = root
        if not places.keys() & {"train", "all"}:
            if len(others) != 1:
                self.missing(root / "train.jsonl")
            places["all"] = others.pop()
        return places, others

    def _check_recordings(self, folder: Path) -> None:
        """Report what a folder of recordings holds beside them.  DataError: there are none, or one has no text."""
        recordings = files_below(folder, AUDIO, "recording", beside=".txt")
        if not recordings:
            raise DataError(f"{folder}: no examples; {self.layout}")
        texts = texts_of(folder)
        if silent := [path for path in recordings if path.with_suffix("") not in texts]:
            raise DataError(f"{silent[0].with_suffix('.txt')} is missing: the text of {silent[0].name}")
        if alone := sorted(texts.keys() - {path.with_suffix("") for path in recordings}):
            left_out("text without a recording", str(texts[alone[0]]), len(alone))

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        self.name = self.named or root.name
        places, _ = self._places(root)
        place = places.get(split) or places.get("train") or places["all"]
        missing = [] if split in places and split != "train" else [x for x in ("test", "dev") if x not in places]
        prefix = split if split in places else "train" if "train" in places else "all"
        ids: list[str] = []

        def every() -> Iterator[tuple[str, Path | Row]]:
            for item in files_below(place, AUDIO) if place.is_dir() else rows(place):
                ids.append(self._id(place, item, prefix))
                yield ids[-1], item

        chosen = list(held_out(every(), split, missing, self.hold_out))
        if not ids:
            raise DataError(f"{place}: no examples; {self.layout}")
        if (id := repeated(ids)) is not None:
            raise DataError(f"{place}: the id {id!r} occurs twice")
        if not chosen:
            raise DataError(f"{place}: {len(ids)} examples are too few to hold some out for {split}")
        texts = texts_of(place) if place.is_dir() else {}
        examples = [
            self._example(root, id, x) if isinstance(x, Row) else self._recording(id, x, texts) for id, x in chosen
        ]
        refuse_empty((where for where, example in examples if not (example.source and example.target)), drop_empty)
        return [example if example.source else replace(example, target="") for _, example in examples]

    def _id(self, place: Path, item: Path | Row, prefix: str) -> str:
        if isinstance(item, Path):
            return item.relative_to(place).with_suffix("").as_posix()
        return str(item.value(self.id, str, int)) if self.id else f"{prefix}_{item.number}"

    def _example(self, root: Path, id: str, row: Row) -> tuple[str, Utterance]:
        source, target = (row.text(column, optional=True) for column in self.columns)
        if self.audio is None:
            return row.where, Utterance(id=id, source=source, target=target)
        audio = root / row.value(self.audio, str).strip()
        part = part_of_recording(row, audio, (*self.columns, self.audio, self.id))
        return row.where, Segment(id=id, source=source, target=target, **part)

    @staticmethod
    def _recording(id: str, path: Path, texts: Mapping[Path, Path]) -> tuple[str, Utterance]:
        transcript = texts.get(path.with_suffix(""), path.with_suffix(".txt"))
        text = squeeze(read_text(transcript))
        return str(transcript), Segment(id=id, source=text, target=text, **recording(path, str(transcript)))
