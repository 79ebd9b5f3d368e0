"""The generated language: its entropy is the computed one."""

import math
from collections import Counter

import numpy as np
import pytest

from attnlab.data.samples.markov import CHOICES, LINES, Source


def test_the_entropy_is_that_of_the_texts() -> None:
    """-log p of the texts by the source itself, per word or line end; the closed form is its mean."""
    source = Source()
    lines = list(source.lines("train", 4000))
    costs = np.array([source.nats(line) for line in lines])
    sizes = np.array([len(line.split()) + 1 for line in lines])
    spread = (costs - source.entropy * sizes).std() / len(lines) ** 0.5 / sizes.mean()
    assert abs(costs.sum() / sizes.sum() - source.entropy) < 4 * spread < 0.03


def test_the_closed_form() -> None:
    source = Source(stop=0.5)
    word = sum(-p * math.log(p) for p in CHOICES)
    assert source.entropy == pytest.approx((word + math.log(2)) / 1.5)
    assert CHOICES.sum() == pytest.approx(1)


def test_a_word_hangs_on_the_last_and_on_one_further_back_alone() -> None:
    source = Source(order=3)
    following: dict[tuple[int, int], set[str]] = {}
    middle: dict[tuple[int, int], set[int]] = {}
    for line in source.lines("train", 3000):
        ids = [source.words.index(word) for word in line.split()]
        for i in range(3, len(ids)):
            context = source.classes[ids[i - 1]], source.classes[ids[i - 3]]
            following.setdefault(context, set()).add(source.words[ids[i]])
            middle.setdefault(context, set()).add(source.classes[ids[i - 2]])
    assert len(following) == 64
    assert all(len(words) == len(CHOICES) for words in following.values())
    assert all(len(classes) > 3 for classes in middle.values())  # the word between does not decide


def test_texts_are_the_seed_s_and_splits_differ() -> None:
    lines = {split: list(Source().lines(split, 50)) for split in LINES}
    assert lines == {split: list(Source().lines(split, 50)) for split in LINES}
    assert len({tuple(found) for found in lines.values()}) == 3
    assert list(Source(seed=8).lines("train", 50)) != lines["train"]
    counts = Counter(word for line in Source().lines("train", 3000) for word in line.split())
    assert len(counts) == 200 == len(set(Source().words))
