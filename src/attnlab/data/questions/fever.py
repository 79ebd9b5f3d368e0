"""FEVER: claims that are true or false."""

from __future__ import annotations

import logging
from pathlib import Path

from attnlab.data.questions.base import Question, QuestionSet, text_field, with_full_stop
from attnlab.data.questions.rows import Row, field, find, rows
from attnlab.errors import DataError

log = logging.getLogger(__name__)

FOLDERS = ("", "v1.0/", "fever/", "fever/v1.0/")
LABELS = {"SUPPORTS": "true", "REFUTES": "false", 1: "true", 0: "false"}
NO_LABEL = ("NOT ENOUGH INFO", 2, -1)


class Fever(QuestionSet):
    """The splits paper_dev and paper_test, claims with one label each.

    In each split, a claim that occurs several times counts once, and a claim with both labels is left out. Labels are
    SUPPORTS and REFUTES, or 1 and 0; claims labelled NOT ENOUGH INFO are left out. The prompt ends `Is this claim true
    or false. The claim is`; the probabilities of `true` and `false` as its next token are compared.
    """

    name = "fever"
    title = "FEVER"
    choices = ("true", "false")
    layout = "expected paper_dev.jsonl (or .json, .parquet) with claim and label, and optionally paper_test beside it"

    def files(self, root: Path) -> list[Path]:
        if dev := _of(root, "paper_dev"):
            return dev
        raise DataError(f"data_root={root}: no claims of {self.title}; {self.layout}")

    def read(self, root: Path) -> list[Question]:
        splits = self.files(root), _of(root, "paper_test")
        return [question for paths in splits for question in self._split(paths)]

    def _split(self, paths: list[Path]) -> list[Question]:
        claims: dict[str, tuple[Row, set[str]]] = {}
        without = 0
        for path in paths:
            for row in rows(path, ("claim", "label")):
                label = field(row, "label", (str, int))
                if label in NO_LABEL:
                    without += 1
                    continue
                if label not in LABELS:
                    known = ", ".join(str(name) for name in (*LABELS, *NO_LABEL))
                    raise DataError(f"{row.where}: 'label' is {label!r:.40}; expected one of {known}")
                claims.setdefault(text_field(row, "claim"), (row, set()))[1].add(LABELS[label])
        found = [self.question(row, claim, [*labels]) for claim, (row, labels) in claims.items() if len(labels) == 1]
        if without or len(found) < len(claims):
            both = len(claims) - len(found)
            log.info("%s: %d claims left out without a label, %d with both labels", paths[0].name, without, both)
        return found

    def prompt(self, text: str) -> str:
        return f"Consider the following claim: {with_full_stop(text)} Is this claim true or false. The claim is"


def _of(root: Path, split: str) -> list[Path]:
    return find(root, [f"{folder}{name}" for folder in FOLDERS for name in (split, f"{split}-*")])
