"""User data: a table of examples as JSON lines, CSV or TSV, whose columns can be named, and a folder of recordings.

<root>/{train,dev,test}.{jsonl,json,csv,tsv}     one example each; `valid`, `val` and `validation` mean dev
<root>/NAME.{jsonl,json,csv,tsv}                 one table: every `hold_out`-th example is tested, the next ones are dev
<root>/{train,dev,test}/**/NAME.{wav,flac,ogg}   recordings with their texts beside them, NAME.txt
<root>/**/NAME.{wav,flac,ogg}                    the same, without splits
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, MinLen

from attnlab.data.corpus import (
    Kind,
    Reader,
    Row,
    Segment,
    Utterance,
    held_out,
    only,
    read_text,
    recording,
    refuse_empty,
    repeated,
    rows,
    squeeze,
)
from attnlab.errors import DataError

SPELLINGS = {"train": ("train", "training"), "dev": ("dev", "valid", "val", "validation"), "test": ("test",)}
TOGETHER = ("data", "manifest", "metadata")  # names of a table that is preferred to others
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
AUDIO = (".wav", ".flac", ".ogg")
Name = Annotated[str, MinLen(1)]


def table_in(root: Path, spellings: Iterable[str], suffixes: Sequence[str] = SUFFIXES) -> Path | None:
    """The file of `root` with one of these names, if it exists.  DataError: two exist."""
    return only([path for name in spellings for suffix in suffixes if (path := root / f"{name}{suffix}").is_file()])


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
            self.layout += "; or folders of .wav or .flac files, each with a .txt file of the same name"

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self.name = self.named or root.name
        columns = dict(zip(("source", "target", "audio"), (*self.columns, self.audio), strict=True))
        for path in self._places(root).values():
            if path.is_dir() and not any(file.suffix.lower() in AUDIO for file in path.rglob("*")):
                raise DataError(f"{path}: no examples; {self.layout}")
            every = rows(path) if path.is_file() else iter(())
            row = next(every, None)
            for key, column in columns.items():
                if row and column and column not in row.values and not any(column in x.values for x in every):
                    missing = f"the column {column!r} is missing (found: {', '.join(row.values)})"
                    raise DataError(f"{path}: {missing}; task.data.reader.{key} names it")

    def _places(self, root: Path) -> dict[str, Path]:
        """The table or folder of each split, or of "all".  DataError: none exists, or two of one name."""
        spellings = SPELLINGS | {"all": TOGETHER}
        places = {split: path for split, names in spellings.items() if (path := table_in(root, names))}
        if not places and self.audio:
            folders = {split: [root / name for name in names] for split, names in SPELLINGS.items()}
            chosen = {split: only([path for path in paths if path.is_dir()]) for split, paths in folders.items()}
            places = {split: path for split, path in chosen.items() if path} or {"all": root}
        if "train" in places:
            places.pop("all", None)
        elif "all" not in places:
            tables = [path for path in {*root.glob("*")} - {*places.values()} if path.suffix in SUFFIXES]
            if len(tables) != 1:
                self.missing(root / "train.jsonl")
            places["all"] = tables[0]
        return places

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        self.name = self.named or root.name
        places = self._places(root)
        if split in places and split != "train":
            return self._examples(root, places[split], split, drop_empty)
        first = "train" if "train" in places else "all"
        missing = [name for name in ("test", "dev") if name not in places]
        every = self._examples(root, places[first], first, drop_empty)
        examples = list(held_out(every, split, missing, self.hold_out))
        if not examples:
            raise DataError(f"{places[first]}: {len(every)} examples are too few to hold some out for {split}")
        return examples

    def _examples(self, root: Path, place: Path, split: str, drop_empty: bool) -> list[Utterance]:
        if place.is_dir():
            examples = [*self._recordings(place)]
        else:
            examples = [(row.where, self._example(root, row, split)) for row in rows(place)]
        if not examples:
            raise DataError(f"{place}: no examples; {self.layout}")
        refuse_empty((where for where, example in examples if not (example.source and example.target)), drop_empty)
        if (id := repeated(example.id for _, example in examples)) is not None:
            raise DataError(f"{place}: the id {id!r} occurs twice")
        return [example if example.source else replace(example, target="") for _, example in examples]

    def _example(self, root: Path, row: Row, split: str) -> Utterance:
        source, target = (row.text(column, optional=True) for column in self.columns)
        id = str(row.value(self.id, str, int)) if self.id else f"{split}_{row.number}"
        if self.audio is None:
            return Utterance(id=id, source=source, target=target)
        return Segment(id=id, source=source, target=target, **recording(root / row.text(self.audio), row.where))

    @staticmethod
    def _recordings(folder: Path) -> Iterator[tuple[str, Utterance]]:
        for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in AUDIO):
            transcript = path.with_suffix(".txt")
            if not transcript.is_file():
                raise DataError(f"{transcript} is missing: the text of {path.name}")
            text = squeeze(read_text(transcript))
            id = path.relative_to(folder).with_suffix("").as_posix()
            yield str(transcript), Segment(id=id, source=text, target=text, **recording(path, str(transcript)))
