"""Scores of hypotheses against references, by the field's own scorers."""

import re
from collections.abc import Sequence
from typing import Any


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Case-sensitive detokenised corpus BLEU by sacrebleu, with the signature that says how."""
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return {"bleu": round(score.score, 2), "signature": str(metric.get_signature())}


def wer(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Word error rate in percent by jiwer, on lower-cased text without punctuation (apostrophes stay)."""
    import jiwer

    result = jiwer.process_words([normalise(r) for r in references], [normalise(h) for h in hypotheses])
    return {
        "wer": round(100 * result.wer, 2),
        "insertions": result.insertions,
        "deletions": result.deletions,
        "substitutions": result.substitutions,
        "words": result.hits + result.substitutions + result.deletions,
        "signature": "jiwer, lower case, no punctuation but apostrophes",
    }


def normalise(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s']", " ", text.lower()).split())
