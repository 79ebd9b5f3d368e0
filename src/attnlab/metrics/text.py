"""Metrics of corpora: a row of values for each item, and the official scorers of texts.

The scorers are sacrebleu, jiwer and rouge-score.
"""

import inspect
import itertools
import re
from abc import abstractmethod
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pkgutil import iter_modules
from typing import Any, ClassVar

import attnlab.torchvision_schemas  # noqa: F401  (before torchmetrics)

import torch
from torch import Tensor
from torchmetrics import Metric

from attnlab import metrics

Row = tuple[str, str, str, str]  # of predictions.tsv
ALTERNATION = re.compile(r"\{([^{}]*)\}")
ROUGE_NAMES = ("rouge1", "rouge2", "rougeL")


class IndexedMetric(Metric):
    """A metric over a row of values for each item of a corpus.

    `compute()` gathers the rows of all processes, which may have different numbers of rows, or none. A sampler that
    pads gives an index twice; the first row counts.

    Args:
        size: number of items in the corpus; `compute()` needs every index from 0 to size - 1.

    Attributes:
        fields: the names of the columns that `update` takes besides the index.
    """

    full_state_update = False
    fields: tuple[str, ...]

    def __init__(self, size: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.size = size
        self._batches: list[tuple[Any, ...]] = []

    def reset(self) -> None:
        super().reset()
        self._batches = []

    def update(self, index: Tensor | Sequence[int], *values: Any, **columns: Any) -> None:
        """Add B rows. Tensors stay on their device until `compute`.

        Args:
            index: (B,) corpus indices.
            values: the first of `fields`, in their order: a sequence or tensor of B values each.
            columns: the others by name.
        """
        columns |= zip(self.fields, values, strict=False)
        self._batches.append((index, *(columns[name] for name in self.fields)))

    def rows(self) -> list[tuple[Any, ...]]:
        """The values of every item of all processes, in corpus order.

        Raises:
            RuntimeError: an index is outside the corpus, or an item has no row.
        """
        plain = [[x.tolist() if isinstance(x, Tensor) else x for x in batch] for batch in self._batches]
        parts = [[row for batch in plain for row in zip(*batch, strict=True)]]
        if self.distributed_available_fn():
            parts *= torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, parts[0])
        rows: dict[int, tuple[Any, ...]] = {}
        for index, *row in itertools.chain(*parts):
            rows.setdefault(index, tuple(row))
        name, missing = type(self).__name__, [i for i in range(self.size) if i not in rows]
        if outside := rows.keys() - range(self.size):
            raise RuntimeError(f"{name}: index {min(outside)} is outside a corpus of {self.size}")
        if missing:
            raise RuntimeError(
                f"{name}: {len(missing)} of {self.size} items were not scored (the first is number {missing[0]}); the "
                "processes' samplers must cover the corpus"
            )
        return [rows[i] for i in range(self.size)]


class Predictions(IndexedMetric):
    """The rows of predictions.tsv: identifier, source, reference and hypothesis of every item."""

    fields = ("rows",)

    def compute(self) -> list[Row]:
        """All rows in corpus order."""
        return [row for (row,) in self.rows()]


class TextMetric(IndexedMetric):
    """A metric of texts.

    Attributes:
        name: the value of `task.score` that chooses the metric; see `text_metrics`.
        logged: the values that a validation logs, and whether higher ones are better.
    """

    name: ClassVar[str]
    logged: ClassVar[dict[str, bool]]
    fields: tuple[str, ...] = ("hypotheses", "references")

    @abstractmethod
    def compute(self) -> dict[str, Any]:
        """The metric's values."""


def text_metrics() -> dict[str, type[TextMetric]]:
    """The metrics of this folder that score texts, by their `name`: the values of `task.score`."""
    modules = [import_module(f"{metrics.__name__}.{file.name}") for file in iter_modules(metrics.__path__)]
    classes = [metric for module in modules for _, metric in inspect.getmembers(module, inspect.isclass)]
    return {metric.name: metric for metric in classes if issubclass(metric, TextMetric) and "name" in vars(metric)}


# --- metrics of texts ---


def _percent(total: float, count: int) -> float:
    return round(100 * total / max(1, count), 2)


class BLEU(TextMetric):
    """Case-sensitive detokenised corpus BLEU with one reference, by sacrebleu (tokenizer 13a, exponential smoothing).

    torchmetrics' BLEU smooths differently and has no signature.
    """

    name = "bleu"
    logged = {"bleu": True}

    def compute(self) -> dict[str, Any]:
        """`bleu` in percent, rounded to two digits, and sacrebleu's `signature`."""
        from sacrebleu.metrics import BLEU as Scorer

        scorer, (hypotheses, references) = Scorer(), zip(*self.rows(), strict=True)
        score = scorer.corpus_score(hypotheses, [references])
        return {"bleu": round(score.score, 2), "signature": str(scorer.get_signature())}


class WER(TextMetric):
    """Word error rate by jiwer, on lower-cased text.

    All signs but apostrophes separate words. A reference may hold NIST's alternations, `{ a / b }` (@: nothing): the
    reading with the fewest errors counts.
    """

    name = "wer"
    logged = {"wer": False}
    punctuation = False

    def compute(self) -> dict[str, Any]:
        """`wer` in percent (not bounded by 100), rounded to two digits; the error counts, `words` of the references,
        and a `signature`."""
        hypotheses, references = zip(*self.rows(), strict=True)
        return word_errors(hypotheses, references, self.punctuation)


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
    fields = ("hypotheses", "references", "others")

    def compute(self) -> dict[str, Any]:
        """`rouge1`, `rouge2` and `rougeL` in percent, rounded to two digits, and a `signature`."""
        scores = text_scores([(hypothesis, first, *others) for hypothesis, first, others in self.rows()])
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
    """The share of right classes: of the free search, and of a search among the classes alone.

    Where utterances have a text besides their class, the text's word errors are counted as by `WER`.
    """

    name = "intent"
    logged = {"accuracy": True, "accuracy_constrained": True, "wer": False}
    fields = ("labels", "free", "constrained", "hypotheses", "references")

    def compute(self) -> dict[str, Any]:
        """`accuracy` and `accuracy_constrained` in percent, rounded to two digits; WER's values; a `signature`."""
        rows = self.rows()
        values: dict[str, Any] = {
            "accuracy": _percent(sum(free == label for label, free, *_ in rows), len(rows)),
            "accuracy_constrained": _percent(sum(forced == label for label, _, forced, *_ in rows), len(rows)),
        }
        if not any(reference for *_, reference in rows):
            return values | {"signature": "first token of the best hypothesis; constrained: among the classes alone"}
        words = word_errors([hypothesis for *_, hypothesis, _ in rows], [reference for *_, reference in rows])
        return values | words | {"signature": f"first token of the best hypothesis; words: {words['signature']}"}
