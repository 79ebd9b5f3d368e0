"""Shared code of metrics, rows of tensors under corpus indices, and metrics of texts by the official scorers.

The scorers are sacrebleu, jiwer and rouge-score. Texts are stored as UTF-8 tensors.
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

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from attnlab import metrics

Row = tuple[str, str, str, str]  # of predictions.tsv
INTEGER, DOUBLE = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
ALTERNATION = re.compile(r"\{([^{}]*)\}")
ROUGE_NAMES = ("rouge1", "rouge2", "rougeL")


class IndexedMetric(Metric):
    """Rows of tensors, each stored under its item's index in the corpus.

    On `compute()` the rows of all processes are gathered with padded collectives; processes may hold different numbers
    of rows, or none.  Of rows with the same index (a sampler that pads) the first one counts.

    Args:
        size: number of items in the corpus; `compute()` needs every index from 0 to size - 1.
        columns: an empty tensor of shape (0, ...) for each column besides the index: its dtype and the shape of a row.

    Attributes:
        fields: the names of what `update` takes besides the index; by default the columns.
    """

    full_state_update = False
    fields: tuple[str, ...] = ()

    def __init__(self, size: int, columns: dict[str, Tensor], **settings: Any) -> None:
        super().__init__(**settings)
        self.size = size
        self._empty = {"index": INTEGER} | columns
        self.fields = type(self).fields or tuple(columns)
        for name in self._empty:
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, index: Tensor | Sequence[int], *values: Any, **columns: Any) -> None:
        """Adds rows.

        Args:
            index: (B,) corpus indices.
            values: the first of `fields`, in their order.
            columns: the others by name.
        """
        self.append(index, **dict(zip(self.fields, values, strict=False)), **columns)

    def append(self, index: Tensor | Sequence[int], **columns: Any) -> None:
        """Stores every column; row b belongs to index[b], unless the subclass arranges it otherwise."""
        for name, value in {"index": torch.as_tensor(index), **columns}.items():
            getattr(self, name).append(value.detach().to(self.device, self._empty[name].dtype))

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """As in torchmetrics, whose stand-in for a process without rows is float32 and one-dimensional."""
        for name, empty in self._empty.items():
            if not len(getattr(self, name)):
                setattr(self, name, [empty.to(self.device)])
        super().sync(*args, **kwargs)

    def column(self, name: str) -> Tensor:
        """All rows of a column on the CPU, in the order in which they arrived."""
        value = getattr(self, name)
        if isinstance(value, Tensor):  # after a gather
            return value.cpu()
        return torch.cat(value).cpu() if value else self._empty[name]

    def order(self) -> Tensor:
        """(size,) the row of each corpus index. RuntimeError: an index outside the corpus, or an item without a row."""
        index = self.column("index")
        outside = index[(index < 0) | (index >= self.size)]
        if len(outside):
            raise RuntimeError(f"{type(self).__name__}: index {int(outside[0])} is outside a corpus of {self.size}")
        rows = torch.arange(len(index))
        first = torch.full((self.size,), len(index)).scatter_reduce_(0, index, rows, "amin")
        missing = (first == len(index)).nonzero().flatten()
        if len(missing):
            raise RuntimeError(
                f"{type(self).__name__}: {len(missing)} of {self.size} items were not scored (the first is number "
                f"{int(missing[0])}); the processes' samplers must cover the corpus"
            )
        return first


class TextMetric(IndexedMetric):
    """Texts under corpus indices; `update` takes B texts for each of `fields`.

    Strings cannot be gathered as they are, so they are stored as one uint8 buffer of UTF-8 with the length of each text
    in bytes and the number of texts of each row.

    Attributes:
        name: the value of `task.score` that chooses the metric; see `text_metrics`.
        logged: the values that a validation logs, and whether higher ones are better.
    """

    name: ClassVar[str]
    logged: ClassVar[dict[str, bool]]
    fields: tuple[str, ...] = ("hypotheses", "references")

    def __init__(self, size: int, **settings: Any) -> None:
        buffer = torch.empty(0, dtype=torch.uint8)
        super().__init__(size, {"counts": INTEGER, "lengths": INTEGER, "buffer": buffer}, **settings)

    def append(self, index: Tensor | Sequence[int], **columns: Any) -> None:
        self.append_texts(index, list(zip(*(columns[name] for name in self.fields), strict=True)))

    def append_texts(self, index: Tensor | Sequence[int], rows: Sequence[Sequence[str]]) -> None:
        """Adds B rows of any number of texts each."""
        encoded = [text.encode("utf-8", "surrogatepass") for row in rows for text in row]
        super().append(
            index,
            counts=torch.tensor([len(row) for _, row in zip(index, rows, strict=True)], dtype=torch.int64),
            lengths=torch.tensor([len(text) for text in encoded], dtype=torch.int64),
            buffer=torch.from_numpy(np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()),
        )

    def texts(self) -> list[tuple[str, ...]]:
        """The texts of every item in corpus order."""
        order = self.order().tolist()
        buffer = self.column("buffer").numpy().tobytes()
        ends = [0, *self.column("lengths").cumsum(0).tolist()]
        texts = [buffer[a:b].decode("utf-8", "surrogatepass") for a, b in itertools.pairwise(ends)]
        first = [0, *self.column("counts").cumsum(0).tolist()]
        return [tuple(texts[first[row] : first[row + 1]]) for row in order]

    @abstractmethod
    def compute(self) -> Any:
        """The metric's values."""


class Predictions(TextMetric):
    """The rows of predictions.tsv: identifier, source, reference and hypothesis of every item."""

    fields = ("rows",)

    def append(self, index: Tensor | Sequence[int], **columns: Any) -> None:
        self.append_texts(index, columns["rows"])

    def compute(self) -> list[Row]:
        """All rows in corpus order."""
        return [(id, source, reference, hypothesis) for id, source, reference, hypothesis in self.texts()]


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
