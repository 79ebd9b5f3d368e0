"""Text corpora in their published layouts: the files of each split, and their texts."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge
from omegaconf import DictConfig

from attnlab.config.build import instantiate
from attnlab.data.samples import markov
from attnlab.data.samples.markov import Source
from attnlab.data.table import SPELLINGS, SUFFIXES, TOGETHER, rows, tables
from attnlab.data.text.lines import find, read_lines
from attnlab.data.text.tokens import TokenFile, open_shard
from attnlab.errors import DataError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class TextCorpus(ABC):
    """A corpus of texts, each a line or a document.

    Attributes:
        name: the name of the corpus, for messages and records.
        held_out: how the validation and test splits were chosen.
    """

    name: str
    held_out = "the published splits"

    @abstractmethod
    def files(self, root: Path, split: Split) -> list[Path]:
        """The files of a split, in order.  Raises DataError where one is missing."""

    def check(self, root: Path) -> None:
        """Check that the files of all splits exist.  Raises DataError where one is missing."""
        if not root.is_dir():
            what = "is a file" if root.exists() else "no such directory"
            raise DataError(f"{root}: {what}; data_root names the directory of {self.name}")
        for split in SPLITS:
            self.files(root, split)

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


def check_layout(root: Path, data: DictConfig) -> None:
    """Check that the files of a text corpus exist.

    Args:
        root: of the corpus.
        data: the node `task.data`.

    Raises:
        DataError: one is missing.
    """
    corpus: TextCorpus = instantiate(data.corpus, path="task.data.corpus")
    corpus.check(root)


class PennTreebank(TextCorpus):
    """The Penn Treebank as Mikolov prepared it: ptb.{train,valid,test}.txt, a sentence per line, 10,000 words.

    Args:
        name: what records and messages call it.
    """

    def __init__(self, name: str = "Penn Treebank") -> None:
        self.name = name

    def files(self, root: Path, split: Split) -> list[Path]:
        stem = {"train": "train", "validation": "valid", "test": "test"}[split]
        folders = ("", "data/", "simple-examples/data/")
        names = [f"{folder}{prefix}{stem}.txt" for prefix in ("ptb.", "") for folder in folders]
        return [find(root, names, f"the {split} sentences of the Penn Treebank, Mikolov's files")]

    def write_sample(self, root: Path, source: Source) -> None:
        for split, stem in zip(SPLITS, ("train", "valid", "test"), strict=True):
            (root / f"ptb.{stem}.txt").write_text("".join(f" {line} \n" for line in source.lines(split)))


class WikiText(TextCorpus):
    """WikiText-2 or -103: wiki.{train,valid,test}.tokens, each line a paragraph, a heading or empty.

    Args:
        name: what records and messages call it.
    """

    def __init__(self, name: str = "WikiText-2") -> None:
        self.name = name

    def files(self, root: Path, split: Split) -> list[Path]:
        stem = {"train": "train", "validation": "valid", "test": "test"}[split]
        folders = ("", "wikitext-2/", "wikitext-103/")
        names = [f"{folder}{name}" for name in (f"wiki.{stem}.tokens", f"{stem}.txt") for folder in folders]
        return [find(root, names, f"the {split} part of {self.name}")]

    def write_sample(self, root: Path, source: Source) -> None:
        for split, stem in zip(SPLITS, ("train", "valid", "test"), strict=True):
            (root / f"wiki.{stem}.tokens").write_text("".join(f" {line} \n" for line in source.lines(split)))


class WikiTextRaw(TextCorpus):
    """WikiText-2 or -103 before words are split; each part is one text, as perplexities of models are published.

    Parts: wiki.{train,valid,test}.raw, or {train,validation,test}-*.parquet with the column text. Lines keep their line
    ends, those of white space alone are empty texts, and two line ends join them: so the rows of the data set of the
    Hugging Face hub are joined. A part is tokenized at once.

    Args:
        name: what records and messages call it.
    """

    def __init__(self, name: str = "WikiText-2 raw") -> None:
        self.name = name

    def files(self, root: Path, split: Split) -> list[Path]:
        stem = {"train": "train", "validation": "valid", "test": "test"}[split]
        folders = ("", "wikitext-2-raw-v1/", "wikitext-2-raw/", "wikitext-103-raw-v1/", "wikitext-103-raw/")
        parquet = sorted(path for folder in folders for path in (root / folder).glob(f"{split}-*.parquet"))
        if parquet:
            return parquet
        return [find(root, [f"{folder}wiki.{stem}.raw" for folder in folders], f"the {split} part of {self.name}")]

    def texts(self, root: Path, split: Split) -> Iterator[str]:
        files = self.files(root, split)
        if files[0].suffix == ".parquet":
            yield "\n\n".join(text for path in files for text in read_parquet(path, empty=True))
            return
        lines = [f"{line}\n" if line.strip() else "" for path in files for line in read_lines(path)]
        yield "\n\n".join(lines)

    def write_sample(self, root: Path, source: Source) -> None:
        for split, stem in zip(SPLITS, ("train", "valid", "test"), strict=True):
            (root / f"wiki.{stem}.raw").write_text("".join(f" {line} \n" for line in source.lines(split)))


class BillionWords(TextCorpus):
    """The one billion word benchmark: 99 training shards and 50 held-out shards, a sentence per line.

    Held-out shard 00000 is the test set, as usual, and the others are the validation set, so no checkpoint is chosen on
    the test set (the Tensorized Transformer's code validates and tests on all 50).

    Args:
        name: what records and messages call it.
    """

    held_out = "test: held-out shard 00000; validation: the other held-out shards"

    TRAIN = "training-monolingual.tokenized.shuffled"
    HELD = "heldout-monolingual.tokenized.shuffled"

    def __init__(self, name: str = "LM1B") -> None:
        self.name = name

    def files(self, root: Path, split: Split) -> list[Path]:
        folder, pattern, what = {
            "train": (self.TRAIN, "news.en-*-of-*", "training shards"),
            "validation": (self.HELD, "news.en.heldout-*-of-*", "held-out shards"),
            "test": (self.HELD, "news.en.heldout-*-of-*", "held-out shards"),
        }[split]
        found = sorted(path for base in (root, *root.glob("1-billion-word*")) for path in (base / folder).glob(pattern))
        if not found:
            raise DataError(
                f"{root / folder}/{pattern}: no such files ({what} of the one billion word benchmark); data_root "
                "names the directory that holds this one"
            )
        if split == "train":
            return found
        test = [path for path in found if "heldout-00000-of-" in path.name]
        others = [path for path in found if path not in test]
        chosen = test if split == "test" else others
        if not chosen:
            missing = "shard 00000" if split == "test" else "any shard but 00000"
            raise DataError(
                f"{found[0].parent}: {missing} is missing, the {split} set; {len(found)} held-out shards are here"
            )
        return chosen

    def write_sample(self, root: Path, source: Source) -> None:
        for name in (self.TRAIN, self.HELD):
            (root / name).mkdir()
        train = list(source.lines("train"))
        for i in range(3):
            part = train[i * len(train) // 3 : (i + 1) * len(train) // 3]
            path = root / self.TRAIN / f"news.en-{i + 1:05}-of-00100"
            path.write_text("".join(f"{line}\n" for line in part))
        for i, split in enumerate(("test", "validation")):
            path = root / self.HELD / f"news.en.heldout-{i:05}-of-00050"
            path.write_text("".join(f"{line}\n" for line in source.lines(split)))


class FineWebEdu(TextCorpus):
    """FineWeb-Edu: Parquet files with a column `text`, or the uint16 token shards that the T6 system makes of them.

    Parquet: the first `held_out_documents` documents of the first file are for validation, as many after them for the
    test.  Shards: *_val_*.bin (or val.bin) are held out; the first half of each is for validation, the second for the
    test, because the published system has no test set.

    Args:
        name: the name of the corpus.
        held_out_documents: the number of documents for validation, and again for the test; at least 1.

    Raises:
        ValueError: `held_out_documents` is less than 1.
    """

    def __init__(self, name: str = "FineWeb-Edu", held_out_documents: Annotated[int, Ge(1)] = 10_000) -> None:
        if held_out_documents < 1:
            raise ValueError(f"held_out_documents={held_out_documents}: expected at least 1")
        self.name, self.number = name, held_out_documents
        self.held_out = (
            "shards: each held-out shard's first half is for validation, its second for the test; Parquet: the first "
            f"{held_out_documents} documents for validation, the next {held_out_documents} for the test"
        )

    def files(self, root: Path, split: Split) -> list[Path]:
        shards = sorted(root.rglob("*.bin"))
        if shards:
            held = [path for path in shards if "_val_" in path.name or path.name == "val.bin"]
            chosen = [path for path in shards if path not in held] if split == "train" else held
            if not chosen:
                raise DataError(
                    f"{root}: no {'training' if split == 'train' else 'held-out'} shard among its .bin files; "
                    "expected fineweb_train_*.bin and fineweb_val_*.bin, or train.bin and val.bin"
                )
            return chosen
        found = sorted(root.rglob("*.parquet"))
        if not found:
            raise DataError(
                f"{root}: neither *.parquet nor *.bin here; expected Parquet files (sample/100BT/*.parquet) "
                "or token shards (fineweb_train_*.bin, fineweb_val_*.bin)"
            )
        return found if split == "train" else found[:1]

    def texts(self, root: Path, split: Split) -> Iterator[str]:
        first, last = {"validation": (0, self.number), "test": (self.number, 2 * self.number)}.get(
            split, (2 * self.number, None)
        )
        documents = (text for path in self.files(root, split) for text in read_parquet(path, empty=True))
        found = False
        for text in islice(documents, first, last):
            found = True
            yield text
        if not found:
            raise DataError(
                f"{root}: no document is left for {split}: 2 x {self.number} are held out; "
                "lower task.data.corpus.held_out_documents"
            )

    def shards(self, root: Path, split: Split, vocab_size: int) -> list[TokenFile]:
        files = self.files(root, split)
        if files[0].suffix != ".bin":
            return []
        opened = [open_shard(path, vocab_size) for path in files]
        return opened if split == "train" else [file.half(0 if split == "validation" else 1) for file in opened]

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


def read_parquet(path: Path, empty: bool = False) -> Iterator[str]:
    """The texts of the column `text`.  Raises DataError where the file is not Parquet or has no such column.

    Args:
        path: the file.
        empty: whether texts without a letter are kept.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise DataError(f"{path}: no column `text`; it has {', '.join(file.schema_arrow.names)}")
            kind = file.schema_arrow.field("text").type
            if str(kind) not in ("string", "large_string", "string_view"):
                raise DataError(f"{path}: the column `text` is of type {kind}; expected string")
            for batch in file.iter_batches(batch_size=256, columns=["text"]):
                yield from (text or "" for text in batch.column(0).to_pylist() if text or empty)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({' '.join(str(error).split())[:200]})") from error


def as_tokens(files: list[TokenFile]) -> TokenFile:
    """Several files as one, in memory; for the few held-out shards.

    Args:
        files: of token ids.
    """
    if len(files) == 1:
        return files[0]
    ids = np.concatenate([file.read(0, len(file)) for file in files])
    return TokenFile(files[0].path, ids, int(ids.max()) + 1)


class TextFiles(TextCorpus):
    """Text of one's own: {train,valid,test}.{txt,jsonl,json,csv,tsv}, a text per line or row; `dev`, `val` too.

    Args:
        column: the column of a table with the text.
        name: of the corpus, for records; null: that of the folder.
        hold_out: where there is no file for validation or test, every `hold_out`-th text of the training file is in the
            test split, and the one after it in validation.
    """

    def __init__(self, column: str = "text", name: str | None = None, hold_out: Annotated[int, Ge(3)] = 20) -> None:
        self.column, self.named, self.hold_out = column, name, hold_out
        self.name, self.held_out = name or "own text", f"own files, or every {hold_out}th text"

    def files(self, root: Path, split: Split) -> list[Path]:
        return [self._place(root, split)[0]]

    def _place(self, root: Path, split: Split) -> tuple[Path, bool]:
        """The file of a split, and whether it is that of the training texts."""
        self.name = self.named or root.name
        spellings = {"train": (*SPELLINGS["train"], *TOGETHER), "validation": SPELLINGS["dev"], "test": ("test",)}
        for name, shared in ((split, False), ("train", True)):
            found = tables(root, spellings[name], (".txt", *SUFFIXES))
            if len(found) > 1:
                raise DataError(f"data_root={root}: both {found[0].name} and {found[1].name}; keep one of them")
            if found:
                return found[0], shared
        raise DataError(
            f"{root / 'train.txt'}: no such file; data_root must hold train.txt, or train.jsonl, .csv or .tsv with the "
            f"column {self.column} (task.data.corpus.column names it), and valid and test where they are not held out"
        )

    def texts(self, root: Path, split: Split) -> Iterator[str]:
        path, shared = self._place(root, split)
        missing = [name for name in ("test", "validation") if self._place(root, name)[1]]
        for i, text in enumerate(self._read(path)):
            place = i % self.hold_out
            held = missing[place] if place < len(missing) else "train"
            if held == split or not (shared or split == "train"):
                yield text

    def _read(self, path: Path) -> Iterator[str]:
        if path.suffix == ".txt":
            yield from read_lines(path)
            return
        for line, row in rows(path):
            if not isinstance(row.get(self.column), str):
                raise DataError(f"{path} line {line}: no text in the column {self.column!r} (found: {', '.join(row)})")
            yield " ".join(row[self.column].split())

    def write_sample(self, root: Path, source: Source) -> None:
        raise DataError("own text has no sample corpus: set data_root")
