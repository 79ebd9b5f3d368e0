"""The same numbers from one process and from several, however unequal their shares are."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.errors import DataError
from attnlab.metrics.numbers import Perplexity, TopAccuracy
from attnlab.metrics.text import BLEU, ROUGE, WER, IntentAccuracy, Predictions, WERAsWritten
from tests.metrics.processes import in_processes

SIZE = 13
WORDS = ["über", "", "the", "cat", "sat", "日本", "on", "a", "mat", "it's", "{x", "/", "y}", "🙂", "don't", "U.S."]


def corpus() -> list[dict[str, Any]]:
    """Sentences with empty texts, texts of several bytes a letter, and references of unequal number."""
    draw = torch.Generator().manual_seed(3)

    def text(most: int) -> str:
        length = int(torch.randint(0, most, (), generator=draw))
        return " ".join(WORDS[int(i)] for i in torch.randint(0, len(WORDS), (length,), generator=draw))

    return [
        {
            "hypotheses": "" if i == 4 else text(9),
            "references": text(9) + " end",
            "others": tuple(text(5) for _ in range(i % 3)),
            "labels": "ab"[i % 2],
            "free": "abc"[i % 3],
            "constrained": "b",
            "rows": (str(i), text(4), text(4), text(4)),
            "logits": torch.randn(7, generator=draw).tolist(),
            "nats": float(torch.rand((), generator=draw, dtype=torch.float64)) * 10 ** (i % 5),
            "counts": i + 1,
            "right": i % 7,
        }
        for i in range(SIZE)
    ]


def scores(rank: int, world: int, shares: list[list[int]]) -> dict[str, Any]:
    """Every metric of this rank's share, two items at a time."""
    items = corpus()
    metrics = {
        "bleu": (BLEU(SIZE), ("hypotheses", "references")),
        "rouge": (ROUGE(SIZE), ("hypotheses", "references", "others")),
        "wer": (WERAsWritten(SIZE), ("hypotheses", "references")),
        "intent": (IntentAccuracy(SIZE), ("labels", "free", "constrained", "hypotheses", "references")),
        "rows": (Predictions(SIZE), ("rows",)),
    }
    perplexity, top = Perplexity(SIZE, words_per_token=0.7), TopAccuracy(SIZE, classes=7)
    share = shares[rank]
    for index in (share[i : i + 2] for i in range(0, len(share), 2)):
        for metric, names in metrics.values():
            metric.update(index, **{name: [items[i][name] for i in index] for name in names})
        numbers = {name: torch.tensor([items[i][name] for i in index]) for name in ("counts", "logits", "right")}
        nats = torch.tensor([items[i]["nats"] for i in index], dtype=torch.float64)
        perplexity.update(index, nats, numbers["counts"])
        top.update(index, numbers["logits"], numbers["right"])
    every = {name: metric for name, (metric, _) in metrics.items()} | {"perplexity": perplexity, "top": top}
    return {name: metric.compute() for name, metric in every.items()}


def test_two_and_three_processes_score_as_one(tmp_path: Path) -> None:
    alone = scores(0, 1, [list(range(SIZE))])
    assert [row[0] for row in alone["rows"]] == [str(i) for i in range(SIZE)]  # corpus order
    assert 0 < alone["bleu"]["bleu"] < 100 and alone["perplexity"]["tokens"] == SIZE * (SIZE + 1) // 2
    shares = {
        "2, uneven, shuffled, one item twice": [[12, 0, 5, 7, 1], [2, 3, 4, 6, 8, 9, 10, 11, 0]],
        "3, the first has nothing": [[], [0], [*range(12, 0, -1)]],
    }
    for name, share in shares.items():
        for result in in_processes(len(share), tmp_path / name, scores, share):
            assert result == alone, name


def not_finite(rank: int, world: int) -> str:
    metric = TopAccuracy(4, classes=3)
    logits = torch.eye(3)[[0, 1]]
    if rank:
        logits[1, 2] = math.nan
    metric.update([rank, rank + 2], logits, torch.tensor([0, 1]))
    with pytest.raises(DataError) as error:
        metric.compute()
    return str(error.value)


def test_images_with_logits_that_are_not_finite_are_an_error_on_every_process(tmp_path: Path) -> None:
    for result in in_processes(2, tmp_path, not_finite):
        assert result == "the model's logits are NaN or infinite for 1 of 4 images (the first is number 3)"


def missing(rank: int, world: int) -> str:
    metric = WER(5)
    metric.update([rank], ["a"], ["a"])
    with pytest.raises(RuntimeError) as error:
        metric.compute()
    return str(error.value)


def test_items_without_a_score_are_an_error_on_every_process(tmp_path: Path) -> None:
    for result in in_processes(2, tmp_path, missing):
        assert result.startswith("WER: 3 of 5 items were not scored (the first is number 2)")


def test_an_index_outside_the_corpus_is_an_error() -> None:
    metric = BLEU(1)
    metric.update([0, 1], ["a", "b"], ["a", "b"])
    with pytest.raises(RuntimeError, match="index 1 is outside a corpus of 1"):
        metric.compute()
    metric.reset()
    metric.update([0], ["a", "b"], ["a", "b"])
    with pytest.raises(ValueError, match="longer"):
        metric.compute()
