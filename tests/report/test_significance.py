"""Paired bootstrap and standard errors."""

import json
import re
from collections.abc import Callable, Sequence
from math import erfc, isnan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from attnlab.errors import DataError
from attnlab.metrics import text as metrics_of
from attnlab.metrics.text import TextMetric, text_scores, word_errors
from attnlab.report import significance
from attnlab.run.store import SavedRecord, collect

Scored = Callable[..., SavedRecord]
WORDS = ["der", "die", "das", "Haus", "Hund", "sieht", "vier", "kleine", "rote", "Blumen", "nicht", ",", "."]


def texts(seed: int, count: int = 40, right: float = 1.0) -> list[str]:
    """Sentences that depend on their number; words are replaced with probability 1 - right."""
    sentences = np.random.default_rng(7).choice(WORDS, size=(count, 9))
    random = np.random.default_rng(seed)
    wrong = random.random(sentences.shape) > right
    return [" ".join(row) for row in np.where(wrong, random.choice(WORDS, size=sentences.shape), sentences)]


REFERENCES = texts(0)
GOOD, BAD = texts(1, right=0.9), texts(2, right=0.7)
CLOSE = [*BAD[:3], *REFERENCES[3:6], *GOOD[6:]]  # than GOOD


@pytest.fixture
def scored(template: dict[str, Any], tmp_path: Path) -> Scored:
    """A record of these hypotheses, with its predictions; `quality`: what the record says. None: no predictions."""

    def make(
        name: str, hypotheses: Sequence[str] | None, quality: dict[str, Any], references: Sequence[str] = REFERENCES
    ) -> SavedRecord:
        path = tmp_path / "runs" / name / "record.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(template | {"quality": quality}))
        if hypotheses is not None:
            write_rows(path.parent / "predictions.tsv", hypotheses, references)
        return collect([path])[0]

    return make


def write_rows(path: Path, hypotheses: Sequence[str], references: Sequence[str]) -> None:
    lines = [f"{i}\t\t{r}\t{h}\n" for i, (r, h) in enumerate(zip(references, hypotheses, strict=True))]
    path.write_text("id\tsource\treference\thypothesis\n" + "".join(lines))


def bleu(hypotheses: Sequence[str], references: Sequence[str] = REFERENCES) -> dict[str, Any]:
    return {"bleu": round(BLEU().corpus_score(list(hypotheses), [list(references)]).score, 2)}


@pytest.mark.parametrize("seed", [12345, 3])
def test_bleu_is_tested_as_by_sacrebleu(scored: Scored, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setenv("SACREBLEU_SEED", str(seed))
    test = PairedTest([("a", GOOD), ("b", CLOSE)], {"BLEU": BLEU()}, [REFERENCES], test_type="bs", n_samples=300)
    first, second = test()[1]["BLEU"]
    (difference,) = significance.differences(scored("a", GOOD, bleu(GOOD)), scored("b", CLOSE, bleu(CLOSE)), 300, seed)
    assert not isinstance(first, str) and not isinstance(second, str) and second.p_value
    assert (difference.first, difference.second) == pytest.approx((first.score, second.score), abs=1e-9)
    assert difference.sacrebleu is not None
    assert (
        difference.sacrebleu == pytest.approx(second.p_value, abs=1e-12) and difference.p > difference.sacrebleu > 0.02
    )
    assert f"; sacrebleu's own p is {difference.sacrebleu:.3f})" in str(difference)
    assert (difference.items, difference.resamples, difference.seed) == (40, 300, seed)
    assert difference.low < difference.second - difference.first < difference.high


@pytest.mark.parametrize("metric", ["wer", "rouge2"])
def test_other_metrics_are_scored_on_the_same_draws(
    scored: Scored, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference scores complete lists of drawn texts."""

    def score(hypotheses: Sequence[str], references: Sequence[str]) -> float:
        if metric == "wer":
            errors = word_errors(hypotheses, references)
            return 100 * (errors["insertions"] + errors["deletions"] + errors["substitutions"]) / errors["words"]
        return 100 * float(
            np.mean([scores[metric] for scores in text_scores(list(zip(hypotheses, references, strict=True)))])
        )

    monkeypatch.setattr(significance, "FEWEST", 8)
    texts = GOOD[:8], BAD[:8]
    drawn = np.random.default_rng(5).choice(8, size=(20, 8), replace=True)
    resampled = [[score([h[i] for i in places], [REFERENCES[i] for i in places]) for h in texts] for places in drawn]
    change = np.diff(resampled)[:, 0]
    away = np.abs(change - change.mean())
    scores = [score(h, REFERENCES[:8]) for h in texts]
    expected = ((away >= abs(scores[1] - scores[0])).sum() + 1) / 21
    one, two = (
        scored(name, hypotheses, {metric: round(right, 2)}, REFERENCES[:8])
        for name, hypotheses, right in zip("ab", texts, scores, strict=True)
    )
    (difference,) = significance.differences(one, two, 20, 5)
    assert difference.p == expected and [difference.first, difference.second] == pytest.approx(scores)
    middle = scores[1] - scores[0]
    assert (difference.low, difference.high) == pytest.approx((middle - away.max(), middle + away.max()))
    assert difference.sacrebleu is None and "sacrebleu" not in str(difference)


def test_perplexity_is_tested_over_windows(scored: Scored) -> None:
    random = np.random.default_rng(1)
    tokens, nats = random.integers(90, 100, 60), random.uniform(3.0, 4.0, 60)
    runs = []
    for name, added in (("a", np.zeros(60)), ("b", np.full(60, 0.1)), ("c", random.normal(0, 0.01, 60))):
        losses = tokens * (nats + added)
        quality = {"perplexity": round(float(np.exp(losses.sum() / tokens.sum())), 4), "signature": "s"}
        runs.append(scored(name, None, quality))
        lines = [f"{i}\t{count}\t{loss:.4f}\n" for i, (count, loss) in enumerate(zip(tokens, losses, strict=True))]
        (runs[-1].path.parent / "windows.tsv").write_text("id\ttokens\tnats\n" + "".join(lines))
    (worse,), (equal,) = (significance.differences(runs[0], run) for run in runs[1:])
    assert worse.metric == "perplexity" and worse.p < 0.01
    assert 0 < worse.low < worse.second - worse.first < worse.high
    assert equal.low < 0 < equal.high and equal.p > 0.05
    runs[1].record["quality"]["signature"] = "other windows"
    with pytest.raises(DataError, match="not of one test set"):
        significance.differences(runs[0], runs[1])
    path = runs[1].path.parent / "windows.tsv"
    path.write_text("id\ttokens\tnats\n" + "0\tmany\t1.0\n" * 40)
    (runs[0].path.parent / "windows.tsv").write_text(path.read_text())
    runs[1].record["quality"]["signature"] = "s"
    with pytest.raises(DataError, match="windows.tsv: expected numbers of nats and tokens .*'many'"):
        significance.differences(runs[0], runs[1])


def pairs(gains: int, losses: int, items: int) -> tuple["significance.Statistics", "significance.Statistics"]:
    """Right or wrong answers of two systems, of which the second gains and loses so many."""
    first, second = np.ones((items, 2)), np.ones((items, 2))
    first[:gains, 0] = second[gains : gains + losses, 0] = 0
    return first, second


@pytest.mark.parametrize(
    ("gains", "losses", "items", "exact"),  # exact: McNemar's test, twice the binomial tail
    [(30, 18, 500, 0.111), (9, 3, 100, 0.146), (40, 15, 300, 0.001), (20, 20, 100, 1.0), (7, 30, 200, 0.0002)],
)
def test_p_is_that_of_a_valid_test_and_agrees_with_the_interval(
    gains: int, losses: int, items: int, exact: float
) -> None:
    _, _, p, low, high, moses = significance.bootstrap(*pairs(gains, losses, items), significance.share, 1000, 12345)
    z = abs(gains - losses) / np.sqrt(gains + losses - (gains - losses) ** 2 / items)
    assert p == pytest.approx(erfc(z / sqrt(2)), abs=0.02) and abs(p - exact) < 0.08
    assert (p < 0.05) == (not low <= 0 <= high) and low + high == pytest.approx(200 * (gains - losses) / items)
    if (gains, losses) == (30, 18):
        assert moses < 0.05 < p  # sacrebleu's formula contradicts the interval


@pytest.mark.slow
@pytest.mark.parametrize(("items", "most"), [(30, 0.085), (100, 0.065), (400, 0.065)])
def test_equal_systems_differ_in_one_of_twenty_tests(items: int, most: float) -> None:
    """Two systems of one accuracy, and two of one error rate: p < 0.05 in about 5 % of the test sets.

    A little more of small ones: 6 % to 8 % for 30 items, as the normal distribution gives instead of Student's t.
    """
    random = np.random.default_rng(1)
    ours, sacrebleus = [], []
    for seed in range(600):
        words = random.integers(5, 15, size=items)
        hard = random.beta(2, 6, size=items)  # sentences are easy or hard for both
        for kind in ("accuracy", "wer"):
            wrong = [random.binomial(1 if kind == "accuracy" else words, hard) for _ in range(2)]
            totals = np.ones(items) if kind == "accuracy" else words
            one, two = (np.stack([count, totals], 1).astype(float) for count in wrong)
            _, _, p, low, high, other = significance.bootstrap(one, two, significance.share, 200, seed)
            assert (p < 0.05) == (not low <= 0 <= high)
            ours.append(p < 0.05)
            sacrebleus.append(other < 0.05)
    assert 0.035 < np.mean(ours) < most and np.mean(sacrebleus) > 0.08


CHINESE = [
    f"第{i}天他在{place}买了{thing}。"
    for i, (place, thing) in enumerate(zip("京沪津渝" * 10, "菜米油茶果" * 8, strict=True))
]


def test_texts_are_split_as_the_record_says(scored: Scored) -> None:
    """Records without a tokenizer are older ones, with 13a and the ASCII tokenizer."""
    changed = [text.replace("他", "她") if i % 3 else text for i, text in enumerate(CHINESE)]
    metrics: dict[str, tuple[type[TextMetric], dict[str, Any]]] = {
        "bleu": (metrics_of.BLEU, {"tokenize": "zh"}), "rouge1": (metrics_of.ROUGE, {}), "wer": (metrics_of.WER, {}),
    }  # fmt: skip
    for name, (kind, settings) in metrics.items():
        records = []
        for number, texts in enumerate((CHINESE, changed)):
            metric = kind(40, **settings)
            columns = {"hypotheses": texts, "references": CHINESE, "others": [()] * 40}
            metric.update(range(40), **{field: columns[field] for field in metric.fields})
            records.append(scored(f"{name}{number}", texts, metric.compute(), CHINESE))
        better, worse = records
        difference = next(d for d in significance.differences(better, worse, 50) if d.metric == name)
        assert difference.first == pytest.approx(better.number(f"quality.{name}")) and difference.p < 0.05
    one, two = scored("13a", CHINESE, {"bleu": 100.0}, CHINESE), scored("zh", CHINESE, {"bleu": 100.0}, CHINESE)
    for tokenizer, message in (("zh", "different tokenizers, 13a and zh"), ("../x", "quality.tokenize=../x: expected")):
        two.record["quality"]["tokenize"] = tokenizer
        assert message in significance.sure(one, two)[0]
    older, newer = (
        scored("older", GOOD, bleu(GOOD)),
        scored("newer", GOOD, bleu(GOOD) | {"tokenize": "13a", "chrf": 1.0}),
    )
    assert "BLEU +0.00" in significance.sure(older, newer)[0]


def test_a_run_does_not_differ_from_itself(scored: Scored) -> None:
    (difference,) = significance.differences(scored("a", GOOD, bleu(GOOD)), scored("b", GOOD, bleu(GOOD)), 20)
    assert (difference.p, difference.low, difference.high) == (1.0, 0.0, 0.0)
    short = [["Haus"] * 40, ["Hund die"] * 40]  # without a pair of words in common BLEU is 0, and all draws are alike
    one, two = (scored(f"zero{n}", texts, {"bleu": 0.0}, ["rote"] * 40) for n, texts in enumerate(short))
    (difference,) = significance.differences(one, two, 20)
    assert (difference.first, difference.second, difference.p) == (0.0, 0.0, 1.0)


def test_accuracies(scored: Scored) -> None:
    """A class is the text of an image, the first word of an utterance, or a mark in the file of a question."""
    classes = ["cat one"] * 30 + ["dog two"] * 10
    first, second = ["cat one"] * 40, ["cat two"] * 29 + ["dog one"] * 11
    for key, rights in (("top1", (75.0, 0.0)), ("accuracy", (75.0, 97.5))):
        one, two = (
            scored(f"{key}{n}", h, {key: right, "images": 40}, classes)
            for n, (h, right) in enumerate(zip((first, second), rights, strict=True))
        )
        (difference,) = significance.differences(one, two, 50)
        assert difference.p == 1 / 51  # 30 and 9 of 40
        assert (difference.metric, difference.first, difference.second) == (key, *rights)
    for record, right in ((one, "1"), (two, "0")):  # of a question the file says whether the answer is right
        rows = ["source\treference\thypothesis\tright\tloss", *[f"who?\tshe\the\t{right}\t0.5"] * 30]
        (record.path.parent / "predictions.tsv").write_text("\n".join(rows) + "\n")
        record.record["quality"] = {"accuracy": 100.0 * int(right), "questions": 30}
    (difference,) = significance.differences(one, two, 50)
    assert (difference.first, difference.second, difference.items) == (100.0, 0.0, 30)
    path = one.path.parent / "predictions.tsv"
    path.write_text(path.read_text().replace("\t1\t", "\tTrue\t", 1))
    with pytest.raises(DataError, match="its rows give accuracy 96.67"):
        significance.differences(one, two, 50)


def test_what_is_refused(scored: Scored) -> None:
    one = scored("a", GOOD, bleu(GOOD))
    cases = {
        "short/predictions.tsv: not of one test set": scored("short", GOOD[:-1], {"bleu": 9.0}, REFERENCES[:-1]),
        "other/predictions.tsv: not of one test set": scored(
            "other", GOOD, {"bleu": 9.0}, [REFERENCES[0], "another", *REFERENCES[2:]]
        ),
        "the record has 12.0": scored("score", GOOD, {"bleu": 12.0}),
        "metric/record.json have no score in common": scored("metric", GOOD, {"wer": 12.0}),
        "none/predictions.tsv: cannot be read": scored("none", None, bleu(GOOD)),
    }
    for name, value in (("nan", float("nan")), ("huge", 10**400), ("text", "nan"), ("true", True)):
        cases[f"{name}/record.json have no score in common"] = scored(name, GOOD, {"bleu": value})
    cut = scored("cut", GOOD, bleu(GOOD))
    path = cut.path.parent / "predictions.tsv"
    path.write_text(path.read_text().rpartition("\t")[0] + "\n")
    cases["cut/predictions.tsv: not a file of predictions"] = cut
    (one.path.parent / "b.json").write_bytes(one.path.read_bytes())
    cases["a/b.predictions.tsv: cannot be read"] = collect([one.path.parent / "b.json"])[0]
    for message, two in cases.items():
        with pytest.raises(DataError, match=re.escape(message)) as raised:
            significance.differences(one, two)
        assert "\n" not in str(raised.value)
    few = [scored(f"few{n}", GOOD[:29], bleu(GOOD[:29], REFERENCES[:29]), REFERENCES[:29]) for n in range(2)]
    with pytest.raises(DataError, match="expected at least 30 items for a paired test, got 29"):
        significance.differences(few[0], few[1])


def test_standard_errors(scored: Scored) -> None:
    quality: dict[str, Any] = {"top1": 80.0, "images": 400, "accuracy": 50.0, "sentences": 100}
    quality |= {"loss": 2.0, "loss_stderr": 0.25, "tasks": {"piqa": {"acc": 0.5, "acc_stderr": 0.01}}}
    one = scored("a", None, quality)
    errors = {key: significance.standard_error(one, f"quality.{key}") for key in ("top1", "accuracy", "loss")}
    assert errors == {"top1": pytest.approx(2.0), "accuracy": pytest.approx(5.0), "loss": 0.25}
    assert significance.standard_error(one, "quality.tasks.piqa.acc") == 0.01
    for value, count in ((160.0, 400), (-5.0, 400), (80.0, -3), (80.0, 0), (float("nan"), 400), (80.0, 10**400)):
        one.record["quality"] |= {"top1": value, "images": count}
        assert significance.standard_error(one, "quality.top1") is None
    assert significance.standard_error(one, "quality.images") is significance.standard_error(one, "seed") is None


def test_holm_multiplies_the_smallest_by_the_number_of_tests() -> None:
    """0.01 x 4, 0.015 x 3, 0.03 x 2 and 0.04 x 1, each at least the one before it."""
    assert significance.holm([0.04, 0.01, 0.03, 0.015]) == pytest.approx([0.06, 0.04, 0.06, 0.045])
    assert significance.holm([0.5, 0.3]) == pytest.approx([0.6, 0.6])
    assert significance.holm([0.3, 0.01], planned=5) == pytest.approx([1.0, 0.05])


def test_differences_over_seeds_are_those_of_scipy() -> None:
    """MTLA's with stride 2 on WikiText-2, of the table: t = 5.46 / (s / sqrt 3) with two degrees of freedom."""
    test = significance.over_seeds([(28.94, 34.99), (29.77, 34.09), (29.00, 35.00)])
    changes = [6.05, 4.32, 6.00]
    mean = sum(changes) / 3
    width = 4.302653 * (sum((change - mean) ** 2 for change in changes) / 2 / 3) ** 0.5  # the 97.5 % point of t
    assert (test.mean, test.low, test.high) == pytest.approx((mean, mean - width, mean + width), rel=1e-6)
    assert test.count == 3 and test.welch < test.p < 0.05
    assert isnan(significance.over_seeds([(1.0, 1.7), (2.0, 2.7), (3.3, 4.0)]).p)  # equal but for rounding
