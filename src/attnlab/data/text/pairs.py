"""Readers of pairs of texts: sentences with their translations, documents with their summaries.

Parallel text: two files with one sentence per line, or two SGML files with numbered segments; see LAYOUTS.

XSum: (a) <root>/bbc-summary-data/<id>.summary    sections [SN]URL[SN], TITLE, FIRST-SENTENCE, RESTBODY
          <root>/XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json     {"train": [ids], "validation": ..., "test": ...}
      (b) <root>/{train,validation,test}.json     records with document and summary (Hugging Face's fields)
      (c) <root>/{train,validation,test}.{source,target}     one per line; also [.raw].source, .document/.summary

SciTLDR: <root>/{train,dev,test}.jsonl            source, a list of sentences; target, a list of summaries
"""

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from attnlab.data.corpus import (
    SPLITS,
    Kind,
    Reader,
    Row,
    Utterance,
    by_split,
    contents,
    entries,
    held_out,
    only,
    read_lines,
    read_text,
    reading,
    refuse_empty,
    rows,
    squeeze,
    trimmed,
)
from attnlab.data.report import apart, left_out, noted, restore
from attnlab.data.samples.written import write_articles, write_translations
from attnlab.data.table import report_unread
from attnlab.errors import DataError

_SEGMENT = re.compile(
    r"<doc\b(?P<doc>[^>]*)>|<seg\b(?P<seg>[^>]*?)(?:/>|>(?P<text>.*?)</seg>)", re.DOTALL | re.IGNORECASE
)
_ID = re.compile(r"""\b(?:doc)?id\s*=\s*("[^"]*"|'[^']*'|[^\s"'>]+)""", re.IGNORECASE)


@dataclass(frozen=True)
class Files:
    """The files of a layout: names relative to the root, with `{lang}`, `{side}` (src, ref) and so on to be filled in.

    Attributes:
        dev, test: the held-out files; empty: held out of the training files.
        subwords: whether words are split into pieces; every piece but the last of a word ends in `@@`.
    """

    train: tuple[str, ...]
    dev: str = ""
    test: str = ""
    subwords: bool = False


LAYOUTS = {
    "wmt16-google": Files(
        ("train.tok.clean.bpe.32000.{lang}",),
        "newstest2013.tok.bpe.32000.{lang}",
        "newstest2014.tok.bpe.32000.{lang}",
        subwords=True,
    ),
    "wmt": Files(
        (
            "training/europarl-v7.{pair}.{lang}",
            "training/commoncrawl.{pair}.{lang}",
            "training/news-commentary-v11.{pair}.{lang}",
        ),
        "dev/newstest2013.{lang}",
        "test-full/newstest2014-deen-{side}.{lang}.sgm",
    ),
    "opennmt": Files(("{from}-train.txt",), "{from}-val.txt"),
    "plain": Files(("train.{lang}",), "dev.{lang}", "test.{lang}"),
    "multi30k": Files(("train.{lang}",), "val.{lang}", "test_2016_flickr.{lang}"),
}


class Parallel(Reader):
    """Sentence pairs: line i of the source file and line i of the target file.

    Typographic apostrophes become plain ones.  In a layout with `subwords` the pieces of a word are joined; in other
    layouts `@@` is text.

    Args:
        layout: one of LAYOUTS, or "auto": the first one whose files all exist.
        unescape: replace HTML entities by their characters.
        hold_out: for a split without files, every `hold_out`-th pair is taken out of the training pairs; at least 3.
    """

    unit = "pairs"
    kinds = ("text",)

    def __init__(
        self,
        source_language: str = "en",
        target_language: str = "de",
        layout: Literal["auto", "wmt16-google", "wmt", "opennmt", "plain", "multi30k"] = "auto",
        unescape: bool = False,
        hold_out: Annotated[int, Ge(3)] = 100,
    ) -> None:
        self.languages, self.chosen = (source_language, target_language), layout
        self.language = target_language
        self.unescape, self.hold_out = unescape, hold_out
        self.name = f"{source_language}-{target_language} text"
        names = ", ".join(self._fill(files.train[0], 0) for files in LAYOUTS.values())
        self.layout = f"data_root must hold one of the layouts {', '.join(LAYOUTS)} (training files: {names}); "
        self.layout += "task.data.reader.source_language and target_language name other languages"

    def _fill(self, name: str, side: int) -> str:
        source, target = self.languages
        words = {"lang": self.languages[side], "pair": f"{target}-{source}", "side": ("src", "ref")[side]}
        return name.format(**words, **{"from": ("src", "tgt")[side]})

    def files(self, root: Path) -> Files:
        """The layout of `root`.  Raises DataError where no layout fits, or two pairs of files are of one split."""
        pairs = self._pairs_of_files(root)
        splits = by_split(pairs) if self.chosen == "auto" else {}  # two of one name are an error in any layout
        for name, files in LAYOUTS.items():
            if self.chosen == name or (self.chosen == "auto" and all(p.is_file() for p in self._all(root, files))):
                return files
        if len(splits) == len(self.splits):
            return self._named(root, pairs)
        nearest = max(LAYOUTS.values(), key=lambda files: sum(path.exists() for path in self._all(root, files)))
        paths = list(self._all(root, nearest))
        if any(path.exists() for path in paths):
            self.missing(min((path for path in paths if not path.is_file()), key=lambda path: not path.exists()))
        if pairs and self.chosen == "auto":
            return self._named(root, pairs)
        raise DataError(f"data_root={root}: unknown layout (found {contents(root)}); {self.layout}")

    def _pairs_of_files(self, root: Path) -> list[Path]:
        """The source files of all pairs in `root`."""
        source, target = self.languages
        return [x for x in entries(root) if x.suffix == f".{source}" and x.with_suffix(f".{target}").is_file()]

    def _named(self, root: Path, pairs: Sequence[Path]) -> Files:
        """The layout of files of any names, of which some may be those of splits."""
        self.name, splits = root.name, by_split(pairs, words=True)
        others = [path for path in pairs if path not in splits.values()]
        if not (train := [splits["train"]] if "train" in splits else others):
            self.missing(root / self._fill("train.{lang}", 0))
        dev, test = (f"{splits[name].stem}.{{lang}}" if name in splits else "" for name in ("dev", "test"))
        return Files(tuple(f"{path.stem}.{{lang}}" for path in train), dev, test)

    def _all(self, root: Path, files: Files) -> list[Path]:
        names = [name for name in (*files.train, files.dev, files.test) if name]
        return [root / self._fill(name, side) for name in names for side in (0, 1)]

    def find(self, root: Path, split: str, kind: Kind) -> None:
        read = [*self._all(root, self.files(root))]
        self.need(*read)
        if split == self.splits[0]:
            others = [path for path in self._pairs_of_files(root) if path not in read]
            left_out("pair of files that no split reads", str(next(iter(others), "")), len(others))
            pairs = [path.with_suffix(f".{language}") for path in others for language in self.languages]
            report_unread(root, [*read, *pairs, *(folder for path in read for folder in path.parents)], ())

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        files = self.files(root)
        if name := {"dev": files.dev, "test": files.test}.get(split):
            return list(self._pairs(root, name, split, drop_empty, files.subwords))
        train = chain.from_iterable(
            self._pairs(root, name, Path(name).name.split(".")[0], drop_empty, files.subwords) for name in files.train
        )
        missing = [split for split, name in (("dev", files.dev), ("test", files.test)) if not name]
        return list(held_out(train, split, missing, self.hold_out))

    def _pairs(self, root: Path, name: str, split: str, drop_empty: bool, subwords: bool) -> Iterator[Utterance]:
        for x in read_pairs(root / self._fill(name, 0), root / self._fill(name, 1), split, drop_empty):
            if "’" in x.source + x.target:
                noted("pair with typographic apostrophes, read as plain ones", x.id)
            yield replace(x, source=self._plain(x.source, subwords), target=self._plain(x.target, subwords))

    def plain(self, text: str) -> str:
        return self._plain(super().plain(text), subwords=False)

    def _plain(self, text: str, subwords: bool) -> str:
        if subwords:
            text = text.replace("@@ ", "").removesuffix("@@")
        text = text.replace("’", "'")
        return html.unescape(text) if self.unescape else text

    def sample(self, cache_dir: Path) -> Path:
        return write_translations(cache_dir)


# --- summaries ---

SPLIT_FILE = "XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json"
PAIRS = ((".source", ".target"), (".raw.source", ".raw.target"), (".document", ".summary"))
RECORDS = (".jsonl", ".json")
SHARE_BAR = {
    "Share this with", "Email", "Facebook", "Messenger", "Twitter", "Pinterest", "WhatsApp", "Linkedin", "LinkedIn",
    "Copy this link", "These are external links and will open in a new window",
}  # fmt: skip


class XSum(Reader):
    """XSum in the first of the three layouts that the root has.  Runs of white space become one space."""

    name = "XSum"
    unit = "documents"
    splits = ("train", "validation", "test")
    kinds = ("text",)
    layout = (
        f"data_root must hold bbc-summary-data/ with {SPLIT_FILE}, or {{train,validation,test}}.json with document and "
        "summary, or {train,validation,test}.source and .target"
    )

    def check(self, root: Path, splits: Sequence[str], kind: Kind) -> None:
        super().check(root, splits, kind)
        files = [path for split in splits for path in self._files(root, split) if path]
        report_unread(root, [*files, root / "bbc-summary-data"], ())

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self._files(root, split)

    def _files(self, root: Path, split: str) -> tuple[Path, Path | None]:
        """Source and target file; the target is None where one file has both."""
        if (root / "bbc-summary-data").is_dir():
            self.need(root / SPLIT_FILE)
            return root / SPLIT_FILE, None
        part, there = "dev" if split == "validation" else split, entries(root)
        record = by_split(x for x in there if x.suffix.lower() in RECORDS).get(part)
        for source, target in PAIRS:
            names = [f"{name}{source}" for name in SPLITS[part]]
            if path := only([*([record] if record else []), *(x for x in there if x.name.lower() in names)]):
                if path == record:
                    continue
                self.need(other := path.with_name(path.name[: -len(source)] + target))
                return path, other
        if record:
            return record, None
        self.missing(root / f"{split}.source")

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        file, targets = self._files(root, split)
        if targets is not None:
            return list(read_pairs(file, targets, split, drop_empty))
        if file.name == SPLIT_FILE:
            return self._original(root, file, split, drop_empty)
        utterances = []
        for i, row in enumerate(rows(file)):
            id = str(row.values.get("id", f"{split}_{i}"))
            source, target = row.text("document", optional=True), row.text("summary", optional=True)
            utterances.append((row.where, Utterance(id=id, source=source, target=target)))
        return whole(utterances, drop_empty)

    def _original(self, root: Path, splits: Path, split: str, drop_empty: bool) -> list[Utterance]:
        with reading(splits, "one JSON object with the ids of each split"):
            (row,) = rows(splits)
        utterances = []
        for id in row.value(split, list):
            path = root / "bbc-summary-data" / f"{id}.summary"
            lines = [line for raw in read_lines(path) if (line := raw.strip()) and line not in SHARE_BAR]
            parts = "\n".join(lines).split("[SN]")
            if len(parts) < 9:
                raise DataError(f"{path}: expected sections [SN]URL[SN], TITLE, FIRST-SENTENCE and RESTBODY")
            utterances.append((str(path), Utterance(id=str(id), source=squeeze(parts[8]), target=squeeze(parts[6]))))
        return whole(utterances, drop_empty)

    def sample(self, cache_dir: Path) -> Path:
        return write_articles(cache_dir)


class SciTLDR(Reader):
    """Abstracts of papers.  The first summary is the target; all summaries are references."""

    name = "SciTLDR"
    unit = "papers"
    kinds = ("text",)
    layout = "data_root must hold train.jsonl, dev.jsonl and test.jsonl"

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self.need(root / f"{split}.jsonl")

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        utterances = []
        for row in rows(root / f"{split}.jsonl"):
            source = " ".join(_texts(row, "source"))
            target, *others = _texts(row, "target") or [""]
            if len(others) > len(others := [text for text in others if text]):
                noted("further reference that is empty and does not count", row.where)
            id = f"{split}_{row.number}_{row.values.get('paper_id', '')}"
            utterances.append((row.where, Utterance(id=id, source=source, target=target, others=tuple(others))))
        return whole(utterances, drop_empty)


def _texts(row: Row, key: str) -> list[str]:
    """A list of texts."""
    texts = [] if row.values.get(key) is None else row.value(key, list)
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise DataError(f"{row.where}: {key!r} has {wrong[0]!r:.40}; expected a list of texts")
    return [squeeze(text) for text in texts]


# --- both ---


def read_pairs(source: Path, target: Path, name: str, drop_empty: bool) -> Iterator[Utterance]:
    """Examples from two files: item i of both is one example, with the id `name`_i.

    Items are lines, or the segments of SGML files.  DataError: their numbers differ, or one is empty.
    """
    segments = source.suffix == ".sgm"
    read = sgml_pairs(source, target) if segments else [read_lines(path) for path in (source, target)]
    unit = "segment" if segments else "line"
    lines = [[(squeeze(text), notes) for text, notes in apart(texts)] for texts in read]
    sides = [[text for text, _ in side] for side in lines]
    sides = [trimmed(sides[0], len(sides[1])), trimmed(sides[1], len(sides[0]))]
    while len(sides[0]) == len(sides[1]) > 1 and not (sides[0][-1] or sides[1][-1]):  # blank lines at the end
        for side in sides:
            side.pop()
    if len(sides[0]) != len(sides[1]):
        raise DataError(f"{source} has {len(sides[0])} {unit}s, {target.name} {len(sides[1])}; expected equal numbers")
    pairs = [
        Utterance(id=f"{name}_{i}", source=left, target=right)
        for i, (left, right) in enumerate(zip(*sides, strict=True), 1)
    ]
    empty = ((i, x) for i, x in enumerate(pairs, 1) if not (x.source and x.target))
    refuse_empty((f"{target if x.source else source} {unit} {i}" for i, x in empty), drop_empty)
    for pair, *both in zip(pairs, *lines, strict=False):
        for _, notes in both:
            restore(notes.plain())
        yield pair


def sgml_pairs(source: Path, target: Path) -> list[list[str]]:
    """The texts of the segments of two SGML files, as WMT's test sets have them, in the order of the source.

    DataError: a segment of one file is not in the other, which their documents and numbers tell.
    """
    left, right = sgml_segments(source), sgml_segments(target)
    if alone := sorted(left.keys() ^ right.keys()):
        (document, number), path = alone[0], target if alone[0] in left else source
        raise DataError(f"{path}: no segment {number} of the document {document!r}; expected the same in both files")
    return [[*left.values()], [right[key] for key in left]]


def sgml_segments(path: Path) -> dict[tuple[str, str], str]:
    """The texts of an SGML file by document and number of the segment; without these by their places."""
    segments: dict[tuple[str, str], str] = {}
    document, place = "", 0
    for match in _SEGMENT.finditer(read_text(path)):
        if match["seg"] is None:
            document, place = (_ID.findall(match["doc"]) or [""])[0].strip("\"'"), 0
            continue
        place += 1
        key, text = (document, (_ID.findall(match["seg"]) or [str(place)])[0].strip("\"'")), match["text"] or ""
        if key in segments or "<seg" in text.lower():
            wrong = "occurs twice" if key in segments else "has no end"
            raise DataError(f"{path}: the segment {key[1]} of the document {document!r} {wrong}")
        segments[key] = html.unescape(text)
    return segments


def whole(pairs: Sequence[tuple[str, Utterance]], drop_empty: bool) -> list[Utterance]:
    """The examples of two texts, each with its place.  DataError: see :func:`refuse_empty`."""
    refuse_empty((where for where, pair in pairs if not (pair.source and pair.target)), drop_empty)
    return [pair for _, pair in pairs]
