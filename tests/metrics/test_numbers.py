"""Top-k accuracy and perplexity against torchmetrics' own and against closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity as TorchmetricsPerplexity

from attnlab.errors import DataError
from attnlab.metrics.numbers import Perplexity, RecallAccuracy, TopAccuracy, exp_of_mean, wilson


def test_top_accuracy_is_torchmetrics() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(97, 11), torch.randint(11, (97,))
    metric = TopAccuracy(97, classes=11)
    metric.update(range(40), logits[:40], labels[:40])
    metric.update(range(40, 97), logits[40:], labels[40:])
    score = metric.compute()
    for k in (1, 5):
        reference = MulticlassAccuracy(num_classes=11, top_k=k, average="micro")
        assert score[f"top{k}"] == pytest.approx(100 * float(reference(logits, labels)), abs=6e-4)
    assert score["images"] == 97


def test_of_equal_logits_the_first_counts_as_with_argmax() -> None:
    """bfloat16 has many equal logits, and a file of predictions names the argmax."""
    logits = torch.randint(0, 3, (200, 20), generator=torch.Generator().manual_seed(1)).bfloat16()
    metric = TopAccuracy(200, classes=20)
    metric.update(list(range(200)), logits, logits.argmax(-1))
    assert metric.compute()["top1"] == 100


def test_top_five_of_three_classes() -> None:
    metric = TopAccuracy(2, classes=3)
    metric.update([1, 0], torch.eye(3)[:2], torch.tensor([0, 2]))
    assert metric.compute() == {"top1": 50.0, "top5": 100.0, "images": 2}


def test_perplexity_is_torchmetrics() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 9, 5), torch.randint(5, (6, 9))
    targets[5, 4:] = -1
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1, reduction="none")
    metric = Perplexity(6, words_per_token=0.5)
    metric.update(range(6), losses.double().sum(-1), (targets != -1).sum(-1))
    reference = TorchmetricsPerplexity(ignore_index=-1)
    score = metric.compute()
    assert score["perplexity"] == pytest.approx(float(reference(logits, targets)), rel=1e-5)
    assert score["perplexity_per_word"] == pytest.approx(score["perplexity"] ** 2, rel=1e-5) and score["tokens"] == 49
    squares = [end**2 for end in score["perplexity_interval"]]
    assert score["perplexity_per_word_interval"] == pytest.approx(squares, rel=1e-3)


def test_perplexity_sums_in_float64() -> None:
    """A float32 sum would lose each of the small windows."""
    metric = Perplexity(1001)
    metric.update(range(1001), torch.tensor([2.0**25] + [1.0] * 1000), torch.tensor([2**24] + [1] * 1000))
    assert metric.compute()["perplexity"] == round(math.exp((2**25 + 1000) / (2**24 + 1000)), 4)


def test_perplexity_of_a_model_without_numbers() -> None:
    metric = Perplexity(2)
    metric.update(range(2), torch.tensor([1.0, math.nan]), torch.ones(2))
    with pytest.raises(DataError, match="logits are NaN or infinite"):
        metric.compute()


def test_recall_is_the_mean_over_sequences_of_the_share_of_right_answers() -> None:
    metric = RecallAccuracy([("short", 1), ("long", 2)])
    metric.update([2, 0, 1], torch.tensor([3.0, 0.5, 2.5]), torch.tensor([1, 2, 0]), torch.tensor([4, 2, 3]))
    assert metric.compute() == {
        "accuracy": round((1 + 0 + 1 / 4) / 3, 4), "loss": round(6.0 / 9, 4),
        "cells": {"short": 1.0, "long": 0.125}, "sequences": 3, "answers": 9,
    }  # fmt: skip


def test_an_interval_of_windows_holds_the_mean_in_95_of_100_samples() -> None:
    draw = np.random.default_rng(0)
    holds = 0
    for _ in range(400):
        counts = draw.integers(50, 100, 20).astype(float)
        nats = counts * draw.gamma(4, 0.75, 20)  # of a mean of 3
        value, interval = exp_of_mean(nats.tolist(), counts.tolist())
        assert interval is not None and interval[0] < value < interval[1]
        holds += interval[0] <= math.exp(3) <= interval[1]
    assert 0.91 < holds / 400 < 0.98
    rows = draw.normal(3, 1, 12).tolist()  # of one length: Student's interval of a mean
    usual = stats.t.interval(0.95, 11, np.mean(rows), stats.sem(rows))
    assert exp_of_mean(rows, [1.0] * 12)[1] == pytest.approx(np.exp(usual), abs=1e-4)
    assert exp_of_mean([0.0] * 5, [7.0] * 5) == (1.0, [1.0, 1.0])  # two models that are one
    assert exp_of_mean([3.0], [1.0])[1] is None


@pytest.mark.parametrize(("right", "count"), [(0, 10), (10, 10), (10, 20), (31, 32), (1, 1)])
def test_wilson_is_that_of_scipy(right: int, count: int) -> None:
    interval = stats.binomtest(right, count).proportion_ci(method="wilson")
    assert wilson(right / count, count) == pytest.approx([interval.low, interval.high], abs=1e-4)
