"""Metrics of corpora: a row of values for each item, and the official scorers of texts.

The scorers are sacrebleu, jiwer and rouge-score.
"""

import inspect
import itertools
import operator
import os
import socket
import unicodedata
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pkgutil import iter_modules
from typing import Any, ClassVar

import attnlab.torchvision_schemas  # noqa: F401  (before torchmetrics)

import torch
from torch import Tensor
from torchmetrics import Metric

from attnlab import metrics
from attnlab.errors import ConfigError, DataError
from attnlab.metrics import words as scripts
from attnlab.metrics.alternations import closest_reading

Row = tuple[str, str, str, str]  # of predictions.tsv
ROUGE_NAMES = ("rouge1", "rouge2", "rougeL")
DOWNLOAD_SECONDS = 20.0  # without an answer
BEYOND_ASCII = 0.005  # share of the letters; English has a tenth of it, Italian twice as many, German thrice


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

    Args:
        tokenize: one of `tokenizers`, which splits texts into words; None: :meth:`choose` takes the one that fits.
        language: the code of the references' language, such as zh; None: their script tells as much as is needed.

    Attributes:
        name: the value of `task.score` that chooses the metric; see `text_metrics`.
        logged: the values that a validation logs, and whether higher ones are better.
        tokenizers: the values of `task.score.tokenize` that the metric takes.
        about: values about how texts are split, which `compute` adds.

    Raises:
        ConfigError: a tokenizer of another metric, or one that this machine lacks.
    """

    name: ClassVar[str]
    logged: ClassVar[dict[str, bool]]
    tokenizers: ClassVar[tuple[str, ...]] = ()
    fields: tuple[str, ...] = ("hypotheses", "references")

    def __init__(self, size: int, tokenize: str | None = None, language: str | None = None, **settings: Any) -> None:
        super().__init__(size, **settings)
        if tokenize is not None and tokenize not in self.tokenizers:
            expected = f"expected {', '.join(self.tokenizers)}" if self.tokenizers else "it has no tokenizers; null"
            raise ConfigError(f"task.score.tokenize={tokenize}: not of the metric {self.name}; {expected}")
        self.tokenize, self.language = tokenize, language
        self.about: dict[str, Any] = {}
        self.chosen = False

    def choose(self, references: Sequence[str]) -> None:
        """Choose once how texts are split, and fill `about`; its `warnings` say what does not fit these references.

        `compute` calls it with the references that were scored, which does nothing after an earlier call.

        Raises:
            ConfigError: this machine lacks the tokenizer.
            DataError: no reference has a word.
        """
        if not self.chosen and (warnings := self.split(references)):
            self.about["warnings"] = warnings
        self.chosen = True

    def split(self, references: Sequence[str]) -> list[str]:
        """Set `tokenize` and the values of `about` by these references. Returns warnings, of a line each."""
        return []

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


def _wordless(words: Sequence[Any], meaning: str) -> list[str]:
    """The warning of references without words, of the words of each. DataError: no reference has one."""
    count = sum(map(operator.not_, words))
    if words and count == len(words):
        raise DataError(f"none of {count} references has a word: there is nothing to score")
    return [f"{count} of {len(words)} references have no words: {meaning}"] if count else []


class BLEU(TextMetric):
    """Case-sensitive detokenised corpus BLEU and chrF with one reference, by sacrebleu (exponential smoothing).

    BLEU's tokenizer is the one that sacrebleu recommends for the language of the references: zh, ja-mecab, ko-mecab,
    13a for all others. Thai, Lao, Khmer, Burmese and Tibetan have no blanks between words, and no tokenizer that is
    recommended: they are split into characters. torchmetrics' BLEU smooths differently and has no signature.
    """

    name = "bleu"
    logged = {"bleu": True}
    tokenizers = ("13a", "zh", "ja-mecab", "ko-mecab", "flores200", "char", "none")
    by_language: ClassVar[dict[str, str]] = dict.fromkeys(("th", "lo", "km", "my", "bo"), "char")
    by_language |= {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}

    def __init__(self, size: int, tokenize: str | None = None, language: str | None = None, **settings: Any) -> None:
        super().__init__(size, tokenize, language, **settings)
        code = scripts.language(language)
        self.about["tokenize_by"] = "task.score.tokenize" if tokenize else f"the target language {language}"
        self.tokenize = tokenize or self.by_language.get(code or "")
        if self.tokenize:
            bleu_scorer(self.tokenize)

    def split(self, references: Sequence[str]) -> list[str]:
        code = scripts.language_of(references)
        fitting = self.by_language.get(code or "", "13a")
        if self.tokenize is None:
            bleu_scorer(fitting)
            self.tokenize = fitting
            self.about["tokenize_by"] = f"the script of the references{f' ({code})' if code else ''}"
        elif code and self.tokenize not in (fitting, "char", "flores200"):
            looks = f"the references look like the language {code}, for which {fitting} is made"
            return [f"BLEU with the tokenizer {self.tokenize}: {looks}; set task.score.tokenize={fitting}"]
        return []

    def compute(self) -> dict[str, Any]:
        """`bleu` and `chrf` in percent, rounded to two digits, each with sacrebleu's signature, as `signature` and
        `chrf_signature`; `tokenize`, and `tokenize_by`: what chose it."""
        from sacrebleu.metrics import CHRF

        hypotheses, references = zip(*self.rows(), strict=True)
        self.choose(references)
        scorer, chrf = bleu_scorer(str(self.tokenize)), CHRF()
        score, beside = (metric.corpus_score(hypotheses, [references]) for metric in (scorer, chrf))
        values = {"bleu": round(score.score, 2), "signature": str(scorer.get_signature())}
        values |= {"chrf": round(beside.score, 2), "chrf_signature": str(chrf.get_signature())}
        return values | {"tokenize": self.tokenize} | self.about


def bleu_scorer(tokenize: str) -> Any:
    """sacrebleu's BLEU with this tokenizer. ConfigError: this machine lacks what the tokenizer needs.

    flores200 needs a SentencePiece model, which sacrebleu downloads once.
    """
    from sacrebleu.metrics import BLEU as Scorer
    from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
    from sacrebleu.utils import SACREBLEU_DIR

    waiting = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(DOWNLOAD_SECONDS)
        return Scorer(tokenize=tokenize)
    except (ImportError, RuntimeError, AssertionError, OSError, SystemExit) as error:
        language, _, kind = tokenize.partition("-")
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if kind == "mecab":
            what = f'needs MeCab and its dictionary ({reason.partition(". ")[0]}): pip install "sacrebleu[{language}]"'
        else:
            url = SPM_MODELS[tokenize]["url"]
            path = os.path.join(SACREBLEU_DIR, "models", os.path.basename(url))
            what = f"needs {url} as {path} ({reason}): download it there"
        raise ConfigError(f"task.score.tokenize={tokenize} {what}, or give task.score.tokenize=char") from error
    finally:
        socket.setdefaulttimeout(waiting)


class WER(TextMetric):
    """Word error rate by jiwer, on lower-cased text; character error rate in scripts without blanks.

    Words are those of :func:`attnlab.metrics.words.words` with apostrophes: each character of a script without blanks
    is one. A reference may hold NIST's alternations, `{ a / b }` (@: nothing): the reading with the fewest errors
    counts.
    """

    name = "wer"
    logged = {"wer": False}
    punctuation = False

    def split(self, references: Sequence[str]) -> list[str]:
        written = [normalise(text, self.punctuation) for text in references]
        warnings = _wordless(written, "whatever is written there counts as inserted")
        if self.punctuation and scripts.in_characters(map(scripts.words, references)):
            unspaced = "the script of the references has no blanks between words, so that an error is of a whole phrase"
            warnings.append(f"{self.name}: {unspaced}; task.score=wer counts characters")
        return warnings

    def compute(self) -> dict[str, Any]:
        """`wer` in percent (not bounded by 100), rounded to two digits; the error counts, `words` of the references,
        and a `signature`. Where most words are characters, `characters` in place of `words`, and `unit`."""
        hypotheses, references = zip(*self.rows(), strict=True)
        self.choose(references)
        return word_errors(hypotheses, references, self.punctuation) | self.about


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
        closest_reading(r, h, partial(normalise, punctuation=punctuation))
        for h, r in zip(spoken, references, strict=True)
    ]
    result = jiwer.process_words(meant, spoken)
    total = result.hits + result.substitutions + result.deletions
    unit = "characters" if not punctuation and scripts.in_characters(text.split() for text in meant) else "words"
    signature = "words as written" if punctuation else "no punctuation but apostrophes"
    return {
        "wer": round(100 * result.wer, 2),
        "insertions": result.insertions,
        "deletions": result.deletions,
        "substitutions": result.substitutions,
        unit: total,
        **({"unit": unit} if unit == "characters" else {}),
        "signature": f"jiwer, NFC, lower case, {signature}{', characters' if unit == 'characters' else ''}",
    }


def normalise(text: str, punctuation: bool = False) -> str:
    """The words of a text in lower case with single spaces between them; see :func:`word_errors`."""
    return " ".join(scripts.lower(text).split() if punctuation else scripts.words(text, "'_"))


class ROUGE(TextMetric):
    """Mean F of ROUGE-1, 2 and L by rouge-score.

    Where a text has several references (`others`: those after the first), each score is that of its best one. The
    tokenizer ascii is rouge-score's own: lower case, letters a to z and digits, Porter's stems. It drops all other
    letters, so that unicode is taken where references have them: :func:`attnlab.metrics.words.words`, without stems.
    torchmetrics' ROUGE downloads a sentence splitter.
    """

    name = "rouge"
    logged = dict.fromkeys(ROUGE_NAMES, True)
    tokenizers = ("ascii", "unicode")
    fields = ("hypotheses", "references", "others")

    def split(self, references: Sequence[str]) -> list[str]:
        share = scripts.share_beyond_ascii(references)
        tokens = [scripts.words(text) for text in references]
        warnings = _wordless(tokens, "they score 0, whatever is written")
        if self.tokenize is None:
            self.tokenize, self.about["tokenize_by"] = "unicode" if share > BEYOND_ASCII else "ascii", "the references"
        elif self.tokenize == "ascii" and share > BEYOND_ASCII:
            lost = f"it drops {100 * share:.1f} % of the references' letters"
            warnings.append(f"task.score.tokenize=ascii: {lost}; unicode keeps them")
        self.about.setdefault("tokenize_by", "task.score.tokenize")
        return warnings

    def compute(self) -> dict[str, Any]:
        """`rouge1`, `rouge2` and `rougeL` in percent, rounded to two digits, a `signature`, `tokenize`, and
        `tokenize_by`: what chose it."""
        rows = self.rows()
        self.choose([first for _, first, _ in rows])
        scores = text_scores([(hypothesis, first, *others) for hypothesis, first, others in rows], str(self.tokenize))
        means = {name: _percent(sum(score[name] for score in scores), len(scores)) for name in ROUGE_NAMES}
        words = "Porter stems" if self.tokenize == "ascii" else "Unicode words without stems"
        signature = f"rouge-score {version('rouge-score')}, {words}, mean F, best reference"
        return means | {"signature": signature, "tokenize": self.tokenize} | self.about


def text_scores(rows: Sequence[Sequence[str]], tokenize: str = "ascii") -> list[dict[str, float]]:
    """F of ROUGE-1, 2 and L of each text, between 0 and 1. A row is a hypothesis and its references."""
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer, Tokenizer

    class UnicodeTokenizer(Tokenizer):
        def tokenize(self, text: str) -> list[str]:
            return scripts.words(text)

    # without a tokenizer it logs a line
    tokenizer = DefaultTokenizer(use_stemmer=True) if tokenize == "ascii" else UnicodeTokenizer()
    scorer = RougeScorer(ROUGE_NAMES, tokenizer=tokenizer)
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
        classes = [[unicodedata.normalize("NFC", text) for text in row[:3]] for row in rows]
        values: dict[str, Any] = {
            "accuracy": _percent(sum(free == label for label, free, _ in classes), len(rows)),
            "accuracy_constrained": _percent(sum(forced == label for label, _, forced in classes), len(rows)),
        }
        if not any(reference for *_, reference in rows):
            return values | {"signature": "first token of the best hypothesis; constrained: among the classes alone"}
        words = word_errors([hypothesis for *_, hypothesis, _ in rows], [reference for *_, reference in rows])
        return values | words | {"signature": f"first token of the best hypothesis; words: {words['signature']}"}
