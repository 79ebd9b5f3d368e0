"""Metrics of numbers that models give: losses, right answers, logits."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.errors import DataError
from attnlab.metrics.base import DOUBLE, INTEGER, IndexedMetric

NOT_FINITE = -1  # the guesses of an image whose logits are NaN or infinite


class Perplexity(IndexedMetric):
    """exp of the mean negative log-probability of a token over a corpus that is cut into windows.

    The windows decide what is measured: disjoint ones, or sliding ones that predict their last tokens only.  Sums are
    float64 and in corpus order, so that any number of processes gives the same digits.  torchmetrics' Perplexity takes
    logits, which an adaptive softmax does not have, and sums in float32.

    Args:
        words_per_token: words of the text by its tokens, for the perplexity per word; None: not computed.
    """

    higher_is_better = False

    def __init__(self, size: int, words_per_token: float | None = None, **settings: Any) -> None:
        super().__init__(size, {"nats": DOUBLE, "counts": INTEGER}, **settings)
        self.words_per_token = words_per_token

    def update(self, index: Tensor | Sequence[int], nats: Tensor, counts: Tensor) -> None:
        """Adds windows.

        Args:
            index: (B,) indices of the windows.
            nats: (B,) negative log-probabilities, summed over each window's targets, in nats.
            counts: (B,) number of targets of each window.
        """
        self.append(index, nats=nats, counts=counts)

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


class Answers(IndexedMetric):
    """How often an answer is right, and the negative log-probability of a token of the right answer.

    The loss is the mean over questions of each answer's mean over its tokens, in nats, as the papers give it.
    """

    higher_is_better = True

    def __init__(self, size: int, **settings: Any) -> None:
        super().__init__(size, {"right": INTEGER, "nats": DOUBLE, "tokens": INTEGER}, **settings)

    def update(self, index: Tensor | Sequence[int], right: Tensor, nats: Tensor, tokens: Tensor) -> None:
        """Adds questions.

        Args:
            index: (B,) indices of the questions.
            right: (B,) whether the answer is right.
            nats: (B,) negative log-probability of the right answer, summed over its tokens.
            tokens: (B,) the number by which `nats` is divided.
        """
        self.append(index, right=right, nats=nats, tokens=tokens)

    def compute(self) -> dict[str, Any]:
        """`accuracy` in percent and `loss` in nats per token, each with its standard error, and `questions`.

        The error of the accuracy is that of a binomial share, sqrt(p (1 - p) / n); that of the loss is the sample's
        standard deviation over sqrt(n).

        Raises:
            DataError: a loss is NaN or infinite.
        """
        order = self.order()
        losses = self.column("nats")[order] / self.column("tokens")[order]
        wrong = (~losses.isfinite()).nonzero().flatten()
        if len(wrong):
            which = f"{len(wrong)} of {self.size} questions (the first is number {int(wrong[0])})"
            raise DataError(f"the loss is NaN or infinite for {which}")
        share = int(self.column("right")[order].sum()) / self.size
        mean = math.fsum(losses.tolist()) / self.size
        spread = math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses.tolist()) / max(1, self.size - 1))
        return {
            "accuracy": round(100 * share, 3),
            "accuracy_stderr": round(100 * math.sqrt(share * (1 - share) / self.size), 3),
            "loss": round(mean, 5),
            "loss_stderr": round(spread / math.sqrt(self.size), 5),
            "questions": self.size,
        }


class RecallAccuracy(IndexedMetric):
    """The mean over sequences of the share of right answers, and the loss of an answer.

    Zoology's accuracy: a sequence with many answers counts as much as one with few.

    Args:
        cells: name and number of sequences of each cell; the corpus has them one after another.
    """

    higher_is_better = True

    def __init__(self, cells: Sequence[tuple[str, int]], **settings: Any) -> None:
        columns = {"nats": DOUBLE, "right": INTEGER, "counts": INTEGER}
        super().__init__(sum(count for _, count in cells), columns, **settings)
        self.cells = list(cells)

    def update(self, index: Tensor | Sequence[int], nats: Tensor, right: Tensor, counts: Tensor) -> None:
        """Adds sequences.

        Args:
            index: (B,) indices of the sequences.
            nats: (B,) negative log-probabilities, summed over each sequence's answers.
            right: (B,) number of right answers.
            counts: (B,) number of answers.
        """
        self.append(index, nats=nats, right=right, counts=counts)

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

    torchmetrics' MulticlassAccuracy counts in float32 sums; here the counts are ints.

    Args:
        classes: number of classes; with fewer than five, "top five" is all of them.
    """

    higher_is_better = True

    def __init__(self, size: int, classes: int, **settings: Any) -> None:
        self.many = min(5, classes)
        super().__init__(size, {"labels": INTEGER, "guesses": INTEGER.new_empty(0, self.many)}, **settings)

    def update(self, index: Tensor | Sequence[int], logits: Tensor, labels: Tensor) -> None:
        """Adds images.

        Args:
            index: (B,) corpus indices.
            logits: (B, classes).
            labels: (B,) right classes.
        """
        guesses = logits.float().topk(self.many).indices
        finite = logits.isfinite().all(-1, keepdim=True)
        self.append(index, labels=labels, guesses=guesses.masked_fill(~finite, NOT_FINITE))

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
