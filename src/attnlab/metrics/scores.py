"""Scores of hypotheses against references, by the field's own scorers."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

ALTERNATION = re.compile(r"\{([^{}]*)\}")


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Case-sensitive detokenised corpus BLEU by sacrebleu, with the signature that says how."""
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return {"bleu": round(score.score, 2), "signature": str(metric.get_signature())}


def wer(hypotheses: Sequence[str], references: Sequence[str], *, punctuation: bool = False) -> dict[str, Any]:
    """Word error rate in percent by jiwer, on lower-cased text.

    Without `punctuation`, all signs but apostrophes separate words; with it, words are what stands between spaces.
    A reference may hold NIST's alternations, `{ a / b }` (@: nothing): the one that fits best counts.
    """
    import jiwer

    clean = _words if punctuation else normalise
    spoken = [clean(h) for h in hypotheses]
    meant = [_closest(h, _readings(r), clean) for h, r in zip(spoken, references, strict=True)]
    result = jiwer.process_words(meant, spoken)
    return {
        "wer": round(100 * result.wer, 2),
        "insertions": result.insertions,
        "deletions": result.deletions,
        "substitutions": result.substitutions,
        "words": result.hits + result.substitutions + result.deletions,
        "signature": f"jiwer, lower case, {'words as written' if punctuation else 'no punctuation but apostrophes'}",
    }


def rouge(hypotheses: Sequence[str], references: Sequence[str | Sequence[str]]) -> dict[str, Any]:
    """Mean F of ROUGE-1, 2 and L in percent by rouge-score: lower case, letters and digits, Porter's stems.

    Where a summary has several references, each score is that of its best one.
    """
    from importlib.metadata import version

    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeL")
    scorer = RougeScorer(names, use_stemmer=True)
    targets = [[r] if isinstance(r, str) else list(r) for r in references]
    found = [scorer.score_multi(t, h) for h, t in zip(hypotheses, targets, strict=True)]
    means = {name: round(100 * sum(s[name].fmeasure for s in found) / max(1, len(found)), 2) for name in names}
    return means | {"signature": f"rouge-score {version('rouge-score')}, Porter stems, mean F, best reference"}


def accuracy(found: Sequence[str], wanted: Sequence[str]) -> float:
    """Share of equal labels, in percent."""
    return round(100 * sum(f == w for f, w in zip(found, wanted, strict=True)) / max(1, len(wanted)), 2)


def normalise(text: str) -> str:
    return _words(re.sub(r"[^\w\s']", " ", text))


def _words(text: str) -> str:
    return " ".join(text.lower().split())


def _readings(reference: str) -> list[str]:
    """Every text that a reference with alternations stands for."""
    parts = ALTERNATION.split(reference)  # text, alternatives, text, ...
    if len(parts) == 1 or not all("/" in part for part in parts[1::2]):
        return [reference]
    choices = [text.replace("@", " ").split("/") if i % 2 else [text] for i, text in enumerate(parts)]
    return [" ".join(reading) for reading in itertools.product(*choices)]


def _closest(hypothesis: str, readings: list[str], clean: Callable[[str], str]) -> str:
    import jiwer

    texts = [clean(reading) for reading in readings]
    if len(texts) == 1:
        return texts[0]

    def errors(text: str) -> int:
        result = jiwer.process_words(text, hypothesis)
        return int(result.insertions + result.deletions + result.substitutions)

    return min(texts, key=errors)
