"""WikidataQA (`qa_wikidata` of BIG-bench): texts whose last words are missing."""

from __future__ import annotations

from pathlib import Path

from attnlab.data.questions.base import Question, QuestionSet, text_field
from attnlab.data.questions.rows import Row, field, find, rows
from attnlab.errors import DataError

FOLDERS = ("qa_wikidata/", "bigbench/qa_wikidata/", "wikidata/", "")
SPLITS = ("validation", "train")


class WikidataQA(QuestionSet):
    """The splits validation and train, in this order; rows with exactly one target.

    The prompt is the text itself, and up to 10 tokens are generated. A masked language model fills five masks.
    """

    name = "wikidata"
    title = "BigBench-WikidataQA"
    new_tokens = 10
    masks = 5
    layout = (
        "expected qa_wikidata/validation-*.parquet and train-*.parquet (or .jsonl) with inputs and targets, or "
        "BIG-bench's qa_wikidata/task.json with input and target"
    )

    def files(self, root: Path) -> list[Path]:
        files = [
            path
            for split in SPLITS
            for path in find(root, [f"{folder}{name}" for folder in FOLDERS for name in (f"{split}-*", split)])
        ] or find(root, [f"{folder}task" for folder in FOLDERS])
        if not files:
            raise DataError(f"data_root={root}: no questions of {self.title}; {self.layout}")
        return files

    def read(self, root: Path) -> list[Question]:
        files, found = self.files(root), list[Question]()
        for path in files:
            for row in rows(path, ("inputs", "targets", "input", "target")):
                targets = _targets(row)
                if len(targets) == 1:
                    key = "inputs" if "inputs" in row.values else "input"
                    found.append(self.question(row, text_field(row, key), targets))
        if not found:
            raise DataError(f"{files[0]}: no row with exactly one target; {self.layout}")
        return found

    def prompt(self, text: str) -> str:
        return text


def _targets(row: Row) -> list[str]:
    value = field(row, "targets" if "targets" in row.values else "target", (list, str))
    targets = [value] if isinstance(value, str) else value
    if not targets or not all(isinstance(target, str) and target.strip() for target in targets):
        raise DataError(f"{row.where}: a question without an answer; expected a text in 'targets'")
    return list(targets)
