"""Significance of differences: paired bootstrap over the predictions of two records, standard errors of accuracies.

Both systems are scored on the same test sets, drawn with replacement from the sentences (Koehn 2004); :func:`bootstrap`
has p and the interval. Each sentence has its own statistics: n-gram counts for BLEU, word errors and words for WER, F
for ROUGE, right or wrong for accuracies. For perplexity, windows of the test text are drawn, each with its nats and
tokens.

For BLEU the p of sacrebleu is shown too. Like Moses, it subtracts the mean from the sizes of the differences, not from
the differences. Its p is smaller: it calls 10 % to 15 % of pairs of equal systems different at 5 %.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.callbacks.summary import label
from attnlab.config.build import at
from attnlab.errors import ConfigError, DataError
from attnlab.run.directory import PREDICTIONS, WINDOWS
from attnlab.run.record import NOT_RUN, RECORD
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    import numpy as np

    Statistics = np.ndarray[Any, np.dtype[np.float64]]

RESAMPLES = 1000  # as sacrebleu
SEED = 12345  # as sacrebleu
FEWEST = 30  # items. At 5 %, equal systems differ in 8 % to 9 % of tests with 10 or 20 items, in 6 % to 8 % with 30
LEVEL = 20  # one in so many: 5 %
HEADINGS = {PREDICTIONS: {"reference", "hypothesis"}, WINDOWS: {"tokens", "nats"}}
OFF = 0.006  # a record's score is rounded to two digits
METRICS = ("bleu", "wer", "rouge1", "rouge2", "rougeL", "accuracy", "top1", "perplexity")  # computed from predictions
COUNTED = {  # shares in percent by their name in `quality`: what they count
    "top1": ["images"], "top5": ["images"],
    "accuracy": ["questions", "sentences"], "accuracy_constrained": ["sentences"],
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """The difference of two records in one metric, by paired bootstrap over the items of the test set.

    Args:
        p, low, high: of :func:`bootstrap`: p of no difference, and ends of the 95 % interval of second - first.
        sacrebleu: the p of sacrebleu's `PairedTest(test_type="bs")`; None: not BLEU, or the scores are equal.
    """

    metric: str
    first: float
    second: float
    p: float
    low: float
    high: float
    sacrebleu: float | None
    items: int
    resamples: int
    seed: int

    @property
    def change(self) -> float:
        return self.second - self.first

    def __str__(self) -> str:
        p, other = (None if value is None else f"{value:.{3 + (value < 0.01)}f}" for value in (self.p, self.sacrebleu))
        beside = f"; sacrebleu's own p is {other}" if other else ""
        return (
            f"{label(self.metric)} {self.change:+.2f}, 95 % interval {self.low:+.2f} to {self.high:+.2f}, "
            f"p = {p} (paired bootstrap of {self.items} items, {self.resamples} resamples, seed {self.seed}{beside})"
        )


def predictions_file(saved: SavedRecord, name: str = PREDICTIONS) -> Path:
    """The file of predictions: predictions.tsv beside record.json, NAME.predictions.tsv beside NAME.json."""
    path = saved.path
    return path.parent / name if path.name == RECORD else path.with_suffix(f".{name}")


def _rows(path: Path, headings: set[str]) -> list[dict[str, str]]:
    """The items of the test set in a file of predictions; DataError if it is missing or damaged."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); a run that scores writes it") from error
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path}: not a file of predictions: {' '.join(str(error).split())}") from error
    if not rows or not rows[0].keys() >= headings or any(None in row or None in row.values() for row in rows):
        raise DataError(f"{path}: not a file of predictions: expected rows with {', '.join(sorted(headings))}")
    return rows


def _metrics(saved: SavedRecord) -> list[str]:
    """The record's metrics that predictions give. Rows do not separate a class from the words that metrics count."""
    names = [name for name in METRICS if saved.number(f"quality.{name}") is not None]
    return ["accuracy"] if "accuracy" in names else names


def _tokenizer(name: str, saved: SavedRecord) -> str:
    """The tokenizer of a record's BLEU or ROUGE. Older records do not name theirs. DataError: there is no such one."""
    from attnlab.metrics.text import BLEU, ROUGE

    metric = BLEU if name == "bleu" else ROUGE
    tokenizer = saved.record["quality"].get("tokenize", metric.tokenizers[0])
    if tokenizer not in metric.tokenizers:
        raise DataError(f"{saved.path}: quality.tokenize={tokenizer}: expected {', '.join(metric.tokenizers)}")
    return str(tokenizer)


def _statistics(name: str, rows: list[dict[str, str]], saved: SavedRecord) -> "Statistics":
    """(items, statistics) of a metric, whose sums over items :func:`corpus_bleu` or :func:`share` take."""
    import numpy as np

    if name == "perplexity":
        try:
            return np.array([[float(row["nats"]), float(row["tokens"])] for row in rows])
        except ValueError as error:
            path = predictions_file(saved, WINDOWS)
            raise DataError(f"{path}: expected numbers of nats and tokens ({error})") from error
    pairs = [(row["hypothesis"], row["reference"]) for row in rows]
    values: list[Any]
    if name == "bleu":
        from attnlab.metrics.text import bleu_scorer

        try:
            scorer = bleu_scorer(_tokenizer(name, saved))
        except ConfigError as error:
            raise DataError(f"{saved.path}: {error}") from error
        scores = [scorer.corpus_score([hypothesis], [[reference]]) for hypothesis, reference in pairs]
        values = [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]
    elif name == "wer":
        from attnlab.metrics.text import word_errors

        punctuation = "words as written" in str(saved.record["quality"].get("signature"))
        errors = [word_errors([hypothesis], [reference], punctuation) for hypothesis, reference in pairs]
        values = [[e["insertions"] + e["deletions"] + e["substitutions"], e[e.get("unit", "words")]] for e in errors]
    elif name.startswith("rouge"):
        from attnlab.metrics.text import text_scores

        values = [[score[name], 1] for score in text_scores(pairs, _tokenizer(name, saved))]
    elif "right" in rows[0]:
        values = [[row["right"] == "1", 1] for row in rows]
    elif name == "top1":
        values = [[hypothesis == reference, 1] for hypothesis, reference in pairs]
    else:  # the class is the first word
        values = [[hypothesis.split()[:1] == reference.split()[:1], 1] for hypothesis, reference in pairs]
    return np.array(values, dtype=np.float64)


def differences(
    first: SavedRecord, second: SavedRecord, resamples: int = RESAMPLES, seed: int = SEED
) -> list[Difference]:
    """The differences between two records in each metric that their predictions give.

    Raises:
        DataError: predictions are missing, damaged, fewer than FEWEST, of other items, or contradict the score.
    """
    metrics = [name for name in _metrics(first) if name in _metrics(second)]
    if not metrics:
        raise DataError(
            f"{first.name} and {second.name} have no score in common that predictions give: BLEU, ROUGE, WER, accuracy "
            "or perplexity"
        )
    file = WINDOWS if metrics == ["perplexity"] else PREDICTIONS
    files = predictions_file(first, file), predictions_file(second, file)
    items = [_rows(path, HEADINGS[file]) for path in files]
    keys: list[Any] = [[(row.get("id"), row.get("reference", row.get("tokens"))) for row in rows] for rows in items]
    texts = [(at(run.record, "identity.corpus"), at(run.record, "quality.signature")) for run in (first, second)]
    if keys[0] != keys[1] or (file == WINDOWS and texts[0] != texts[1]):
        raise DataError(f"{files[1]}: not of one test set with {files[0]}: other items or references")
    if len(keys[0]) < FEWEST:
        raise DataError(f"{files[0]}: expected at least {FEWEST} items for a paired test, got {len(keys[0])}")
    results = []
    for name in metrics:
        score = {"bleu": corpus_bleu, "perplexity": perplexity}.get(name, share)
        if name == "bleu" or name.startswith("rouge"):
            one, two = (_tokenizer(name, saved) for saved in (first, second))
            if one != two:
                raise DataError(
                    f"{first.name} and {second.name} split texts by different tokenizers, {one} and {two}: score one "
                    "again with task.score.tokenize= of the other"
                )
        tables = [_statistics(name, rows, saved) for rows, saved in zip(items, (first, second), strict=True)]
        for saved, statistics in zip((first, second), tables, strict=True):
            value, recorded = score(statistics.sum(0)), saved.number(f"quality.{name}")
            if recorded is None or not abs(value - recorded) <= OFF:
                raise DataError(
                    f"{predictions_file(saved, file)}: its rows give {name} {value:.2f}, the record has {recorded}: "
                    "they are of another scoring, or the record's counts further references of each text"
                )
        before, after, p, low, high, moses = bootstrap(tables[0], tables[1], score, resamples, seed)
        sacrebleu = moses if name == "bleu" and before != after else None
        results.append(Difference(name, before, after, p, low, high, sacrebleu, len(keys[0]), resamples, seed))
    return results


def sure(first: SavedRecord, second: SavedRecord) -> list[str]:
    """A line for each metric in which two records differ, or the reason why the difference cannot be tested."""
    try:
        return [str(difference) for difference in differences(first, second)]
    except DataError as error:
        return [f"{NOT_RUN}: {error}"]


def bootstrap(
    first: "Statistics", second: "Statistics", score: "Callable[[Statistics], float]", resamples: int, seed: int
) -> tuple[float, float, float, float, float, float]:
    """Both scores, p, the 95 % interval of their difference and sacrebleu's p, by paired bootstrap.

    With d = second - first of the test set, d_b on draw b of B, and m the mean of the d_b:

        p = (#{|d_b - m| >= |d|} + 1) / (B + 1)

    (Efron and Tibshirani 1993, section 16.4). The interval is d -+ q, with the largest q of the |d_b - m| that is not
    rejected at 5 %: it excludes zero if and only if p < 0.05.
    sacrebleu counts #{|d_b| - mean |d_b| > |d|} instead; the draws are those of its `PairedTest(test_type="bs")`.

    `first` and `second` are (items, statistics) of two systems; at least 20 resamples are needed.
    """
    import numpy as np

    items = len(first)
    random = np.random.default_rng(seed)
    drawn = np.empty((resamples, 2))
    for draw in drawn:  # one by one: 1,000 draws of 50,000 images at once are half a gigabyte
        often = np.bincount(random.choice(items, size=items, replace=True), minlength=items).astype(float)
        draw[:] = score(often @ first), score(often @ second)
    before, after = score(first.sum(0)), score(second.sum(0))
    change = drawn[:, 1] - drawn[:, 0]
    away, size = np.sort(np.abs(change - change.mean())), np.abs(change)
    p = (int((away >= abs(after - before)).sum()) + 1) / (resamples + 1)
    moses = (int((size - size.mean() > abs(after - before)).sum()) + 1) / (resamples + 1)
    beyond = -(-(resamples + 1) // LEVEL) - 1  # p < 0.05 where fewer than so many draws lie at least as far away as d
    width = float(away[-beyond])
    return before, after, p, after - before - width, after - before + width, moses


@dataclass(frozen=True)
class OverSeeds:
    """The difference of two systems over the seeds that both have.

    Args:
        low, high: ends of the 95 % interval of the mean difference, by Student's t over the pairs.
        p: of no difference, by Student's paired t-test.
        welch: the same by Welch's test of two samples, which does not use that pairs have one seed.
    """

    mean: float
    low: float
    high: float
    count: int
    p: float
    welch: float


def over_seeds(pairs: Sequence[tuple[float, float]]) -> OverSeeds:
    """The second of each pair minus the first, over at least two pairs. Equal differences have NaN for p and ends."""
    import numpy as np
    from scipy.stats import ttest_ind, ttest_rel

    before, after = np.array(pairs, dtype=np.float64).T
    changes = after - before
    if np.ptp(changes) <= 1e-9 * np.abs([before, after]).max():  # equal but for rounding, which would give a tiny p
        return OverSeeds(float(changes.mean()), float("nan"), float("nan"), len(pairs), float("nan"), float("nan"))
    paired = ttest_rel(after, before)
    low, high = map(float, paired.confidence_interval())
    welch = ttest_ind(after, before, equal_var=False).pvalue
    return OverSeeds(float(changes.mean()), low, high, len(pairs), float(paired.pvalue), float(welch))


def holm(values: Sequence[float], planned: int | None = None) -> list[float]:
    """P-values of one family of tests, adjusted by Holm's step-down method (Holm 1979), in the order of `values`.

    The k-th smallest of n is multiplied by n - k + 1, and is at least the adjusted one before it and at most 1.

    Args:
        planned: n; a planned test that was not run counts as one with p = 1. None: all were run.
    """
    count, highest, adjusted = planned or len(values), 0.0, [1.0] * len(values)
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = adjusted[i] = max(highest, min(1.0, (count - rank) * values[i]))
    return adjusted


def standard_error(saved: SavedRecord, key: str) -> float | None:
    """The standard error of a number over the items of the test set, in its unit; None if it is unknown.

    lm-evaluation-harness and the question sets record it (`KEY_stderr`). For a share p of n images or sentences it is
    sqrt(p (1 - p) / n). An impossible share or count gives None.
    """
    recorded, value = saved.number(f"{key}_stderr"), saved.number(key)
    section, _, name = key.rpartition(".")
    if recorded is not None or value is None or section != "quality" or name not in COUNTED:
        return recorded
    counts = [saved.number(f"quality.{unit}") for unit in COUNTED[name]]
    count = next((count for count in counts if count is not None and count > 0), None)
    if count is None or not 0 <= value <= 100:
        return None
    return 100 * sqrt(value / 100 * (1 - value / 100) / count)


def corpus_bleu(sums: "Statistics") -> float:
    """Corpus BLEU from summed counts, totals and lengths."""
    from sacrebleu.metrics import BLEU

    counts = [int(value) for value in sums]
    return float(BLEU.compute_bleu(counts[:4], counts[4:8], counts[8], counts[9], smooth_method="exp").score)


def perplexity(sums: "Statistics") -> float:
    """exp of the summed nats by the summed tokens."""
    return exp(min(float(sums[0]) / float(sums[1]), 700.0))  # as metrics.Perplexity


def share(sums: "Statistics") -> float:
    """The first of two sums in percent of the second."""
    return 100 * float(sums[0]) / max(1.0, float(sums[1]))
