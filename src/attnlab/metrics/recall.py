"""Right answers of sequences, over all and for each cell of a grid."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.errors import DataError
from attnlab.metrics.base import DOUBLE, INTEGER, IndexedMetric


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
        nats = math.fsum(self.column("nats")[order].tolist())
        if not math.isfinite(nats):
            raise DataError(f"the test set's loss is {nats}: the model's logits are NaN or infinite")
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
