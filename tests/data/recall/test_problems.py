"""Generated problems are what they say: answers stand in the sequence, and their places follow the stated law."""

import itertools
from collections import Counter

import numpy as np
import pytest

from attnlab.data.recall.data import (
    ANYWHERE,
    BLANK,
    MARK,
    AssociativeRecall,
    NeedleInNoise,
    Problem,
    SelectiveCopying,
    distinct,
)
from attnlab.data.text.windows import IGNORE

VOCAB = 64


def drawn(problem: Problem, length: int, level: float, count: int = 300, seed: int = 1) -> tuple[np.ndarray, ...]:
    tokens, targets = problem.draw(np.random.default_rng(seed), count, length, level)
    assert tokens.shape == targets.shape == (count, length)
    assert tokens.min() >= 0 and tokens.max() < problem.vocab_size
    return tokens, targets


@pytest.mark.parametrize(
    ("length", "pairs", "offset"), [(16, 4, 0), (32, 2, 0), (64, 16, 0), (40, 3, 0), (4, 1, 0), (18, 4, 1), (40, 5, 3)]
)
def test_every_key_is_asked_once_and_its_value_stands_behind_its_first_mention(
    length: int, pairs: int, offset: int
) -> None:
    problem = AssociativeRecall(VOCAB, offset=offset)
    assert problem.complaint(length, pairs) is None
    tokens, targets = drawn(problem, length, pairs)
    assert (tokens[:, :offset] == BLANK).all() and (targets[:, :offset] == IGNORE).all()
    for row, wanted in zip(tokens[:, offset:], targets[:, offset:], strict=True):
        keys, values = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert keys.min() >= 1 and keys.max() < VOCAB // 2 <= values.min()
        asked = np.flatnonzero(wanted != IGNORE)
        assert asked.min() >= 2 * pairs and not (asked % 2).any()
        assert sorted(row[asked]) == sorted(keys)
        known = dict(zip(keys, values, strict=True))
        assert [known[key] for key in row[asked]] == wanted[asked].tolist()
        rest = np.delete(row[2 * pairs :], asked - 2 * pairs)
        assert (rest == BLANK).all()


def test_noise_takes_the_blanks_alone() -> None:
    plain, targets = drawn(AssociativeRecall(VOCAB), 32, 4)
    noisy, same = drawn(AssociativeRecall(VOCAB, noise=True), 32, 4)
    assert (targets == same).all() and (noisy[plain != BLANK] == plain[plain != BLANK]).all()
    assert len(np.unique(noisy[plain == BLANK])) == VOCAB


def test_gaps_follow_the_power_law() -> None:
    """One pair: the share of each gap is its weight; and two pairs: as successive draws without replacement."""
    space, count = 6, 60_000
    for power in (0.01, 1.0):
        weights = np.arange(1, space + 1) ** (power - 1)
        shares = weights / weights.sum()
        problem = AssociativeRecall(VOCAB, power=power)
        single = problem.gaps(np.random.default_rng(1), count, 1, space)[:, 0]
        assert np.bincount(single, minlength=space) / count == pytest.approx(shares, abs=0.008)
        two = problem.gaps(np.random.default_rng(2), count, 2, space)
        for first in range(space):
            for second in set(range(space)) - {first}:
                expected = shares[first] * shares[second] / (1 - shares[first])
                assert (two == (first, second)).all(1).mean() == pytest.approx(expected, abs=0.008)


def test_tokens_are_copied_in_their_order() -> None:
    tokens, targets = drawn(SelectiveCopying(VOCAB), 20, 5)
    places = np.zeros(15)
    for row, wanted in zip(tokens, targets, strict=True):
        assert (row[15:] == MARK).all() and (wanted[:15] == IGNORE).all()
        originals = row[:15][row[:15] != BLANK]
        assert originals.tolist() == wanted[15:].tolist() and originals.min() > MARK
        places += row[:15] != BLANK
    assert places.min() > 0.5 * places.mean()  # scattered over all places


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0, ANYWHERE])
def test_the_needle_stands_once_at_its_depth(depth: float) -> None:
    length = 43
    tokens, targets = drawn(NeedleInNoise(VOCAB), length, depth)
    places = []
    for row, wanted in zip(tokens, targets, strict=True):
        assert (wanted[:-1] == IGNORE).all()
        (place,) = np.flatnonzero(row[:-1] == row[-1])
        assert row[place + 1] == wanted[-1] >= VOCAB // 2 and place + 1 < length - 1
        places.append(place)
    if depth == ANYWHERE:
        assert min(places) == 0 and max(places) == length - 3 and len(set(places)) > 30
    else:
        assert set(places) == {round(depth * (length - 3))}


@pytest.mark.parametrize(("size", "below"), [(1, 1), (2, 4), (3, 4), (4, 4)])
def test_ordered_choices_are_equally_likely(size: int, below: int) -> None:
    count, choices = 24000, list(itertools.permutations(range(below), size))
    rows = distinct(np.random.default_rng(0), count, size, below)
    assert rows.shape == (count, size)
    seen = Counter(map(tuple, rows.tolist()))
    assert set(seen) == set(choices)
    assert max(abs(n / count * len(choices) - 1) for n in seen.values()) < 0.2  # about six standard deviations
