"""BLEU by sacrebleu."""

from typing import Any

from attnlab.metrics.base import PairMetric


class BLEU(PairMetric):
    """Case-sensitive detokenised corpus BLEU with one reference, by sacrebleu (tokenizer 13a, exponential smoothing).

    torchmetrics' BLEU smooths differently and has no signature.  Args: those of `TextMetric`.
    """

    name = "bleu"
    logged = {"bleu": True}
    higher_is_better = True

    def compute(self) -> dict[str, Any]:
        """`bleu` in percent, rounded to two digits, and sacrebleu's `signature`."""
        from sacrebleu.metrics import BLEU as Scorer

        rows = self.texts()
        scorer = Scorer()
        score = scorer.corpus_score([hypothesis for hypothesis, _ in rows], [[reference for _, reference in rows]])
        return {"bleu": round(score.score, 2), "signature": str(scorer.get_signature())}
