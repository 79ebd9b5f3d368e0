"""Scores against those of the official scorers."""

import gzip
import itertools
import json
import logging
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rapidfuzz.distance import Levenshtein

from attnlab.metrics.alternations import closest_reading
from attnlab.metrics.text import BLEU, ROUGE, WER, IntentAccuracy, TextMetric, WERAsWritten, normalise, text_metrics


def score(kind: type[TextMetric], *columns: Sequence[Any]) -> dict[str, Any]:
    metric = kind(len(columns[0]))
    metric.update(range(len(columns[0])), *columns)
    values: dict[str, Any] = metric.compute()
    return values


bleu, wer, wer_as_written = (partial(score, kind) for kind in (BLEU, WER, WERAsWritten))


def rouge(hypotheses: list[str], references: list[Any]) -> dict[str, Any]:
    """`references`: a text each, or several."""
    targets = [[r] if isinstance(r, str) else list(r) for r in references]
    return score(ROUGE, hypotheses, [first for first, *_ in targets], [rest for _, *rest in targets])


def lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def folder(corpora: Path, name: str) -> Path:
    if not (corpora / name).is_dir():
        pytest.skip(f"no {name} here")
    return corpora / name


# --- BLEU ----------------------------------------------------------------------------------------------------------


def test_bleu_of_known_counts() -> None:
    """Precisions 7/7, 4/6, 2/5, 1/4 without a brevity penalty: their geometric mean."""
    score = bleu(["the cat sat down on the mat"], ["the cat sat quietly on the mat"])
    assert score["bleu"] == pytest.approx(100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 8) ** 0.25, abs=0.01)  # smoothing: 1/2
    assert score["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp")
    assert bleu(["Das Haus ist alt."], ["Das Haus ist alt."])["bleu"] == 100
    assert bleu(["das haus ist alt."], ["Das Haus ist alt."])["bleu"] < 100


@pytest.mark.slow
def test_bleu_of_all_of_wmt17(corpora: Path) -> None:
    root = folder(corpora, "metric_bleu_wmt17_en_de")
    reference = lines(root / "newstest2017.en-de.ref.txt.gz")
    for name, score in json.loads((root / "expected.json").read_text())["tables"]["MTEVAL"].items():
        assert bleu(lines(root / f"{name}.txt.gz"), reference)["bleu"] == pytest.approx(score, abs=0.0101)


# --- WER -----------------------------------------------------------------------------------------------------------


def counts(score: dict[str, Any]) -> tuple[int, ...]:
    hits = score["words"] - score["substitutions"] - score["deletions"]
    return (hits, score["substitutions"], score["deletions"], score["insertions"])


def test_word_errors_by_kind() -> None:
    score = wer(["the cat sat down there", "yes"], ["The cat, sat on it", "Yes we can."])
    assert counts(score) == (4, 2, 2, 0) and score["wer"] == pytest.approx(100 * 4 / 8)
    assert counts(wer(["a b c"], ["a c"])) == (2, 0, 0, 1)
    assert counts(wer([""], ["a c"])) == (0, 0, 2, 0)
    assert wer(["a b c d"], ["x"])["wer"] == 400  # not bounded by 100


def test_the_text_that_words_are_counted_in() -> None:
    assert normalise("It's  U.S. -- FINE, no?") == "it's u s fine no"
    assert wer(["u s fine"], ["U.S. FINE"])["wer"] == 0
    assert wer_as_written(["u s fine"], ["U.S. FINE"])["wer"] == 100
    assert wer_as_written(["u.s. fine"], ["U.S. FINE"])["wer"] == 0


@pytest.mark.parametrize(
    ("hypothesis", "errors"), [("most fidelity's fell", 0), ("most fidelity fell", 0), ("most funds fell", 1)]
)
def test_alternations(hypothesis: str, errors: int) -> None:
    score = wer_as_written([hypothesis], ["MOST { FIDELITY'S / FIDELITY } FELL"])
    assert counts(score) == (3 - errors, errors, 0, 0)
    assert wer(["for an investor"], ["for { @ / an } investor"])["words"] == 3
    assert wer(["for investor"], ["for { @ / an } investor"])["words"] == 2


def test_the_reading_with_the_fewest_errors_is_that_of_an_enumeration() -> None:
    """The first of equals too."""
    random = Random(1)

    def words(most: int) -> str:
        return " ".join(random.choice("abc") for _ in range(random.randint(0, most)))

    for _ in range(200):
        choices = [[words(2)] if random.random() < 0.5 else [words(3), words(2), "@"] for _ in range(4)]
        hypothesis = words(7)
        readings = [" ".join(" ".join(texts).replace("@", "").split()) for texts in itertools.product(*choices)]
        best = min(readings, key=lambda text: Levenshtein.distance(text.split(), hypothesis.split()))
        reference = " ".join(f"{{ {' / '.join(texts)} }}" if len(texts) > 1 else texts[0] for texts in choices)
        assert closest_reading(reference, hypothesis, normalise) == best


def test_many_and_nested_alternations() -> None:
    reference = " ".join(["{ a / b / c d }"] * 60)
    assert counts(wer([" ".join("abcd" * 20)], [reference])) == (80, 0, 0, 0)
    assert counts(wer(["i were home"], ["I { am / { was / were } } home"])) == (3, 0, 0, 0)
    unusual = wer_as_written(["and/or { x }"], ["and/or { x }"])  # braces that hold no alternatives are text
    assert counts(unusual) == (4, 0, 0, 0)


def test_word_errors_of_sclite(corpora: Path) -> None:
    """The regression data of NIST's scorer: correct, substituted, deleted and inserted words of each utterance."""
    root = folder(corpora, "metric_wer_sclite")

    def texts(name: str) -> dict[str, str]:
        score = re.findall(r"^(.*)\((\S+)\)\s*$", (root / name).read_text(), re.MULTILINE)
        return {id.lower(): text for text, id in score}

    references, hypotheses = texts("csrnab.ref"), texts("csrnab.hyp")
    rows = [line.split("\t") for line in (root / "expected_per_utt.tsv").read_text().splitlines()[1:]]
    assert len(rows) == 51
    other = []
    for id, *numbers, _ in rows:
        score = counts(wer_as_written([hypotheses[id]], [references[id]]))
        expected = tuple(map(int, numbers))
        assert sum(score[1:]) == sum(expected[1:]) and score[0] + score[1] + score[2] == sum(expected[:3]), id
        other += [id] if score != expected else []
    assert other == ["4t0c0207"]  # as many errors in another of its best alignments: sclite's substitution costs more
    ids = [row[0] for row in rows]
    total = wer_as_written([hypotheses[id] for id in ids], [references[id] for id in ids])
    assert sum(counts(total)[1:]) == 169 and total["words"] == 1406 and total["wer"] == 12.02
    plain = [row[0] for row in rows if row[-1] == "0"]
    total = wer_as_written([hypotheses[id] for id in plain], [references[id] for id in plain])
    assert counts(total) == (1060, 109, 7, 17) and total["wer"] == 11.31


# --- ROUGE ---------------------------------------------------------------------------------------------------------


def test_rouge_of_known_overlaps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    score = rouge(["testing one"], ["testing one two"])
    assert (score["rouge1"], score["rouge2"], score["rougeL"]) == (80.0, 66.67, 80.0)
    assert rouge(["Testing; one TWO"], ["testing one two"])["rougeL"] == 100
    assert rouge(["he walked"], ["he walks"])["rouge1"] == 100  # stems
    assert rouge(["", "a b"], ["a b", "a b"])["rouge2"] == 50
    assert caplog.messages == []  # the library logs a line about its tokenizer unless it is given one


def test_rouge_with_several_references_takes_the_best() -> None:
    assert rouge(["a b c"], [["x y z", "a b d"]])["rouge1"] == 66.67
    assert rouge(["a b c"], [["x y z"]])["rouge1"] == 0


def test_rouge_of_rouge_155(corpora: Path) -> None:
    """ROUGE-1.5.5's own numbers for two long texts."""
    cases = json.loads((folder(corpora, "metric_rouge_xsum") / "google_rouge_cases.json").read_text())
    for key in ("rouge1", "rouge2"):
        for i, (_, _, f) in enumerate(cases["expected_r_p_f"][f"{key}_stem"]):
            assert rouge([cases["prediction"][i]], [cases["target"][i]])[key] == pytest.approx(100 * f, abs=0.006)


SYSTEMS: list[Any] = [("topic-convs2s", 9)]
SYSTEMS += [
    pytest.param(name, 1, marks=pytest.mark.slow)
    for name in ("topic-convs2s", "convs2s", "ptgen", "ext-oracle", "lead")
]


@pytest.mark.parametrize(("system", "every"), SYSTEMS)
def test_rouge_of_xsum_systems(corpora: Path, system: str, every: int) -> None:
    """The XSum authors' own (ROUGE-1.5.5 on other tokens than ours): to 0.75 on a ninth, to 0.5 on all."""
    root = folder(corpora, "metric_rouge_xsum")
    line = (root / f"{system}-test-output.rouge").read_text().splitlines()[0]
    expected = dict(zip(("rouge1", "rouge2", "_", "rougeL"), map(float, line.split(": ")[1].split("/")), strict=False))
    output, gold = lines(root / f"{system}-test-output.txt.gz"), lines(root / "gold-test-sentences.txt.gz")
    assert len(gold) == len(output) == 11334
    score = rouge(output[::every], gold[::every])
    for key in ("rouge1", "rouge2", "rougeL"):
        assert score[key] == pytest.approx(expected[key], abs=0.5 if every == 1 else 0.75)


# --- accuracy ------------------------------------------------------------------------------------------------------


def test_intent_accuracy() -> None:
    values = score(IntentAccuracy, list("abcb"), ["a", "b", "", "a"], list("abcd"), [""] * 4, [""] * 4)
    assert (values["accuracy"], values["accuracy_constrained"]) == (50, 75) and "wer" not in values
    values = score(IntentAccuracy, ["b", "a"], ["a", "a"], ["b", "a"], ["", "x y"], ["", "x z"])
    assert (values["accuracy"], values["wer"], values["words"]) == (50, 50, 2)


def test_scores_have_names() -> None:
    """What `task.score` may name, and what a validation then logs."""
    classes = text_metrics()
    assert set(classes) >= {"bleu", "rouge", "wer", "wer_as_written", "intent"}
    batch = {"hypotheses": ["a"], "references": ["a b"], "labels": ["x"], "free": ["x"], "constrained": ["y"]}
    for kind in classes.values():
        assert kind.logged.keys() <= score(kind, *(batch.get(name, [()]) for name in kind.fields)).keys()
