"""Log-likelihoods with shared beginnings are those of every text alone."""

import random

import pytest
import torch

from attnlab.models import T6
from attnlab.run.device import autocast
from attnlab.tasks.language_modelling.continuations import log_likelihoods, shared_beginnings
from tests.attention.mechanisms import EVERY, Mechanism

WORDS = 13


def questions() -> tuple[list[list[int]], list[int]]:
    """Questions with several choices, choices that share a beginning, equal texts, and texts that share nothing."""
    draw = random.Random(0)

    def words(size: int) -> list[int]:
        return [draw.randrange(WORDS) for _ in range(size)]

    texts, counts = [], []
    for size in (9, 9, 12, 14, 3):
        question, begun = words(size), words(2)
        for choice in (begun + words(4), begun + words(1), words(3), words(1), words(1)):
            texts.append(question + choice)
            counts.append(len(choice))
    for size, ending in ((7, 5), (8, 2)):  # two contexts and one ending, as in WinoGrande
        question, end = words(size), words(ending)
        texts += [question + words(1) + end, question + words(2) + end]
        counts += [ending, ending]
    texts += [[5, 5], words(15), texts[0], texts[0]]
    counts += [1, 14, 1, len(texts[0]) - 1]
    return texts, counts


@torch.no_grad()
def alone(model: T6, text: list[int], count: int, num_ids: int) -> tuple[float, bool]:
    logits = model(torch.tensor([text[:-1]]))[0, -count:]
    targets = torch.tensor(text[-count:])
    logp = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
    return float(logp), bool((logits[:, :num_ids].argmax(-1) == targets).all())


@pytest.mark.parametrize("mechanism", EVERY, ids=str)
def test_every_mechanism(mechanism: Mechanism) -> None:
    torch.manual_seed(0)
    model = T6(WORDS, 32, lambda i: mechanism.build(seed=i), 2, max_length=32, output_init="default").double().eval()
    texts, counts = questions()
    expected = [alone(model, text, count, WORDS - 2) for text, count in zip(texts, counts, strict=True)]
    for size in (1, 6, 100):
        with torch.inference_mode():
            results = {i: rest for i, *rest in log_likelihoods(model, texts, counts, size, WORDS - 2)}
        assert sorted(results) == list(range(len(texts)))
        for i, (value, greedy) in enumerate(expected):
            assert results[i] == [pytest.approx(value, abs=1e-9), greedy]


@pytest.mark.parametrize("name", ["mha", "mla", "mtla"])
def test_caches_of_codes(name: str) -> None:
    """Scores of the whole text have the error of codes too, and are the same."""
    torch.manual_seed(0)
    model = T6(WORDS, 32, lambda i: Mechanism(name).build(seed=i), 2, max_length=32, output_init="default").double()
    for attention in model.eval().attentions:
        attention.cache_bits = 4
    texts, counts = questions()
    expected = [alone(model, text, count, WORDS)[0] for text, count in zip(texts, counts, strict=True)]
    with torch.inference_mode():
        results = {i: value for i, value, _ in log_likelihoods(model, texts, counts, 6)}
    assert [results[i] for i in range(len(texts))] == pytest.approx(expected, abs=1e-9)


def test_half_precision() -> None:
    """Shared beginnings add no rounding to that of autocast."""
    torch.manual_seed(0)
    model = T6(WORDS, 32, lambda i: Mechanism("mha").build(seed=i), 2, max_length=32, output_init="default")
    model = model.float().eval()
    texts, counts = questions()
    with torch.inference_mode(), autocast(torch.device("cpu"), torch.bfloat16):
        results = {i: value for i, value, _ in log_likelihoods(model, texts, counts, 6)}
        expected = [alone(model, text, count, WORDS)[0] for text, count in zip(texts, counts, strict=True)]
    assert [results[i] for i in range(len(texts))] == pytest.approx(expected, abs=0.2)


def test_work_that_is_saved() -> None:
    """Choices share their question, a shared beginning of two words is not worth a second pass."""
    texts = [[1, 2, *range(10, 30), choice] for choice in (1, 2, 3)] + [[1, 2, *range(40, 60)]]
    assert sorted(shared_beginnings(texts, 8)) == [(0, [3]), (22, [0, 1, 2])]
    assert [len(members) for _, members in shared_beginnings(texts, 2)] == [2, 1, 1]
