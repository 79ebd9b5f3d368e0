"""Generated problems that measure what attention keeps of its past: a sequence, and the answers at some positions.

Each problem draws all arrays at once, as a pure function of a generator.  Only the positions of answers have targets.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from attnlab.config.batch import counted
from attnlab.data.text.windows import IGNORE

Tokens = npt.NDArray[np.int64]

BLANK = 0  # what stands where there is nothing
MARK = 1  # selective copying: "write the next token here"
POWER = 0.01  # Zoology's exponent a: the weight of gap g is a * g ** (a - 1)


class Problem(ABC):
    """One kind of sequence with answers.

    A cell of the grid has a length, the number of tokens of a sequence, and a level, whose meaning is the class's
    `level`, as the record and messages say it.

    Args:
        vocab_size: V, the tokens are 0 to V - 1.
    """

    level: ClassVar[str]

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @abstractmethod
    def complaint(self, length: int, level: float) -> str | None:
        """What is wrong with a cell of a length in tokens and a level; None: nothing."""

    @abstractmethod
    def draw(self, random: np.random.Generator, count: int, length: int, level: float) -> tuple[Tokens, Tokens]:
        """Sequences (count, length) and targets of the same shape, `IGNORE` where there is none."""

    @abstractmethod
    def text(self, tokens: Tokens, targets: Tokens) -> str:
        """A readable form of (length,) tokens and targets: what has to be remembered, and the questions."""


class AssociativeRecall(Problem):
    """Multi-query associative recall (MQAR). Zoology (Arora et al. 2023), section 4 and appendix A.

    n keys, each with its value after it, stand at the beginning.  Then each key stands once more, alone, and the target
    there is its value.  The place of a key's question is one of the (T - 2n) / 2 even ones that follow; the g-th of
    them has the weight a * g ** (a - 1), drawn without replacement, so that the distance of question and pair follows
    a power law.  Keys are the lower half of the vocabulary without 0, values the upper half; no key and no value occurs
    twice in a sequence.

    Pairs begin at even positions. A mechanism that merges positions two by two then has a pair in each slot, and needs
    no layer to bring key and value together; `offset` 1 puts a value and the next key there.

    Args:
        power: a; 1: all places alike.
        offset: blanks before the first pair; 0: as published.
        noise: False: 0 stands at all other places; True: random tokens of the vocabulary, keys among them.
    """

    level = "pairs"

    def __init__(self, vocab_size: int, power: float = POWER, noise: bool = False, offset: int = 0) -> None:
        super().__init__(vocab_size)
        self.power, self.noise, self.offset = power, noise, offset

    def complaint(self, length: int, level: float) -> str | None:
        half = self.vocab_size // 2
        if level % 1 or level < 1:
            return "expected int >= 1, the number of pairs"
        least = int(4 * level) + self.offset + self.offset % 2
        if length % 2 or length < least:
            after = f" after {counted(self.offset, 'blank')}" if self.offset else ""
            return f"{int(level)} pairs and their questions{after} need an even length of at least {least}"
        if half - 1 < level:
            return f"a vocabulary of {self.vocab_size} has {max(half - 1, 0)} keys: expected at least {int(level)}"
        return None

    def draw(self, random: np.random.Generator, count: int, length: int, level: float) -> tuple[Tokens, Tokens]:
        pairs, half = int(level), self.vocab_size // 2
        keys = distinct(random, count, pairs, half - 1) + 1
        values = distinct(random, count, pairs, self.vocab_size - half) + half
        tokens = np.full((count, length), BLANK)
        targets = np.full((count, length), IGNORE)
        start, end = self.offset, self.offset + 2 * pairs
        tokens[:, start:end:2], tokens[:, start + 1 : end : 2] = keys, values
        places = end + 2 * self.gaps(random, count, pairs, (length - end) // 2)
        np.put_along_axis(tokens, places, keys, 1)
        np.put_along_axis(targets, places, values, 1)
        if self.noise:
            tokens = np.where(tokens == BLANK, random.integers(0, self.vocab_size, tokens.shape), tokens)
        return tokens, targets

    def gaps(self, random: np.random.Generator, count: int, pairs: int, space: int) -> Tokens:
        """(count, pairs) different places below `space` for the questions of each sequence, in the order of the pairs.

        Successive draws without replacement are the order of log-weights with Gumbel noise.
        """
        weights = (self.power - 1) * np.log(np.arange(1, space + 1))
        return np.argsort(-(weights + random.gumbel(size=(count, space))), axis=1)[:, :pairs]

    def text(self, tokens: Tokens, targets: Tokens) -> str:
        asked = np.flatnonzero(targets != IGNORE)
        pairs = tokens[self.offset : self.offset + 2 * len(asked)].reshape(-1, 2)
        shown = " ".join(f"{key}={value}" for key, value in pairs)
        return f"{shown} ; " + " ".join(f"{tokens[i]}?" for i in asked)


class SelectiveCopying(Problem):
    """Selective copying. Mamba (Gu and Dao 2023), section 4.1.1, after Jing et al. 2019.

    n tokens stand at random places among blanks; then follow n marks, and the target of the i-th mark is the i-th
    token.  Tokens may repeat.
    """

    level = "tokens"

    def complaint(self, length: int, level: float) -> str | None:
        if level % 1 or level < 1:
            return "expected int >= 1, the number of tokens"
        if length < 2 * level:
            return f"{int(level)} tokens and their copies need a length of at least {int(2 * level)}"
        if self.vocab_size < 4:
            return f"a vocabulary of {self.vocab_size} has fewer than 2 tokens to copy: expected at least 4"
        return None

    def draw(self, random: np.random.Generator, count: int, length: int, level: float) -> tuple[Tokens, Tokens]:
        copies = int(level)
        tokens = np.full((count, length), BLANK)
        targets = np.full((count, length), IGNORE)
        places = np.sort(distinct(random, count, copies, length - copies), axis=1)
        values = random.integers(MARK + 1, self.vocab_size, (count, copies))
        np.put_along_axis(tokens, places, values, 1)
        tokens[:, length - copies :], targets[:, length - copies :] = MARK, values
        return tokens, targets

    def text(self, tokens: Tokens, targets: Tokens) -> str:
        return " ".join(map(str, tokens[tokens > MARK])) + " ; copy"


class NeedleInNoise(Problem):
    """One pair of key and value in a sequence of random tokens, asked for at its end.

    The noise is of keys and values too, without this key, so that nothing but the key's second mention tells which pair
    it is.  The level is the share of the noise that stands before the pair; training draws it anew for each sequence.
    """

    level = "depth"

    def complaint(self, length: int, level: float) -> str | None:
        if not (0 <= level <= 1 or level == ANYWHERE):
            return f"expected a depth from 0 to 1, or {ANYWHERE:g} for any"
        if length < 4:
            return "a pair, its question and some noise need a length of at least 4"
        if self.vocab_size < 8:
            return f"a vocabulary of {self.vocab_size} is too small: expected at least 8"
        return None

    def draw(self, random: np.random.Generator, count: int, length: int, level: float) -> tuple[Tokens, Tokens]:
        half, noise = self.vocab_size // 2, length - 3
        keys = random.integers(1, half, (count, 1))
        values = random.integers(half, self.vocab_size, (count, 1))
        tokens = random.integers(1, self.vocab_size - 1, (count, length))
        tokens += tokens >= keys  # every token but the key alike
        targets = np.full((count, length), IGNORE)
        depth = random.random((count, 1)) if level == ANYWHERE else np.full((count, 1), level)
        places = np.rint(depth * noise).astype(np.int64)
        np.put_along_axis(tokens, places, keys, 1)
        np.put_along_axis(tokens, places + 1, values, 1)
        tokens[:, -1:], targets[:, -1:] = keys, values
        return tokens, targets

    def text(self, tokens: Tokens, targets: Tokens) -> str:
        key = tokens[-1]
        place = int(np.flatnonzero(tokens[:-1] == key)[0])
        return f"{place} others {key}={tokens[place + 1]} {len(tokens) - 3 - place} others ; {key}?"


ANYWHERE = -1.0  # the level of a needle whose depth is drawn for each sequence

PROBLEMS: Mapping[str, type[Any]] = {
    "mqar": AssociativeRecall,
    "selective_copying": SelectiveCopying,
    "needle": NeedleInNoise,
}


def distinct(random: np.random.Generator, count: int, size: int, below: int) -> Tokens:
    """(count, size) ints below `below`, in each row all different and every such row equally likely.

    Later ones of equal draws are drawn again until there are none.  No value is treated unlike another, so that every
    ordered choice has the same probability.  Where more than half of the values are taken, that would take long:
    these rows begin a permutation.  `size` is at most `below`.
    """
    if 2 * size > below:
        return random.permuted(np.broadcast_to(np.arange(below), (count, below)), axis=1)[:, :size]
    drawn = random.integers(0, below, (count, size))
    rows = np.arange(count)  # those that may have equal values
    while len(rows):
        order = np.argsort(drawn[rows], axis=1, kind="stable")
        ranked = np.take_along_axis(drawn[rows], order, 1)
        again = np.zeros_like(ranked, dtype=bool)
        np.put_along_axis(again, order[:, 1:], ranked[:, 1:] == ranked[:, :-1], 1)
        row, column = np.nonzero(again)
        drawn[rows[row], column] = random.integers(0, below, len(row))
        rows = rows[np.unique(row)]
    return drawn
