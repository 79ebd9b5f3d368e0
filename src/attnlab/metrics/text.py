"""Metrics of texts, by the official scorers: sacrebleu, jiwer and rouge-score."""

import itertools
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from torch import Tensor

from attnlab.metrics.base import TextMetric

ALTERNATION = re.compile(r"\{([^{}]*)\}")
ROUGE_NAMES = ("rouge1", "rouge2", "rougeL")


def _percent(total: float, count: int) -> float:
    return round(100 * total / max(1, count), 2)


class BLEU(TextMetric):
    """Case-sensitive detokenised corpus BLEU with one reference, by sacrebleu (tokenizer 13a, exponential smoothing).

    torchmetrics' BLEU smooths differently and has no signature.
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


class WER(TextMetric):
    """Word error rate by jiwer, on lower-cased text.

    All signs but apostrophes separate words. A reference may hold NIST's alternations, `{ a / b }` (@: nothing): the
    reading with the fewest errors counts.
    """

    name = "wer"
    logged = {"wer": False}
    higher_is_better = False
    punctuation = False

    def compute(self) -> dict[str, Any]:
        """`wer` in percent (not bounded by 100), rounded to two digits; the error counts, `words` of the references,
        and a `signature`."""
        rows = self.texts()
        return word_errors([h for h, _ in rows], [r for _, r in rows], self.punctuation)


class WERAsWritten(WER):
    """`WER` of words as they stand between spaces."""

    name = "wer_as_written"
    punctuation = True


def word_errors(hypotheses: Sequence[str], references: Sequence[str], punctuation: bool = False) -> dict[str, Any]:
    """WER's values of these texts; see `WER`.

    Args:
        punctuation: True: words are what stands between spaces. False: all signs but apostrophes separate words.
    """
    import jiwer

    spoken = [normalise(h, punctuation) for h in hypotheses]
    meant = [
        _closest(h, [normalise(text, punctuation) for text in _readings(r)])
        for h, r in zip(spoken, references, strict=True)
    ]
    result = jiwer.process_words(meant, spoken)
    return {
        "wer": round(100 * result.wer, 2),
        "insertions": result.insertions,
        "deletions": result.deletions,
        "substitutions": result.substitutions,
        "words": result.hits + result.substitutions + result.deletions,
        "signature": f"jiwer, lower case, {'words as written' if punctuation else 'no punctuation but apostrophes'}",
    }


def normalise(text: str, punctuation: bool = False) -> str:
    """Lower case, single spaces; without `punctuation`, signs other than apostrophes become spaces."""
    return " ".join((text if punctuation else re.sub(r"[^\w\s']", " ", text)).lower().split())


def _readings(reference: str) -> list[str]:
    """Every text that a reference with alternations stands for."""
    parts = ALTERNATION.split(reference)  # text, alternatives, text, ...
    if len(parts) == 1 or not all("/" in part for part in parts[1::2]):
        return [reference]
    choices = [text.replace("@", " ").split("/") if i % 2 else [text] for i, text in enumerate(parts)]
    return [" ".join(reading) for reading in itertools.product(*choices)]


def _closest(hypothesis: str, texts: list[str]) -> str:
    """The text with the fewest errors; the first of equals."""
    import jiwer

    if len(texts) == 1:
        return texts[0]

    def errors(text: str) -> int:
        result = jiwer.process_words(text, hypothesis)
        return int(result.insertions + result.deletions + result.substitutions)

    return min(texts, key=errors)


class ROUGE(TextMetric):
    """Mean F of ROUGE-1, 2 and L by rouge-score: lower case, letters and digits, Porter's stems.

    Where a text has several references (`others`: those after the first), each score is that of its best one.
    torchmetrics' ROUGE downloads a sentence splitter.
    """

    name = "rouge"
    logged = dict.fromkeys(ROUGE_NAMES, True)
    higher_is_better = True
    fields = ("hypotheses", "references", "others")

    def append(self, index: Tensor | Sequence[int], **columns: Any) -> None:
        references = columns["references"]
        others = columns.get("others") or [()] * len(references)
        rows = [(h, r, *more) for h, r, more in zip(columns["hypotheses"], references, others, strict=True)]
        self.append_texts(index, rows)

    def compute(self) -> dict[str, Any]:
        """`rouge1`, `rouge2` and `rougeL` in percent, rounded to two digits, and a `signature`."""
        scores = text_scores(self.texts())
        means = {name: _percent(sum(score[name] for score in scores), len(scores)) for name in ROUGE_NAMES}
        return means | {"signature": f"rouge-score {version('rouge-score')}, Porter stems, mean F, best reference"}


def text_scores(rows: Sequence[Sequence[str]]) -> list[dict[str, float]]:
    """F of ROUGE-1, 2 and L of each text, between 0 and 1."""
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    scorer = RougeScorer(ROUGE_NAMES, tokenizer=DefaultTokenizer(use_stemmer=True))  # without one it logs a line
    scores = [scorer.score_multi(references, hypothesis) for hypothesis, *references in rows]
    return [{name: score[name].fmeasure for name in ROUGE_NAMES} for score in scores]


class IntentAccuracy(TextMetric):
    """How often an utterance's class is right: by the free search, and by a search among the classes alone.

    Where utterances have a text besides their class, the text's word errors are counted as by `WER`.
    """

    name = "intent"
    logged = {"accuracy": True, "accuracy_constrained": True, "wer": False}
    higher_is_better = True
    fields = ("labels", "free", "constrained", "hypotheses", "references")

    def compute(self) -> dict[str, Any]:
        """`accuracy` and `accuracy_constrained` in percent, rounded to two digits; WER's values; a `signature`."""
        rows = self.texts()
        values: dict[str, Any] = {
            "accuracy": _percent(sum(free == label for label, free, *_ in rows), len(rows)),
            "accuracy_constrained": _percent(sum(forced == label for label, _, forced, *_ in rows), len(rows)),
        }
        if not any(reference for *_, reference in rows):
            return values | {"signature": "first token of the best hypothesis; constrained: among the classes alone"}
        words = word_errors([hypothesis for *_, hypothesis, _ in rows], [reference for *_, reference in rows])
        return values | words | {"signature": f"first token of the best hypothesis; words: {words['signature']}"}
