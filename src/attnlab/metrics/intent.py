"""Accuracy of classes that a text begins with."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attnlab.metrics.base import TextMetric
from attnlab.metrics.wer import word_errors


class IntentAccuracy(TextMetric):
    """How often an utterance's class is right: by the free search, and by a search among the classes alone.

    Where utterances have a text besides their class, the text's word errors are counted as by `WER`.
    Args: those of `TextMetric`.
    """

    name = "intent"
    logged = {"accuracy": True, "accuracy_constrained": True, "wer": False}
    higher_is_better = True

    def update(
        self,
        index: Tensor | Sequence[int],
        labels: Sequence[str],
        free: Sequence[str],
        constrained: Sequence[str],
        hypotheses: Sequence[str],
        references: Sequence[str],
    ) -> None:
        """Adds utterances.

        Args:
            index: (B,) corpus indices.
            labels: B right classes.
            free: the classes that the best hypotheses begin with, or empty strings.
            constrained: the classes of the search whose first token is among the classes.
            hypotheses: the texts after the classes; empty strings where there are none.
            references: the right texts.
        """
        self.append_texts(index, list(zip(labels, free, constrained, hypotheses, references, strict=True)))

    def compute(self) -> dict[str, Any]:
        """`accuracy` and `accuracy_constrained` in percent, rounded to two digits; WER's values; a `signature`."""
        rows = self.texts()
        values: dict[str, Any] = {
            "accuracy": _share(sum(free == label for label, free, *_ in rows), len(rows)),
            "accuracy_constrained": _share(sum(forced == label for label, _, forced, *_ in rows), len(rows)),
        }
        if not any(reference for *_, reference in rows):
            return values | {"signature": "first token of the best hypothesis; constrained: among the classes alone"}
        words = word_errors([hypothesis for *_, hypothesis, _ in rows], [reference for *_, reference in rows])
        return values | words | {"signature": f"first token of the best hypothesis; words: {words['signature']}"}


def _share(right: int, count: int) -> float:
    return round(100 * right / max(1, count), 2)
