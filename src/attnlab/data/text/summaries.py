"""Readers of documents with one-sentence summaries: XSum in its three layouts, and SciTLDR.

(a) <root>/bbc-summary-data/<id>.summary     sections [SN]URL[SN], TITLE, FIRST-SENTENCE, RESTBODY
    <root>/XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json     {"train": [ids], "validation": ..., "test": ...}
(b) <root>/{train,validation,test}.json      records with document and summary (Hugging Face's fields)
(c) <root>/{train,validation,test}.{source,target}     one example per line; also [.raw].source, .document/.summary

<root>/{train,dev,test}.jsonl                SciTLDR: source, a list of sentences; target, a list of summaries
"""

import json
from collections.abc import Sequence
from pathlib import Path

from attnlab.data.corpus import Kind, Reader, Utterance, field, read_lines, read_records, read_text, refuse_empty
from attnlab.errors import DataError

SPLIT_FILE = "XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json"
SPELLINGS = {"train": ("train",), "validation": ("validation", "val", "dev"), "test": ("test",)}
PAIRS = ((".source", ".target"), (".raw.source", ".raw.target"), (".document", ".summary"))
RECORDS = (".jsonl", ".json")
SHARE_BAR = {
    "Share this with",
    "Email",
    "Facebook",
    "Messenger",
    "Twitter",
    "Pinterest",
    "WhatsApp",
    "Linkedin",
    "LinkedIn",
    "Copy this link",
    "These are external links and will open in a new window",
}


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
            return read_pairs(source, target, split, drop_empty, ("document", "summary"))
        if source.name == SPLIT_FILE:
            return self._original(root, source, split, drop_empty)
        found = []
        for number, (line, record) in enumerate(read_records(source)):
            document, summary = (squeeze(field(record, key, str, source, line)) for key in ("document", "summary"))
            for text, what in ((document, "document"), (summary, "summary")):
                refuse_empty(text, f"{source} line {line}", drop_empty, what)
            id = str(record.get("id", f"{split}_{number}"))
            found.append(Utterance(id=id, source=document, target=summary if document else ""))
        return found

    def _original(self, root: Path, splits: Path, split: str, drop_empty: bool) -> list[Utterance]:
        try:
            ids = json.loads(read_text(splits))[split]
            if not isinstance(ids, list) or not all(isinstance(id, str | int) for id in ids):
                raise TypeError(f"{split} is no list of ids")
        except json.JSONDecodeError as error:
            raise DataError(f"{splits} line {error.lineno}: malformed JSON ({error.msg})") from error
        except (KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"{splits}: no list of ids under {split!r}; expected {{train: [id, ...], validation: ..., test: ...}}"
            ) from error
        found = []
        for id in ids:
            path = root / "bbc-summary-data" / f"{id}.summary"
            lines = [line for line in read_lines(path) if line and line not in SHARE_BAR]
            parts = "\n".join(lines).split("[SN]")
            if len(parts) < 9:
                raise DataError(f"{path}: expected sections [SN]URL[SN], TITLE, FIRST-SENTENCE and RESTBODY")
            document, summary = squeeze(parts[8]), squeeze(parts[6])
            for text, what in ((document, "document"), (summary, "summary")):
                refuse_empty(text, str(path), drop_empty, what)
            found.append(Utterance(id=str(id), source=document, target=summary if document else ""))
        return found

    def sample(self, cache_dir: Path) -> Path:
        from attnlab.data.samples import write_articles

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
        path = root / f"{split}.jsonl"
        found = []
        for line, record in read_records(path):
            source = squeeze(" ".join(map(str, field(record, "source", list, path, line))))
            targets = [squeeze(str(text)) for text in field(record, "target", list, path, line)]
            refuse_empty(source, f"{path} line {line}", drop_empty, "document")
            refuse_empty(targets[0] if targets else "", f"{path} line {line}", drop_empty, "summary")
            first = targets[0] if source and targets else ""
            id = f"{split}_{line}_{record.get('paper_id', '')}"
            found.append(Utterance(id=id, source=source, target=first, others=tuple(targets[1:])))
        return found


def read_pairs(
    source: Path, target: Path, name: str, drop_empty: bool, what: tuple[str, str] = ("source", "target")
) -> list[Utterance]:
    """Examples from two files of lines; line i of both is one example.

    Args:
        source, target: the files.
        name: the prefix of the ids.
        drop_empty: give examples with an empty text an empty target, to be left out, in place of an error.
        what: what the lines of both files are, for messages.

    Raises:
        DataError: the files have unequal numbers of lines, or a line is empty.
    """
    sides = read_lines(source), read_lines(target)
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{source} has {len(sides[0])} lines, {target.name} {len(sides[1])}; expected one line per example in both"
        )
    found = []
    for number, (left, right) in enumerate(zip(*([squeeze(line) for line in side] for side in sides), strict=True), 1):
        refuse_empty(left, f"{source} line {number}", drop_empty, what[0])
        refuse_empty(right, f"{target} line {number}", drop_empty, what[1])
        found.append(Utterance(id=f"{name}_{number}", source=left, target=right if left else ""))
    return found


def squeeze(text: str) -> str:
    """`text` with each run of white space as one space."""
    return " ".join(text.split())
