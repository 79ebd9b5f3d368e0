"""A generated language with a known entropy, which is a lower bound of a model's loss.

The next word depends on the classes of the last word and of the word ORDER words back.  Each such pair of classes
allows a few words, with the same probabilities (CHOICES) for every pair.  After every word the line ends with a fixed
probability.  Words before the start of the line have another class.  So the entropy of the next word is the same
in every context.
"""

import math
from collections.abc import Iterator

import numpy as np

SEED = 7  # of the words, their classes and the text
ORDER = 3  # the distance of the second word that the next word depends on
WORDS, CLASSES = 200, 8
LINES = {"train": 20_000, "validation": 1_000, "test": 1_000}
CHOICES = np.asarray([0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


class Source:
    """A source of lines of words.  `stop`: the probability that a line ends after a word."""

    def __init__(self, stop: float = 1 / 16) -> None:
        self.stop = stop
        random = np.random.default_rng([SEED, 100])
        pairs = random.permutation(len(SYLLABLES) ** 2)[:WORDS]
        self.words = [SYLLABLES[i // len(SYLLABLES)] + SYLLABLES[i % len(SYLLABLES)] for i in pairs]
        self.classes: list[int] = random.permutation(np.arange(WORDS) % CLASSES).tolist()
        contexts, share = (CLASSES + 1) ** 2, WORDS // len(CHOICES)  # contexts for each shuffle
        shuffles = [random.permutation(WORDS)[: share * len(CHOICES)] for _ in range(-(-contexts // share))]
        rows = np.concatenate(shuffles).reshape(-1, len(CHOICES))[:contexts]
        self.following = rows.reshape(CLASSES + 1, CLASSES + 1, -1)

    @property
    def entropy(self) -> float:
        """Nats per token in the limit of long texts; the end of a line counts as a token.

        A line of n words has n + 1 tokens.  Each word has entropy H(CHOICES), each of the n decisions whether to stop
        h(stop), and the mean of n is 1 / stop.
        """
        word = -float(CHOICES @ np.log(CHOICES))
        end = -self.stop * math.log(self.stop) - (1 - self.stop) * math.log1p(-self.stop)
        return (word + end) / (1 + self.stop)

    def lines(self, split: str, count: int | None = None) -> Iterator[str]:
        """`count` lines of a split; None: LINES[split] of them."""
        random = np.random.default_rng([SEED, *split.encode()])
        lengths = random.geometric(self.stop, LINES[split] if count is None else count)
        picks = iter(random.choice(len(CHOICES), lengths.sum(), p=CHOICES).tolist())
        following = self.following.tolist()
        for length in lengths.tolist():
            line: list[int] = []
            for i in range(length):
                last, back = self.context(line, i)
                line.append(following[last][back][next(picks)])
            yield " ".join(self.words[i] for i in line)

    def context(self, line: list[int], i: int) -> tuple[int, int]:
        """The two classes that the i-th word of a line depends on."""
        last = self.classes[line[i - 1]] if i else CLASSES
        back = self.classes[line[i - ORDER]] if i >= ORDER else CLASSES
        return last, back
