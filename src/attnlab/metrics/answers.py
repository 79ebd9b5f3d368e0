"""Accuracy and log loss of answers, with standard errors."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attnlab.errors import DataError
from attnlab.metrics.base import DOUBLE, INTEGER, IndexedMetric


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
