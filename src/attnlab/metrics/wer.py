"""Word error rate by jiwer."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

from attnlab.metrics.base import PairMetric

ALTERNATION = re.compile(r"\{([^{}]*)\}")


class WER(PairMetric):
    """Word error rate by jiwer, on lower-cased text.

    A reference may hold NIST's alternations, `{ a / b }` (@: nothing): the reading with the fewest errors counts.

    Args:
        punctuation: True: words are what stands between spaces.  False: all signs but apostrophes separate words.
    """

    name = "wer"
    logged = {"wer": False}
    higher_is_better = False

    def __init__(self, size: int, punctuation: bool = False, **settings: Any) -> None:
        super().__init__(size, **settings)
        self.punctuation = punctuation

    def compute(self) -> dict[str, Any]:
        """`wer` in percent (not bounded by 100), rounded to two digits; the error counts, `words` of the references,
        and a `signature`."""
        rows = self.texts()
        return word_errors([h for h, _ in rows], [r for _, r in rows], self.punctuation)


class WERAsWritten(WER):
    """`WER` of words as they stand between spaces. Arguments are those of `TextMetric`."""

    name = "wer_as_written"

    def __init__(self, size: int, **settings: Any) -> None:
        super().__init__(size, punctuation=True, **settings)


def word_errors(hypotheses: Sequence[str], references: Sequence[str], punctuation: bool = False) -> dict[str, Any]:
    """WER's values of these texts; see `WER`.

    Args:
        hypotheses: what was recognised, a text for each sentence.
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
