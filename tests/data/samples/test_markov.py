"""The generated language: its entropy is the computed one."""

import math

import numpy as np

from attnlab.data.samples.markov import CHOICES, Source


def nats(source: Source, line: str) -> float:
    """The negative log-likelihood of a line and its end, in nats."""
    ids = [source.words.index(word) for word in line.split()]
    cost = -math.log(source.stop) - (len(ids) - 1) * math.log1p(-source.stop)
    for i, word in enumerate(ids):
        cost -= math.log(CHOICES[source.following[*source.context(ids, i)].tolist().index(word)])
    return cost


def test_the_entropy_is_that_of_the_texts() -> None:
    """-log p of the texts by the source itself, per word or line end; the closed form is its mean."""
    source = Source()
    lines = list(source.lines("train", 4000))
    costs = np.array([nats(source, line) for line in lines])
    sizes = np.array([len(line.split()) + 1 for line in lines])
    spread = (costs - source.entropy * sizes).std() / len(lines) ** 0.5 / sizes.mean()
    assert abs(costs.sum() / sizes.sum() - source.entropy) < 4 * spread < 0.03
