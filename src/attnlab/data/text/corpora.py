"""Text corpora in their published layouts: the files of each split, and their texts."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge
from omegaconf import DictConfig

from attnlab.config.build import instantiate
from attnlab.data.corpus import (
    check_folder,
    files_below,
    first_of,
    held_out,
    only,
    read_lines,
    read_parquet,
    rows,
    split_of,
)
from attnlab.data.report import FILES, Report, noted
from attnlab.data.samples import markov, write_lines
from attnlab.data.samples.markov import Source
from attnlab.data.table import SUFFIXES, report_unread, tables_of
from attnlab.data.text.tokens import TokenFile, open_shard
from attnlab.errors import DataError
from attnlab.run.record import PUBLISHED

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
STEMS = {"train": "train", "validation": "valid", "test": "test"}  # in the names of published files
LONG_LINE = 1000  # characters, beyond which a running text is divided after a word
SHARDS = "fineweb_train_*.bin and fineweb_val_*.bin, or train.bin and val.bin"


class TextCorpus(ABC):
    """A corpus of texts, each a line or a document; `held_out`: how the validation and test splits were chosen."""

    name: str
    held_out = PUBLISHED

    @abstractmethod
    def files(self, root: Path, split: Split) -> list[Path]:
        """The files of a split, in order.  Raises DataError where one is missing."""

    def check(self, root: Path) -> None:
        """Check that the files of all splits exist, and report the others.  Raises DataError where one is missing."""
        check_folder(root, f"data_root names the directory of {self.name}")
        self.unread(root, {path for split in SPLITS for path in self.files(root, split)})

    def unread(self, root: Path, files: Collection[Path]) -> None:
        """Report what no split reads, in the root and the folders of `files`, which are read."""
        read = {*files, *(folder for path in files for folder in path.parents)}
        for folder in sorted({root, *(path.parent for path in files)}):
            report_unread(folder, read, ())

    @abstractmethod
    def write_sample(self, root: Path, source: Source) -> None:
        """Write the sample corpus in this layout under `root`."""

    def texts(self, root: Path, split: Split) -> Iterator[str]:
        """Every text of a split, in order; by default every line of its files."""
        for path in self.files(root, split):
            yield from read_lines(path)

    def shards(self, root: Path, split: Split, vocab_size: int) -> list[TokenFile]:
        """The files of a split that hold token ids; empty where the corpus has texts."""
        return []

    def layout(self, root: Path) -> list[Any]:
        """What the texts of a split depend on beside the contents of its files: settings, and the files of all splits.

        Plain values, for the keys of what is stored.
        """
        files = [[path.relative_to(root).as_posix() for path in self.files(root, split)] for split in SPLITS]
        settings = {key: value for key, value in vars(self).items() if key != "name"}
        return [type(self).__name__, settings, files]


def check_layout(root: Path, data: DictConfig) -> None:
    """Check that the files of a text corpus exist.  `data` is the node `task.data`."""
    corpus: TextCorpus = instantiate(data.corpus, path="task.data.corpus")
    with Report().of(FILES):  # the run reports them when it reads them
        corpus.check(root)


class SplitFiles(TextCorpus):
    """A file for each split, with a text on each line.

    Attributes:
        folders: where the files may be below the root.
        names: of a file, where `{}` is the split; the first is that of the sample corpus.
    """

    folders: ClassVar[tuple[str, ...]]
    names: ClassVar[tuple[str, ...]]

    def files(self, root: Path, split: Split) -> list[Path]:
        names = [f"{folder}{name.format(STEMS[split])}" for name in self.names for folder in self.folders]
        own = "; experiment=own/text reads other text files" if [*root.glob("*.txt")] else ""
        return [first_of(root, names, f"the {split} part of {self.name}{own}")]

    def write_sample(self, root: Path, source: Source) -> None:
        for split, stem in STEMS.items():
            write_lines(root / self.names[0].format(stem), (f" {line} " for line in source.lines(split)))


@dataclass(eq=False)
class PennTreebank(SplitFiles):
    """The Penn Treebank as Mikolov prepared it: ptb.{train,valid,test}.txt, a sentence per line, 10,000 words."""

    folders = ("", "data/", "simple-examples/data/")
    names = ("ptb.{}.txt", "{}.txt")

    name: str = "Penn Treebank"


@dataclass(eq=False)
class WikiText(SplitFiles):
    """WikiText-2 or -103: wiki.{train,valid,test}.tokens, each line a paragraph, a heading or empty."""

    folders = ("", "wikitext-2/", "wikitext-103/")
    names = ("wiki.{}.tokens", "{}.txt")

    name: str = "WikiText-2"


@dataclass(eq=False)
class WikiTextRaw(SplitFiles):
    """WikiText-2 or -103 with its rare words; each part is one text, as perplexities of models are published.

    Parts: wiki.{train,valid,test}.raw, or {train,validation,test}-*.parquet with the column text. Lines keep their line
    ends, those of white space alone are empty, and two line ends join them, as the rows of the Hugging Face hub's set.
    Without these the files of :class:`WikiText` are read in the same way, in which rare words are <unk>.
    """

    folders = (
        *("", "wikitext-2-raw-v1/", "wikitext-2-raw/", "wikitext-103-raw-v1/", "wikitext-103-raw/"),
        *WikiText.folders[1:],
    )
    names = ("wiki.{}.raw", *WikiText.names)

    name: str = "WikiText-2 raw"

    def files(self, root: Path, split: Split) -> list[Path]:
        parquet = sorted(path for folder in self.folders for path in (root / folder).glob(f"{split}-*.parquet"))
        raw = [root / folder / f"wiki.{STEMS[split]}.raw" for folder in self.folders]
        if parquet and (both := [path for path in raw if path.is_file()]):
            only([*both, *parquet])
        return parquet or super().files(root, split)

    def texts(self, root: Path, split: Split) -> Iterator[str]:
        files = self.files(root, split)
        if files[0].suffix == ".parquet":
            yield "\n\n".join(text for path in files for text in parquet_texts(path))
        else:
            yield "\n\n".join(f"{line}\n" if line.strip() else "" for path in files for line in read_lines(path))


@dataclass(eq=False)
class BillionWords(TextCorpus):
    """The one billion word benchmark: 99 training shards and 50 held-out shards, a sentence per line.

    Held-out shard 00000 is the test set, the others the validation set (the Tensorized Transformer's code validates
    and tests on all 50).
    """

    held_out = "test: held-out shard 00000; validation: the other held-out shards"

    TRAIN = "training-monolingual.tokenized.shuffled"
    HELD = "heldout-monolingual.tokenized.shuffled"

    name: str = "LM1B"

    def files(self, root: Path, split: Split) -> list[Path]:
        folder, pattern = (self.TRAIN, "news.en-*") if split == "train" else (self.HELD, "news.en.heldout-*")
        bases = (root, *root.glob("1-billion-word*"))
        files = sorted(path for base in bases for path in (base / folder).glob(f"{pattern}-of-[0-9]*[0-9]"))
        if split != "train":
            files = [path for path in files if ("heldout-00000-of-" in path.name) == (split == "test")]
        if not files:
            raise DataError(f"{root / folder}/{pattern}: no {split} shards of the one billion word benchmark")
        return files

    def write_sample(self, root: Path, source: Source) -> None:
        train = list(source.lines("train"))
        for i in range(3):
            part = train[i * len(train) // 3 : (i + 1) * len(train) // 3]
            write_lines(root / self.TRAIN / f"news.en-{i + 1:05}-of-00100", part)
        for i, split in enumerate(("test", "validation")):
            write_lines(root / self.HELD / f"news.en.heldout-{i:05}-of-00050", source.lines(split))


class FineWebEdu(TextCorpus):
    """FineWeb-Edu: Parquet files with a column `text`, or the uint16 token shards that the T6 system makes of them.

    Files are of the split that their names, or the names of their folders below the root, have as a word.  Parquet: of
    splits without files the first `held_out_documents` documents of the first training file are for validation, as
    many after them for the test.  Shards: *_val_*.bin (or val.bin) are held out; the first half of each is for
    validation, the second for the test, because the published system has no test set.
    """

    def __init__(self, name: str = "FineWeb-Edu", held_out_documents: Annotated[int, Ge(1)] = 10_000) -> None:
        self.name, self.number = name, held_out_documents
        self.held_out = (
            "shards: each held-out shard's first half is for validation, its second for the test; Parquet: the first "
            f"{held_out_documents} documents for validation, the next {held_out_documents} for the test"
        )

    def files(self, root: Path, split: Split) -> list[Path]:
        parts = self._parts(root)
        others = parts["train"]
        others = others[:1] if others and others[0].suffix == ".parquet" else parts["validation"] or parts["test"]
        chosen = parts[split] or (others if split != "train" else [])
        if not chosen:
            raise DataError(f"{root}: no files for {split}; expected sample/100BT/*.parquet, or {SHARDS}")
        return chosen

    def _parts(self, root: Path) -> dict[Split, list[Path]]:
        """The files whose names have a split, and all others for training."""
        parts: dict[Split, list[Path]] = {split: [] for split in SPLITS}
        names: dict[str | None, Split] = {"dev": "validation", "test": "test"}
        for path in files_below(root, [".bin"]) or files_below(root, [".parquet"]):
            parts[names.get(split_of(path.relative_to(root).with_suffix("").as_posix()), "train")].append(path)
        return parts

    def texts(self, root: Path, split: Split) -> Iterator[str]:
        parts = self._parts(root)
        missing = [name for name in SPLITS[1:] if not parts[name]]  # the documents of each begin the training files
        first, last = len(missing) * self.number, None
        if split in missing:
            first = missing.index(split) * self.number
            last = first + self.number
        elif split != "train":
            first = 0
        text = None
        for text in islice((text for path in self.files(root, split) for text in parquet_texts(path)), first, last):
            yield text
        if text is None:
            lower = f"{len(missing)} x {self.number} are held out; lower task.data.corpus.held_out_documents"
            raise DataError(f"{root}: no document is left for {split}: {lower}")

    def shards(self, root: Path, split: Split, vocab_size: int) -> list[TokenFile]:
        files = self.files(root, split)
        if files[0].suffix != ".bin":
            return []
        opened = [open_shard(path, vocab_size) for path in files]
        parts = self._parts(root)
        if split == "train" or (parts["validation"] and parts["test"]):
            return opened
        return [file.half(0 if split == "validation" else 1) for file in opened]

    def write_sample(self, root: Path, source: Source) -> None:
        import pyarrow
        from pyarrow import parquet

        documents: list[str] = []
        for split in ("validation", "test", "train"):
            number = self.number if split != "train" else None
            lines = list(source.lines(split, max(markov.LINES[split], number) if number else None))
            ends = np.linspace(0, len(lines), 1 + (number or len(lines) // 16), dtype=int)
            documents += ["\n".join(lines[a:b]) for a, b in pairwise(ends)]
        parquet.write_table(pyarrow.table({"text": documents}), root / "000_00000.parquet")


def parquet_texts(path: Path) -> Iterator[str]:
    """The texts of the column `text`; a null is an empty text."""
    for values in read_parquet(path, ["text"]):
        text = values["text"]
        if text is None:
            noted("null, read as an empty text", str(path))
            text = ""
        if not isinstance(text, str):
            raise DataError(f"{path}: the column `text` holds {type(text).__name__}; expected str")
        yield text


class TextFiles(TextCorpus):
    """Text of any kind: {train,valid,test}.{txt,jsonl,json,csv,tsv}; see SPLITS.

    Without a file of these names, every .txt file of the folder, or its one table, is read in the order of the names.
    A row of a table is a document, and `documents` says what a document of .txt files is. An end mark stands between
    documents. Without a file for validation or test, these take the last parts of running text, in this order, each
    1 / `hold_out` of its characters. Of rows and of lines as documents the test takes every `hold_out`-th, and
    validation the one after it.

    Args:
        column: the column of a table with the text.
        name: of the corpus; null: that of the folder.
        hold_out: one over the share of the text that validation and test take.
        documents: "lines": each line; "blank": running text, which empty lines divide; "file": running text, each file
            one document, which a split may divide after a line.
    """

    def __init__(
        self,
        column: str = "text",
        name: str | None = None,
        hold_out: Annotated[int, Ge(3)] = 20,
        documents: Literal["lines", "blank", "file"] = "lines",
    ) -> None:
        self.column, self.named, self.hold_out, self.documents = column, name, hold_out, documents
        self.name, self.held_out = name or "own text", ""  # known with the files

    def unread(self, root: Path, files: Collection[Path]) -> None:
        places, others = self._places(root)
        report_unread(root, [*places.values(), *files], others)

    def files(self, root: Path, split: Split) -> list[Path]:
        places, tables = self._places(root)
        if path := places.get(split) or places.get("train"):
            return [path]
        texts = [path for path in tables if path.suffix.lower() == ".txt"]
        if not texts and len(tables) != 1:
            table = f"one .jsonl, .csv or .tsv with the column {self.column} (task.data.corpus.column names it)"
            raise DataError(f"{root}: no text file; data_root must hold .txt files, or {table}")
        return texts or tables

    def _places(self, root: Path) -> tuple[dict[str, Path], list[Path]]:
        """The file of each split that has one, and the other files."""
        self.name = self.named or root.name
        places, others = tables_of(root, (".txt", *SUFFIXES))
        names = {"dev": "validation", "all": "train"}
        places = {names.get(split, split): path for split, path in places.items()}
        running = self._is_running([places["train"]] if "train" in places else others)
        share = f"the last {100 / self.hold_out:g} % of the text, and as much before it for validation"
        taken = share if running else f"every {self.hold_out}th text"
        what = {"lines": "each line", "blank": "a part between empty lines", "file": "each file"}[self.documents]
        text = any(path.suffix.lower() == ".txt" for path in (*places.values(), *others))
        self.held_out = f"own files, or {taken}" + f"; a document is {what}, task.data.corpus.documents" * text
        return places, others

    def _is_running(self, files: Collection[Path]) -> bool:
        return self.documents != "lines" and any(path.suffix.lower() == ".txt" for path in files)

    def texts(self, root: Path, split: Split) -> Iterator[str]:
        (places, _), files = self._places(root), self.files(root, split)
        texts = chain.from_iterable(map(self._texts_of, files))
        if split != "train" and split in places:
            return texts
        missing: list[Split] = ["test", "validation"]
        missing = [name for name in missing if name not in places]
        if self._is_running(files):
            return last_parts(list(texts), split, missing, self.hold_out, divided=self.documents == "file")
        return held_out(texts, split, missing, self.hold_out)

    def _texts_of(self, file: Path) -> Iterator[str]:
        if file.suffix.lower() != ".txt":
            yield from (row.text(self.column) for row in rows(file))
        elif self.documents == "lines":
            yield from read_lines(file)
        elif self.documents == "file":
            yield "\n".join(read_lines(file))
        else:
            for filled, lines in groupby(read_lines(file), lambda line: bool(line.strip())):
                if filled:
                    yield "\n".join(lines)

    def write_sample(self, root: Path, source: Source) -> None:
        raise DataError("text files have no sample corpus: set data_root")


def last_parts(
    texts: Sequence[str], split: Split, missing: Sequence[Split], every: int, divided: bool
) -> Iterator[str]:
    """The part of running text that is of `split`: each of `missing` takes 1 / `every` of the characters at the end.

    Args:
        missing: the splits without files, the last part first.
        divided: whether a text may be in two splits; else it is in the split of its middle.

    Raises:
        DataError: nothing is left for the split.
    """
    total, place = sum(map(len, texts)), missing.index(split) if split in missing else len(missing)
    begin, end = (total * (every - n) // every for n in (place + 1, place))
    begin = begin if split in missing else 0
    position = left = 0
    for text in texts:
        if divided:
            part = text[line_end(text, begin - position) : line_end(text, end - position)]
        else:
            part = text if begin <= position + len(text) // 2 < end else ""
        position += len(text)
        left += len(part)
        if part:
            yield part
    if not left:
        advice = "" if divided else "; task.data.corpus.documents=file divides a document between splits"
        raise DataError(f"{len(texts)} documents leave no text for {split}, 1/{every} of the characters{advice}")


def line_end(text: str, place: int) -> int:
    """The end of the last line before a place, of the last word where the line is long, or the place itself."""
    if not 0 < place < len(text):
        return min(max(0, place), len(text))
    near = max(0, place - LONG_LINE)
    return text.rfind("\n", near, place) + 1 or text.rfind(" ", near, place) + 1 or place
