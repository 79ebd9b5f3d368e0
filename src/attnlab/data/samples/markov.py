"""A generated language with a known entropy, which is a lower bound of a model's loss.

The next word depends on the classes of the last word and of the word `order` words back.  Each such pair of classes
allows a few words, with the same probabilities (CHOICES) for every pair.  After every word the line ends with a fixed
probability.  Words before the start of the line have another class.  So the entropy of the next word is the same
in every context.
"""

import math
from collections.abc import Iterator

import numpy as np

LINES = {"train": 20_000, "validation": 1_000, "test": 1_000}
CHOICES = np.asarray([0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


class Source:
    """A source of lines of words.

    Args:
        seed: of the words, their classes and the text.
        order: the distance of the second word that the next word depends on.
        num_words: the number of words.
        num_classes: the number of classes of words.
        stop: the probability that a line ends after a word.
    """

    def __init__(
        self, seed: int = 7, order: int = 3, num_words: int = 200, num_classes: int = 8, stop: float = 1 / 16
    ) -> None:
        self.seed, self.order, self.stop, self.start = seed, order, stop, num_classes
        random = np.random.default_rng([seed, 100])
        pairs = random.permutation(len(SYLLABLES) ** 2)[:num_words]
        self.words = [SYLLABLES[i // len(SYLLABLES)] + SYLLABLES[i % len(SYLLABLES)] for i in pairs]
        self.classes: list[int] = random.permutation(np.arange(num_words) % num_classes).tolist()
        contexts, share = (num_classes + 1) ** 2, num_words // len(CHOICES)  # contexts for each shuffle
        shuffles = [random.permutation(num_words)[: share * len(CHOICES)] for _ in range(-(-contexts // share))]
        rows = np.concatenate(shuffles).reshape(-1, len(CHOICES))[:contexts]
        self.following = rows.reshape(num_classes + 1, num_classes + 1, -1)

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
        random = np.random.default_rng([self.seed, *split.encode()])
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
        last = self.classes[line[i - 1]] if i else self.start
        back = self.classes[line[i - self.order]] if i >= self.order else self.start
        return last, back

    def nats(self, line: str) -> float:
        """The negative log-likelihood of a line and its end, in nats."""
        numbers = {word: i for i, word in enumerate(self.words)}
        ids = [numbers[word] for word in line.split()]
        cost = -math.log(self.stop) - (len(ids) - 1) * math.log1p(-self.stop)
        for i, word in enumerate(ids):
            cost -= math.log(CHOICES[self.following[*self.context(ids, i)].tolist().index(word)])
        return cost
