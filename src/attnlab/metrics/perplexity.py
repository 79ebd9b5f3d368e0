"""Perplexity of a language model."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attnlab.errors import DataError
from attnlab.metrics.base import DOUBLE, INTEGER, IndexedMetric


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
        nats = math.fsum(self.column("nats")[order].tolist())
        if not math.isfinite(nats):
            raise DataError(f"the test set's loss is {nats}: the model's logits are NaN or infinite")
        tokens = int(self.column("counts")[order].sum())
        values: dict[str, Any] = {"perplexity": _perplexity(nats, tokens)}
        if self.words_per_token is not None:
            values["perplexity_per_word"] = _perplexity(nats, tokens * self.words_per_token)
        return values | {"tokens": tokens}


def _perplexity(nats: float, count: float) -> float:
    return round(math.exp(min(nats / count, 700.0)), 4)  # exp of more overflows a float64
