"""Readers of documents with one-sentence summaries: XSum in its three layouts, and SciTLDR.

(a) <root>/bbc-summary-data/<id>.summary     sections [SN]URL[SN], TITLE, FIRST-SENTENCE, RESTBODY
    <root>/XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json     {"train": [ids], "validation": ..., "test": ...}
(b) <root>/{train,validation,test}.json      records with document and summary (Hugging Face's fields)
(c) <root>/{train,validation,test}.{source,target}     one example per line; also [.raw].source, .document/.summary

<root>/{train,dev,test}.jsonl                SciTLDR: source, a list of sentences; target, a list of summaries
"""

from collections.abc import Sequence
from pathlib import Path

from attnlab.data.corpus import Kind, Reader, Utterance, refuse_empty
from attnlab.data.files import read_json, read_lines, rows, squeeze
from attnlab.errors import DataError

SPLIT_FILE = "XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json"
SPELLINGS = {"train": ("train",), "validation": ("validation", "val", "dev"), "test": ("test",)}
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

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self._files(root, split)

    def _files(self, root: Path, split: str) -> tuple[Path, Path | None]:
        """Source and target file; the target is None where one file has both."""
        if (root / "bbc-summary-data").is_dir():
            self.need(root / SPLIT_FILE)
            return root / SPLIT_FILE, None
        for name in SPELLINGS[split]:
            for suffix in RECORDS:
                if (root / f"{name}{suffix}").is_file():
                    return root / f"{name}{suffix}", None
            for source, target in PAIRS:
                if (root / f"{name}{source}").is_file():
                    self.need(root / f"{name}{target}")
                    return root / f"{name}{source}", root / f"{name}{target}"
        self.missing(root / f"{split}.source")

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        source, target = self._files(root, split)
        if target is not None:
            return read_pairs(source, target, split, drop_empty)
        if source.name == SPLIT_FILE:
            return self._original(root, source, split, drop_empty)
        return [
            pair(id, row.text("document"), row.text("summary"), row.where, row.where, drop_empty)
            for number, row in enumerate(rows(source))
            for id in [str(row.values.get("id", f"{split}_{number}"))]
        ]

    def _original(self, root: Path, splits: Path, split: str, drop_empty: bool) -> list[Utterance]:
        content = read_json(splits)
        ids = content.get(split) if isinstance(content, dict) else None
        if not isinstance(ids, list) or not all(isinstance(id, str | int) for id in ids):
            raise DataError(f"{splits}: expected {{train: [id, ...], validation: ..., test: ...}}: no ids of {split!r}")
        utterances = []
        for id in ids:
            path = root / "bbc-summary-data" / f"{id}.summary"
            lines = [line for raw in read_lines(path) if (line := raw.strip()) and line not in SHARE_BAR]
            parts = "\n".join(lines).split("[SN]")
            if len(parts) < 9:
                raise DataError(f"{path}: expected sections [SN]URL[SN], TITLE, FIRST-SENTENCE and RESTBODY")
            utterances.append(pair(str(id), squeeze(parts[8]), squeeze(parts[6]), str(path), str(path), drop_empty))
        return utterances

    def sample(self, cache_dir: Path) -> Path:
        from attnlab.data.samples.written import write_articles

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
            source = squeeze(" ".join(map(str, row.value("source", list))))
            target, *others = [squeeze(str(text)) for text in row.value("target", list)] or [""]
            id = f"{split}_{row.number}_{row.values.get('paper_id', '')}"
            utterances.append(pair(id, source, target, row.where, row.where, drop_empty, tuple(others)))
        return utterances


def read_pairs(source: Path, target: Path, name: str, drop_empty: bool) -> list[Utterance]:
    """Examples from two files of lines: line i of both is one example, with the id `name`_i.

    Raises:
        DataError: the files have unequal numbers of lines, or a line is empty.
    """
    sides = [[squeeze(line) for line in read_lines(path)] for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise DataError(f"{source} has {len(sides[0])} lines, {target.name} {len(sides[1])}; expected equal numbers")
    return [
        pair(f"{name}_{i}", left, right, f"{source} line {i}", f"{target} line {i}", drop_empty)
        for i, (left, right) in enumerate(zip(*sides, strict=True), 1)
    ]


def pair(
    id: str, source: str, target: str, at: str, target_at: str, drop_empty: bool, others: tuple[str, ...] = ()
) -> Utterance:
    """An example of two texts.

    Args:
        id: unique in its split.
        at, target_at: the places of both texts, for the error.
        drop_empty: give an example with an empty text an empty target, to be left out, in place of an error.
        others: further references.

    Raises:
        DataError: a text is empty.
    """
    refuse_empty(source, at, drop_empty)
    refuse_empty(target, target_at, drop_empty)
    return Utterance(id=id, source=source, target=target if source else "", others=others)
