"""ROUGE by rouge-score."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from torch import Tensor

from attnlab.metrics.base import TextMetric

NAMES = ("rouge1", "rouge2", "rougeL")


class ROUGE(TextMetric):
    """Mean F of ROUGE-1, 2 and L by rouge-score: lower case, letters and digits, Porter's stems.

    Where a text has several references, each score is that of its best one.  torchmetrics' ROUGE downloads a
    sentence splitter.  Args: those of `TextMetric`.
    """

    name = "rouge"
    logged = dict.fromkeys(NAMES, True)
    higher_is_better = True

    def update(
        self,
        index: Tensor | Sequence[int],
        hypotheses: Sequence[str],
        references: Sequence[str],
        others: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Adds texts.

        Args:
            index: (B,) corpus indices.
            others: further references of each text; None: there are none.
        """
        further = others or [()] * len(references)
        rows = [(h, r, *more) for h, r, more in zip(hypotheses, references, further, strict=True)]
        self.append_texts(index, rows)

    def compute(self) -> dict[str, Any]:
        """`rouge1`, `rouge2` and `rougeL` in percent, rounded to two digits, and a `signature`."""
        scores = text_scores(self.texts())
        means = {name: round(100 * sum(score[name] for score in scores) / max(1, len(scores)), 2) for name in NAMES}
        return means | {"signature": f"rouge-score {version('rouge-score')}, Porter stems, mean F, best reference"}


def text_scores(rows: Sequence[Sequence[str]]) -> list[dict[str, float]]:
    """F of ROUGE-1, 2 and L of each text, between 0 and 1."""
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    scorer = RougeScorer(NAMES, tokenizer=DefaultTokenizer(use_stemmer=True))  # without one it logs a line
    scores = [scorer.score_multi(references, hypothesis) for hypothesis, *references in rows]
    return [{name: score[name].fmeasure for name in NAMES} for score in scores]
