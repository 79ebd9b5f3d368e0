"""Metrics of numbers that models give: losses, right answers, logits."""

import math
from collections.abc import Sequence
from itertools import islice
from statistics import NormalDist
from typing import Any

from torch import Tensor

from attnlab.errors import DataError
from attnlab.metrics.text import IndexedMetric

NOT_FINITE = -1  # the guesses of an image whose logits are NaN or infinite


class Perplexity(IndexedMetric):
    """exp of the mean negative log-probability of a token over a corpus that is cut into windows.

    The windows decide what is measured: disjoint ones, or sliding ones that predict their last tokens only.  Sums are
    float64 and in corpus order, so that any number of processes gives the same digits.  torchmetrics' Perplexity takes
    logits, which an adaptive softmax does not have, and sums in float32.

    `update` takes for each window `nats`, the negative log-probabilities summed over its targets, and `counts`, the
    number of targets, both (B,).

    Args:
        words_per_token: words of the text by its tokens, for the perplexity per word; None: not computed.
    """

    fields = ("nats", "counts")

    def __init__(self, size: int, words_per_token: float | None = None, **settings: Any) -> None:
        super().__init__(size, **settings)
        self.words_per_token = words_per_token

    def compute(self) -> dict[str, Any]:
        """`perplexity`, with `words_per_token` also `perplexity_per_word`, rounded to four digits; `tokens`.

        `perplexity_interval` and `perplexity_per_word_interval` have the ends of their 95 % intervals, see
        :func:`exp_of_mean`. One window has none.

        Raises:
            DataError: the sum is NaN or infinite.
        """
        losses, counts = zip(*self.rows(), strict=True)
        nats, tokens = _finite_sum(losses), int(sum(counts))
        values: dict[str, Any] = {"perplexity": _perplexity(nats, tokens)}
        if self.words_per_token is not None:
            values["perplexity_per_word"] = _perplexity(nats, tokens * self.words_per_token)
        if interval := exp_of_mean(losses, counts)[1]:
            values["perplexity_interval"] = interval
            if self.words_per_token is not None:
                words = [count * self.words_per_token for count in counts]
                values["perplexity_per_word_interval"] = exp_of_mean(losses, words)[1]
        return values | {"tokens": tokens}


def exp_of_mean(nats: Sequence[float], counts: Sequence[float]) -> tuple[float, list[float] | None]:
    """exp of the mean of a token, and the ends of its 95 % interval, over windows; None: there is one window.

    With r_i = nats_i - mean counts_i of n windows, the variance of the mean is n / (n - 1) sum r_i^2 / (sum counts)^2
    (the linearised ratio of two sums; Cochran 1977, section 2.11). The interval is exp(mean -+ t s), with Student's t
    for n - 1 degrees of freedom. Windows count as independent, so that it is too narrow where neighbours are alike.

    Args:
        nats: sums of the windows' negative log-probabilities, or differences of two models', for a ratio of
            perplexities.
        counts: tokens of the windows.
    """
    from scipy.stats import t

    tokens, windows = math.fsum(counts), len(nats)
    mean = math.fsum(nats) / tokens
    if windows < 2:
        return _exp(mean), None
    rest = math.fsum((x - mean * count) ** 2 for x, count in zip(nats, counts, strict=True))
    width = float(t.ppf(0.975, windows - 1)) * math.sqrt(windows / (windows - 1) * rest) / tokens
    return _exp(mean), [_exp(mean - width), _exp(mean + width)]


def wilson(share: float, count: int) -> list[float]:
    """The ends of Wilson's 95 % interval of a share of `count` independent questions, rounded to four digits."""
    z = NormalDist().inv_cdf(0.975)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    width = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / (1 + z * z / count)
    return [round(max(0.0, middle - width), 4), round(min(1.0, middle + width), 4)]


def _finite_sum(nats: Sequence[float]) -> float:
    total = math.fsum(nats)
    if not math.isfinite(total):
        raise DataError(f"the test set's loss is {total}: the model's logits are NaN or infinite")
    return total


def _perplexity(nats: float, count: float) -> float:
    return _exp(nats / count)


def _exp(value: float) -> float:
    return round(math.exp(min(value, 700.0)), 4)  # exp of more overflows a float64


class RecallAccuracy(IndexedMetric):
    """The mean over sequences of the share of right answers, and the loss of an answer.

    Zoology's accuracy: a sequence with many answers counts as much as one with few. `update` takes for each sequence
    `nats`, the negative log-probabilities summed over its answers, the number of `right` answers and their `counts`.

    Args:
        cells: name and number of sequences of each cell; the corpus has them one after another.
    """

    fields = ("nats", "right", "counts")

    def __init__(self, cells: Sequence[tuple[str, int]], **settings: Any) -> None:
        super().__init__(sum(count for _, count in cells), **settings)
        self.cells = list(cells)

    def compute(self) -> dict[str, Any]:
        """`accuracy` and `loss`, `cells`: the accuracy of each cell by its name, and `sequences`, `answers`.

        Raises:
            DataError: the loss is NaN or infinite.
        """
        nats, right, counts = zip(*self.rows(), strict=True)
        shares, answers = [a / b for a, b in zip(right, counts, strict=True)], sum(counts)
        rest = iter(shares)
        return {
            "accuracy": _mean(shares),
            "loss": round(_finite_sum(nats) / answers, 4),
            "cells": {name: _mean([*islice(rest, count)]) for name, count in self.cells},
            "sequences": self.size,
            "answers": answers,
        }


def _mean(shares: Sequence[float]) -> float:
    return round(math.fsum(shares) / len(shares), 4)


class TopAccuracy(IndexedMetric):
    """The share of items whose class is the most probable one, and among the five most probable ones.

    Counts are ints; torchmetrics' MulticlassAccuracy sums in float32. `update` takes `logits`, (B, classes), and
    `labels`, (B,).

    Args:
        classes: number of classes; with fewer than five, "top five" is all of them.
    """

    fields = ("logits", "labels")

    def __init__(self, size: int, classes: int, **settings: Any) -> None:
        super().__init__(size, **settings)
        self.many = min(5, classes)

    def update(self, index: Tensor | Sequence[int], logits: Tensor, labels: Tensor) -> None:
        # stable: of equal logits, as bfloat16 has them, the first counts as with argmax
        guesses = logits.float().argsort(dim=-1, descending=True, stable=True)[:, : self.many]
        finite = logits.isfinite().all(-1, keepdim=True)
        super().update(index, guesses.masked_fill(~finite, NOT_FINITE), labels)

    def compute(self) -> dict[str, Any]:
        """`top1` and `top5` in percent, rounded to three digits, and the number of `images`.

        Raises:
            DataError: logits are NaN or infinite.
        """
        rows = self.rows()
        if wrong := [i for i, (guesses, _) in enumerate(rows) if guesses[0] == NOT_FINITE]:
            which = f"{len(wrong)} of {self.size} images (the first is number {wrong[0]})"
            raise DataError(f"the model's logits are NaN or infinite for {which}")
        right = {"top1": sum(guesses[0] == label for guesses, label in rows)}
        right["top5"] = sum(label in guesses for guesses, label in rows)
        return {name: round(100 * count / self.size, 3) for name, count in right.items()} | {"images": self.size}
