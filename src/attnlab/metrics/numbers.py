"""Metrics of numbers that models give: losses, right answers, logits."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.errors import DataError
from attnlab.metrics.text import DOUBLE, INTEGER, IndexedMetric

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

    higher_is_better = False

    def __init__(self, size: int, words_per_token: float | None = None, **settings: Any) -> None:
        super().__init__(size, {"nats": DOUBLE, "counts": INTEGER}, **settings)
        self.words_per_token = words_per_token

    def compute(self) -> dict[str, Any]:
        """`perplexity`, with `words_per_token` also `perplexity_per_word`, rounded to four digits; `tokens`.

        Raises:
            DataError: the sum is NaN or infinite.
        """
        order = self.order()
        nats = _finite_sum(self.column("nats")[order])
        tokens = int(self.column("counts")[order].sum())
        values: dict[str, Any] = {"perplexity": _perplexity(nats, tokens)}
        if self.words_per_token is not None:
            values["perplexity_per_word"] = _perplexity(nats, tokens * self.words_per_token)
        return values | {"tokens": tokens}


def _finite_sum(nats: Tensor) -> float:
    total = math.fsum(nats.tolist())
    if not math.isfinite(total):
        raise DataError(f"the test set's loss is {total}: the model's logits are NaN or infinite")
    return total


def _perplexity(nats: float, count: float) -> float:
    return round(math.exp(min(nats / count, 700.0)), 4)  # exp of more overflows a float64


class RecallAccuracy(IndexedMetric):
    """The mean over sequences of the share of right answers, and the loss of an answer.

    Zoology's accuracy: a sequence with many answers counts as much as one with few. `update` takes for each sequence
    `nats`, the negative log-probabilities summed over its answers, the number of `right` answers and their `counts`.

    Args:
        cells: name and number of sequences of each cell; the corpus has them one after another.
    """

    higher_is_better = True

    def __init__(self, cells: Sequence[tuple[str, int]], **settings: Any) -> None:
        columns = {"nats": DOUBLE, "right": INTEGER, "counts": INTEGER}
        super().__init__(sum(count for _, count in cells), columns, **settings)
        self.cells = list(cells)

    def compute(self) -> dict[str, Any]:
        """`accuracy` and `loss`, `cells`: the accuracy of each cell by its name, and `sequences`, `answers`.

        Raises:
            DataError: the loss is NaN or infinite.
        """
        order = self.order()
        right, counts = self.column("right")[order], self.column("counts")[order]
        nats = _finite_sum(self.column("nats")[order])
        shares = (right.double() / counts).split([count for _, count in self.cells])
        answers = int(counts.sum())
        return {
            "accuracy": _mean(torch.cat(shares)),
            "loss": round(nats / answers, 4),
            "cells": {name: _mean(part) for (name, _), part in zip(self.cells, shares, strict=True)},
            "sequences": self.size,
            "answers": answers,
        }


def _mean(shares: Tensor) -> float:
    return round(math.fsum(shares.tolist()) / len(shares), 4)


class TopAccuracy(IndexedMetric):
    """How often the right class is the most probable one, and among the five most probable ones.

    torchmetrics' MulticlassAccuracy counts in float32 sums; here the counts are ints. `update` takes `logits`,
    (B, classes), and `labels`, (B,).

    Args:
        classes: number of classes; with fewer than five, "top five" is all of them.
    """

    higher_is_better = True
    fields = ("logits", "labels")

    def __init__(self, size: int, classes: int, **settings: Any) -> None:
        self.many = min(5, classes)
        super().__init__(size, {"labels": INTEGER, "guesses": INTEGER.new_empty(0, self.many)}, **settings)

    def append(self, index: Tensor | Sequence[int], **columns: Any) -> None:
        logits = columns["logits"]
        guesses = logits.float().topk(self.many).indices
        finite = logits.isfinite().all(-1, keepdim=True)
        super().append(index, labels=columns["labels"], guesses=guesses.masked_fill(~finite, NOT_FINITE))

    def compute(self) -> dict[str, Any]:
        """`top1` and `top5` in percent, rounded to three digits, and the number of `images`.

        Raises:
            DataError: logits are NaN or infinite.
        """
        order = self.order()
        guesses = self.column("guesses")[order]
        wrong = (guesses[:, 0] == NOT_FINITE).nonzero().flatten()
        if len(wrong):
            which = f"{len(wrong)} of {self.size} images (the first is number {int(wrong[0])})"
            raise DataError(f"the model's logits are NaN or infinite for {which}")
        hits = guesses == self.column("labels")[order, None]
        shares = {"top1": int(hits[:, 0].sum()), "top5": int(hits.any(-1).sum())}
        return {name: round(100 * right / self.size, 3) for name, right in shares.items()} | {"images": self.size}
