"""HotpotQA, FEVER, Bias in Bios and WikidataQA of BIG-bench in their published layouts, and the questions of a run."""

from __future__ import annotations

import logging
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Lt
from omegaconf import DictConfig

from attnlab.data.corpus import Row, check_folder, rows
from attnlab.data.report import Report, left_out, noted
from attnlab.data.samples.world import PROFESSIONS, write_world
from attnlab.errors import ConfigError, DataError
from attnlab.run.record import embedded

log = logging.getLogger(__name__)

LAYOUT = "attnlab.data.questions.check_layout"  # checks the files of data_root without torch
VALIDATION = 0.2  # the first share of the questions, as the released code has it; the paper says the last is the test
SUFFIXES = (".jsonl", ".json", ".parquet")
SHARD = "-of-"  # in the names of files that together are one split


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question with its published prompt.

    Attributes:
        text: the question, claim, biography or cloze text.
        prompt: what a decoder continues.
        answers: the accepted answers; the loss is that of the first.
    """

    text: str
    prompt: str
    answers: tuple[str, ...]


class QuestionSet(ABC):
    """One set: where its files are, which rows count, the prompt, and how an answer is scored.

    Attributes:
        name: the value of `task.questions`.
        choices: the answers to choose from, whose next-token probabilities are compared; empty: free text, the answer
            must occur in the generated text.
        new_tokens: the largest number of generated tokens; of sets with choices 0.
        masks: masks that a masked language model fills at once; 1 with choices.
        layout: what the folder must hold, for messages.
        splits: the names of each split's files, without suffix; the first split must exist.
        columns: of the files, those that are read.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    choices: ClassVar[tuple[str, ...]] = ()
    new_tokens: ClassVar[int] = 0
    masks: ClassVar[int] = 1
    layout: ClassVar[str]
    folders: ClassVar[tuple[str, ...]]
    splits: ClassVar[tuple[tuple[str, ...], ...]]
    columns: ClassVar[tuple[str, ...]]

    def check(self, root: Path) -> None:
        """Raise DataError where a needed file is missing."""
        check_folder(root, self.layout)
        if not self.files(root, 0):
            raise DataError(f"data_root={root}: no files of {self.title}; {self.layout}")

    def files(self, root: Path, split: int) -> list[Path]:
        """The files of a split, of the first name that has any.  DataError: several, which are not its shards."""
        for name in (f"{folder}{name}" for folder in self.folders for name in self.splits[split]):
            files = sorted(path for suffix in SUFFIXES for path in root.glob(f"{name}{suffix}"))
            if len(files) > 1 and not all(SHARD in path.name for path in files):
                names = ", ".join(path.name for path in files)
                raise DataError(f"{files[0].parent}: {names} are files of the same split; keep one of them")
            if files:
                return files
        return []

    def rows(self, root: Path, split: int) -> Iterator[Row]:
        """The rows of a split, in the order of its files."""
        return (row for path in self.files(root, split) for row in rows(path, self.columns))

    def read(self, root: Path) -> list[Question]:
        """The questions in the published order.  DataError: a file is missing or malformed."""
        self.check(root)
        return list(self.questions(root))

    @abstractmethod
    def questions(self, root: Path) -> Iterable[Question]:
        """The questions of the files, which exist."""

    @abstractmethod
    def prompt(self, text: str) -> str:
        """The prompt that a decoder continues with a space and the answer."""

    def masked_prompt(self, text: str, mask: str, last: Callable[[str, int], str]) -> str:
        """The prompt of a masked language model; every `mask` in it stands for one token of the answer.

        Args:
            last: cuts a text to its last n tokens.
        """
        return " ".join([self.prompt(text), *[mask] * self.masks])

    def question(self, row: Row, text: str, answers: Sequence[str]) -> Question:
        """A question of this set. DataError: its text or every answer is empty."""
        accepted = tuple(stripped for answer in answers if (stripped := answer.strip()))
        if not text.strip() or not accepted:
            raise DataError(f"{row.where}: an empty question, or one without an answer; remove it")
        return Question(text=text.strip(), prompt=self.prompt(text.strip()), answers=accepted)


def with_full_stop(text: str) -> str:
    """`text` as a sentence: a full stop is added unless it ends in one, or in a question mark."""
    return text if text.endswith((".", "?")) else f"{text}."


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
    folders = ("", "fullwiki/", "hotpotqa/", "hotpot_qa/", "hotpot_qa/fullwiki/")
    splits = (
        ("hotpot_dev_fullwiki_v*", "hotpot_dev_distractor_v*", "hotpot_dev_v*", "validation-*", "validation"),
        ("hotpot_train_v*", "train-*", "train"),
    )
    columns = ("question", "answer")
    layout = (
        "expected hotpot_dev_*.json, fullwiki/validation-*.parquet or validation.json(l) with question and answer, and "
        "beside it optionally hotpot_train_v1.1.json or train-*.parquet"
    )

    def questions(self, root: Path) -> list[Question]:
        validation = list(self.rows(root, 0))
        train = list(islice(self.rows(root, 1), len(validation)))
        noted("training question, of which as many are read as of validation", count=len(train))
        chosen = [*train, *validation]
        return [self.question(row, row.value("question", str), [row.value("answer", str)]) for row in chosen]

    def prompt(self, text: str) -> str:
        return f"{text if text.endswith(('?', '.')) else f'{text}?'} The answer is"


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
    folders = ("", "v1.0/", "fever/", "fever/v1.0/")
    splits = (("paper_dev", "paper_dev-*"), ("paper_test", "paper_test-*"))
    columns = ("claim", "label")
    layout = "expected paper_dev.jsonl (or .json, .parquet) with claim and label, and optionally paper_test beside it"

    def questions(self, root: Path) -> Iterator[Question]:
        for split in range(len(self.splits)):
            claims: dict[str, tuple[Row, set[str]]] = {}
            for row in self.rows(root, split):
                label = row.value("label", str, int)
                if label in LABELS:
                    claim = row.value("claim", str).strip()
                    left_out("claim that occurs again", row.where, claim in claims)
                    claims.setdefault(claim, (row, set()))[1].add(LABELS[label])
                elif label in NO_LABEL:
                    left_out("claim without enough information", row.where)
                else:
                    known = ", ".join(map(str, (*LABELS, *NO_LABEL)))
                    raise DataError(f"{row.where}: 'label' is {label!r:.40}; expected one of {known}")
            for claim, (row, labels) in claims.items():
                left_out("claim with both labels", row.where, len(labels) > 1)
                if len(labels) == 1:
                    yield self.question(row, claim, [*labels])

    def prompt(self, text: str) -> str:
        return f"Consider the following claim: {with_full_stop(text)} Is this claim true or false. The claim is"


LAST_TOKENS = 50  # of a biography, for masked language models


class BiosProfession(QuestionSet):
    """The split dev, biographies of the eight professions that are single tokens for GPT-J and RoBERTa.

    The paper says ten professions, its code has eight. A masked language model reads the last 50 tokens of a
    biography and fills one mask.
    """

    name = "bios"
    title = "Bios Profession"
    choices = ("journalist", "poet", "composer", "model", "teacher", "architect", "painter", "professor")
    folders = ("", "data/", "bias_in_bios/", "bias_in_bios/data/")
    splits = (("dev-*", "dev", "bios_dev"),)
    columns = ("hard_text", "profession")
    layout = "expected dev-*.parquet, dev.jsonl or dev.json with hard_text and profession (0 to 27, or its name)"

    def questions(self, root: Path) -> Iterator[Question]:
        for row in self.rows(root, 0):
            value = row.value("profession", int, str)
            name = str(value).replace("_", " ").strip().lower()
            if value in range(len(PROFESSIONS)):
                name = PROFESSIONS[value]
            if name not in PROFESSIONS:
                raise DataError(f"{row.where}: 'profession' is {value!r:.40}; expected 0 to 27, or a name")
            left_out("another profession", row.where, name not in self.choices)
            if name in self.choices:
                yield self.question(row, row.value("hard_text", str), [name])

    def prompt(self, text: str) -> str:
        return (
            f"Consider the following text: {with_full_stop(text)} What is the profession of the person in this text? "
            "The profession of this person is"
        )

    def masked_prompt(self, text: str, mask: str, last: Callable[[str, int], str]) -> str:
        text = with_full_stop(last(text, LAST_TOKENS).strip())
        return f"Consider the following text: {text} The profession of the person in the text is called {mask}."


COLUMNS = (("inputs", "input"), ("targets", "target"))  # of the Hugging Face hub, and of BIG-bench


class WikidataQA(QuestionSet):
    """WikidataQA (`qa_wikidata` of BIG-bench): the splits validation and train, in this order, or task.json.

    Rows with exactly one target. The prompt is the text itself, whose last words are missing, and up to 10 tokens are
    generated. A masked language model fills five masks.
    """

    name = "wikidata"
    title = "BigBench-WikidataQA"
    new_tokens = 10
    masks = 5
    folders = ("qa_wikidata/", "bigbench/qa_wikidata/", "wikidata/", "")
    splits = (("validation-*", "validation"), ("train-*", "train"), ("task",))
    columns = ("inputs", "targets", "input", "target")
    layout = (
        "expected qa_wikidata/validation-*.parquet and train-*.parquet (or .jsonl) with inputs and targets, or "
        "BIG-bench's qa_wikidata/task.json with input and target"
    )

    def files(self, root: Path, split: int) -> list[Path]:
        """The one split has the files of validation and train, or else task.json."""
        validation, train, task = (super(WikidataQA, self).files(root, number) for number in range(3))
        return [*validation, *train] or task

    def questions(self, root: Path) -> Iterator[Question]:
        for row in self.rows(root, 0):
            text, value = (next((key for key in keys if key in row.values), keys[0]) for keys in COLUMNS)
            targets = row.value(value, list, str)
            targets = [targets] if isinstance(targets, str) else targets
            left_out("not one target", row.where, len(targets) != 1)
            if len(targets) == 1:
                yield self.question(row, row.value(text, str), [str(targets[0])])

    def prompt(self, text: str) -> str:
        return text


SETS: tuple[type[QuestionSet], ...] = (HotpotQA, Fever, BiosProfession, WikidataQA)


def question_set(name: str) -> QuestionSet:
    """The set of this name. ConfigError: the name is unknown."""
    known = {kind.name: kind for kind in SETS}
    if name not in known:
        raise ConfigError(f"task.questions={name}: expected one of {', '.join(known)}")
    return known[name]()


def check_layout(root: Path, data: DictConfig) -> None:
    """Raise DataError where the files of a set are missing.  `data` is the node `task.data`."""
    question_set(data.questions).check(root)


class Questions:
    """The questions of one set.

    Args:
        root: the folder with the files in their published layout; None: the sample world's.
        limit: the number of questions to read, from the first; None: all.
        shuffle: the seed of a random order, which the limit and the splits then count in; None: the published order.
        share: of the questions, the first ones, that are the validation split. The released code has a fifth.
        longest_answer: an answer of more tokens, special tokens included, leaves its question out; counted only in
            sets whose answers are free text. The released code counts Llama 2's tokens.

    Attributes:
        corpus: a description with sizes; of the sample world its layout.
        report: what was read, and what was left out and why.
        validation, test: the first `share` of the questions, and the others.
    """

    def __init__(
        self,
        root: str | None,
        cache_dir: str,
        questions: str,
        limit: Annotated[int, Ge(5)] | None = None,
        longest_answer: Annotated[int, Ge(1)] = 15,
        seed: int = 1,
        shuffle: Annotated[int, Ge(0)] | None = None,
        share: Annotated[float, Gt(0), Lt(1)] = VALIDATION,
    ) -> None:
        self.kind = question_set(questions)
        self.root, self.cache_dir, self.seed = root, Path(cache_dir).expanduser(), seed
        self.limit, self.longest_answer = limit, longest_answer
        self.shuffle, self.share = shuffle, share
        self.report = Report()
        self.validation: list[Question] = []
        self.test: list[Question] = []

    def read(self) -> None:
        """Read the files, for which no tokenizer is needed.  DataError: a file is missing or malformed."""
        if self.root is None:
            log.warning("NO data_root IS SET: this is the %s", embedded(self.kind.title))
            self.location = write_world(self.cache_dir / "samples", self.seed)
        else:
            self.location = Path(self.root).expanduser()
        with self.report.of("questions"):
            self._questions = self.kind.read(self.location)

    def setup(self, tokens: Callable[[str], int]) -> None:
        """Filter and split the questions that :meth:`read` has read.  DataError: they are too few.

        Args:
            tokens: the number of tokens of a text, special tokens included.
        """
        questions = self._questions
        if not self.kind.choices:
            questions = [question for question in questions if tokens(question.answers[0]) <= self.longest_answer]
        if self.shuffle is not None:
            questions = random.Random(self.shuffle).sample(questions, len(questions))
        with self.report.of("questions") as size:
            left_out("answer of too many tokens", count=len(self._questions) - len(questions))
            left_out("beyond task.data.limit", count=len(questions) - len(questions[: self.limit]))
            questions = questions[: self.limit]
            size.used, size.unit = len(questions), "questions"
        count = int(self.share * len(questions))
        if count < 1:
            raise DataError(
                f"{self.location}: {len(questions)} questions of {self.kind.title}, of which a share of {self.share} "
                f"validates; expected at least {math.ceil(1 / self.share)}"
            )
        self.validation, self.test = questions[:count], questions[count:]
        sizes = f"{len(self.validation)} validation and {len(self.test)} test questions"
        title = self.kind.title
        self.corpus = embedded(title) if self.root is None else f"{title} in {self.location}: {sizes}"
        log.info("%s: %s", title, sizes)
