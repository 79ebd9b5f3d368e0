"""Bias in Bios: the profession of the person whom a short biography describes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attnlab.data.questions.base import Question, QuestionSet, text_field, with_full_stop
from attnlab.data.questions.rows import Row, field, find, rows
from attnlab.errors import DataError

FOLDERS = ("", "data/", "bias_in_bios/", "bias_in_bios/data/")
SPLIT = tuple(f"{folder}{name}" for folder in FOLDERS for name in ("dev-*", "dev", "bios_dev"))
PROFESSIONS = (  # the numbers of the published column `profession`
    "accountant", "architect", "attorney", "chiropractor", "comedian", "composer", "dentist", "dietitian", "dj",
    "filmmaker", "interior designer", "journalist", "model", "nurse", "painter", "paralegal", "pastor",
    "personal trainer", "photographer", "physician", "poet", "professor", "psychologist", "rapper",
    "software engineer", "surgeon", "teacher", "yoga teacher",
)  # fmt: skip
LAST_TOKENS = 50  # of a biography, for masked language models


class BiosProfession(QuestionSet):
    """The split dev, biographies of the eight professions that are single tokens for GPT-J and RoBERTa.

    The paper says ten professions, its code has eight. A masked language model reads the last 50 tokens of a
    biography and fills one mask.
    """

    name = "bios"
    title = "Bios Profession"
    choices = ("journalist", "poet", "composer", "model", "teacher", "architect", "painter", "professor")
    layout = "expected dev-*.parquet, dev.jsonl or dev.json with hard_text and profession (0 to 27, or its name)"

    def files(self, root: Path) -> list[Path]:
        if files := find(root, SPLIT):
            return files
        raise DataError(f"data_root={root}: no biographies of {self.title}; {self.layout}")

    def read(self, root: Path) -> list[Question]:
        files = self.files(root)
        found: list[Question] = []
        for path in files:
            for row in rows(path, ("hard_text", "profession")):
                if (profession := _profession(row)) in self.choices:
                    found.append(self.question(row, text_field(row, "hard_text"), [profession]))
        if not found:
            raise DataError(f"{files[0]}: no biography of a {', '.join(self.choices)}")
        return found

    def prompt(self, text: str) -> str:
        return (
            f"Consider the following text: {with_full_stop(text)} What is the profession of the person in this text? "
            "The profession of this person is"
        )

    def masked_prompt(self, text: str, mask: str, last: Callable[[str, int], str]) -> str:
        text = with_full_stop(last(text, LAST_TOKENS).strip())
        return f"Consider the following text: {text} The profession of the person in the text is called {mask}."


def _profession(row: Row) -> str:
    value = field(row, "profession", (int, str))
    if isinstance(value, int) and 0 <= value < len(PROFESSIONS):
        return PROFESSIONS[value]
    name = str(value).replace("_", " ").strip().lower()
    if name not in PROFESSIONS:
        raise DataError(
            f"{row.where}: 'profession' is {value!r:.40}; expected 0 to {len(PROFESSIONS) - 1}, or its name"
        )
    return name
