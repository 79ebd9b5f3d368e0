"""HotpotQA: questions whose answers need two facts, without their documents."""

from __future__ import annotations

from pathlib import Path

from attnlab.data.questions.base import Question, QuestionSet, text_field
from attnlab.data.questions.rows import find, rows
from attnlab.errors import DataError

FOLDERS = ("", "fullwiki/", "hotpotqa/", "hotpot_qa/", "hotpot_qa/fullwiki/")
TRAIN = tuple(f"{folder}{name}" for folder in FOLDERS for name in ("hotpot_train_v*", "train-*", "train"))
VALIDATION = tuple(
    f"{folder}{name}"
    for folder in FOLDERS
    for name in ("hotpot_dev_fullwiki_v*", "hotpot_dev_distractor_v*", "hotpot_dev_v*", "validation-*", "validation")
)


class HotpotQA(QuestionSet):
    """As many rows of the training split as the validation split has, then the validation split.

    LASER's code takes these, because the test split has no answers. Without training files, the validation split
    alone. Its prompt is `QUESTION The answer is`; up to 15 tokens are generated. A masked language model fills five
    masks after the prompt.
    """

    name = "hotpotqa"
    title = "HotpotQA"
    new_tokens = 15
    masks = 5
    layout = (
        "expected hotpot_dev_*.json, fullwiki/validation-*.parquet or validation.json(l) with question and answer, and "
        "beside it optionally hotpot_train_v1.1.json or train-*.parquet"
    )

    def files(self, root: Path) -> list[Path]:
        if validation := find(root, VALIDATION):
            return validation
        raise DataError(f"data_root={root}: no questions of {self.title}; {self.layout}")

    def read(self, root: Path) -> list[Question]:
        held = [question for path in self.files(root) for question in self._of(path)]
        train: list[Question] = []
        for path in find(root, TRAIN):
            for question in self._of(path, len(held) - len(train)):
                train.append(question)
        return train + held

    def _of(self, path: Path, limit: int | None = None) -> list[Question]:
        """The questions of a file; only so many are read."""
        found: list[Question] = []
        for row in rows(path, ("question", "answer")):
            if limit is not None and len(found) >= limit:
                break
            if row.values.get("answer") is None:
                raise DataError(f"{row.where}: a question without an answer; remove it, or give the answered split")
            found.append(self.question(row, text_field(row, "question"), [text_field(row, "answer")]))
        return found

    def prompt(self, text: str) -> str:
        return f"{text if text.endswith(('?', '.')) else f'{text}?'} The answer is"
