"""The questions of a run: read, filtered, and split into validation and test."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from annotated_types import Ge
from omegaconf import DictConfig

from attnlab.config.bounds import bounded
from attnlab.data.questions.base import Question, QuestionSet
from attnlab.data.questions.bios import BiosProfession
from attnlab.data.questions.fever import Fever
from attnlab.data.questions.hotpotqa import HotpotQA
from attnlab.data.questions.wikidata import WikidataQA
from attnlab.data.samples.world import write_world
from attnlab.errors import ConfigError, DataError

log = logging.getLogger(__name__)

LAYOUT = "attnlab.data.questions.loading.check_layout"  # checks the files of data_root without torch
SETS: tuple[type[QuestionSet], ...] = (HotpotQA, Fever, BiosProfession, WikidataQA)
VALIDATION = 0.2  # the first share of the questions, as the released code has it; the paper says the last is the test


def question_set(name: str) -> QuestionSet:
    """A set by its name. ConfigError: there is none.

    Args:
        name: for instance hotpotqa.
    """
    known = {kind.name: kind for kind in SETS}
    if name not in known:
        raise ConfigError(f"task.questions={name}: expected one of {', '.join(known)}")
    return known[name]()


def check_layout(root: Path, data: DictConfig) -> None:
    """Check that the files of a set exist.

    Args:
        root: the folder with the set's files.
        data: the node `task.data`.

    Raises:
        DataError: there are none.
    """
    _check(root, question_set(data.questions))


def _check(root: Path, kind: QuestionSet) -> None:
    if not root.is_dir():
        what = "is a file" if root.exists() else "no such directory"
        raise DataError(f"data_root={root}: {what}; {kind.layout}")
    kind.files(root)


@bounded
class Questions:
    """The questions of one set.

    Args:
        root: the folder with the files in their published layout; None: the sample world's.
        cache_dir: where the sample world is stored.
        questions: the name of the set.
        limit: the first so many questions are read; None: all.
        longest_answer: an answer of more tokens, special tokens included, leaves its question out; counted only in
            sets whose answers are free text. The released code counts Llama 2's tokens.
        seed: of the sample world.

    Attributes:
        kind: the set.
        corpus: what was read, with sizes; "sample" for the sample world.
        location: the folder that was read.
        found: the questions of the files; None: they are not read yet.
        filtered: the number of questions left out, by reason.
        validation, test: the first fifth of the questions, and the others.
    """

    def __init__(
        self,
        root: str | None,
        cache_dir: str,
        questions: str,
        limit: Annotated[int, Ge(5)] | None = None,
        longest_answer: Annotated[int, Ge(1)] = 15,
        seed: int = 1,
    ) -> None:
        self.kind = question_set(questions)
        self.root, self.cache_dir, self.seed = root, Path(cache_dir).expanduser(), seed
        self.limit, self.longest_answer = limit, longest_answer
        self.found: list[Question] | None = None
        self.filtered: dict[str, int] = {}
        self.validation: list[Question] = []
        self.test: list[Question] = []

    def read(self) -> None:
        """Read the files, for which no tokenizer is needed.

        Raises:
            DataError: a file is missing or malformed, or a question has no answer.
        """
        if self.root is None:
            log.warning("data_root is not set: asking about the embedded sample world")
            self.location = write_world(self.cache_dir / "samples", self.seed)
        else:
            self.location = Path(self.root).expanduser()
            _check(self.location, self.kind)
        self.found = self.kind.read(self.location)

    def setup(self, tokens: Callable[[str], int]) -> None:
        """Filter and split the questions, which are read first unless they are already.

        Args:
            tokens: the number of tokens of a text, special tokens included.

        Raises:
            DataError: as `read`, or there are too few questions.
        """
        if self.found is None:
            self.read()
        found = self.found or []
        if not self.kind.choices:
            short = [question for question in found if tokens(question.answers[0]) <= self.longest_answer]
            self.filtered["answers of too many tokens"] = len(found) - len(short)
            found = short
        found = found[: self.limit]
        count = int(VALIDATION * len(found))
        if count < 1:
            raise DataError(f"{self.location}: {len(found)} questions of {self.kind.title}; expected at least 5")
        self.validation, self.test = found[:count], found[count:]
        sizes = f"{len(self.validation)} validation and {len(self.test)} test questions"
        self.corpus = "sample" if self.root is None else f"{self.kind.title} in {self.location}: {sizes}"
        left = [f"; {count} left out: {reason}" for reason, count in self.filtered.items() if count]
        log.info("%s: %s%s", self.kind.title, sizes, "".join(left))
