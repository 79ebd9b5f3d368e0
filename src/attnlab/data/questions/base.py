"""What a question is, and the interface of a set of questions in its published layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from attnlab.data.questions.rows import Row, field
from attnlab.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question with its published prompt.

    Attributes:
        id: where it was read: the file's name and the line, item or row.
        text: the question, claim, biography or cloze text as it was read, stripped.
        prompt: what a decoder continues.
        answers: the accepted answers; the loss is that of the first.
        choices: the answers to choose from; empty: the answer is free text.
    """

    id: str
    text: str
    prompt: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()


class QuestionSet(ABC):
    """One set: where its files are, which rows count, the prompt, and how an answer is scored.

    Attributes:
        name: the value of `task.questions`.
        title: for messages and tables.
        choices: the answers to choose from, whose next-token probabilities are compared; empty: free text, the answer
            must occur in the generated text.
        new_tokens: the largest number of generated tokens; of sets with choices 0.
        masks: masks that a masked language model fills at once; 1 with choices.
        layout: what the folder must hold, for messages.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    choices: ClassVar[tuple[str, ...]] = ()
    new_tokens: ClassVar[int] = 0
    masks: ClassVar[int] = 1
    layout: ClassVar[str]

    @abstractmethod
    def files(self, root: Path) -> list[Path]:
        """The files that are needed.  Raises DataError where there are none."""

    @abstractmethod
    def read(self, root: Path) -> list[Question]:
        """The questions in the published order.

        Args:
            root: the folder with the set's files.

        Raises:
            DataError: a file is missing or malformed, or a question has no answer.
        """

    @abstractmethod
    def prompt(self, text: str) -> str:
        """The prompt that a decoder continues with a space and the answer."""

    def masked_prompt(self, text: str, mask: str, last: Callable[[str, int], str]) -> str:
        """The prompt of a masked language model; every `mask` in it stands for one token of the answer.

        Args:
            text: of the question.
            mask: the tokenizer's mask token.
            last: cuts a text to its last n tokens.
        """
        return " ".join([self.prompt(text), *[mask] * self.masks])

    def question(self, row: Row, text: str, answers: Sequence[str]) -> Question:
        """A question of this set. DataError: its text or every answer is empty."""
        if not (text := text.strip()):
            raise DataError(f"{row.where}: an empty question; expected a text")
        accepted = tuple(answer.strip() for answer in answers if answer.strip())
        if not accepted:
            raise DataError(f"{row.where}: a question without an answer; remove it, or give the answered split")
        return Question(id=row.name, text=text, prompt=self.prompt(text), answers=accepted, choices=self.choices)


def text_field(row: Row, key: str) -> str:
    """A string of a row, stripped. DataError: it is missing or not a string.

    Args:
        row: of a file of questions.
        key: of the string.
    """
    return str(field(row, key, str)).strip()


def with_full_stop(text: str) -> str:
    """`text` as a sentence: a full stop is added unless it ends in one, or in a question mark."""
    return text if text.endswith((".", "?")) else f"{text}."
