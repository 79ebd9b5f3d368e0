"""The losses of healing against their definitions, computed in float64 from what the models give."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attnlab.conversion import Healing
from attnlab.conversion.healing import Teacher
from attnlab.models import Decoder
from tests.conversion.models import decoder_of, reference, tokens

CALIBRATION, BATCH = tokens(3, 11, seed=2), tokens(2, 9, seed=3)


def eager(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


def pair() -> tuple[Decoder, Decoder]:
    """A teacher, and a student whose second layer's attention has other weights."""
    teacher, student = decoder_of(reference("llama")), decoder_of(reference("llama"))
    out = student.attentions[1].out
    assert isinstance(out, nn.Linear)
    nn.init.normal_(out.weight, std=0.2, generator=torch.Generator().manual_seed(4))
    return teacher, student


def passed(decoder: Decoder, ids: torch.Tensor) -> list[tuple[torch.Tensor, np.ndarray]]:
    """Input and output of each layer's attention, as the whole model calls it."""
    pairs: list[tuple[torch.Tensor, np.ndarray]] = []
    hooks = [
        attention.register_forward_hook(lambda _, x, y: pairs.append((x[0], y.double().numpy())))
        for attention in decoder.attentions
    ]
    with torch.no_grad():
        decoder(ids)
    for hook in hooks:
        hook.remove()
    return pairs


def test_layer_errors_are_squared_errors_over_the_variance_of_the_output() -> None:
    teacher, student = pair()
    pairs, calibration = passed(teacher, BATCH), passed(teacher, CALIBRATION)
    expected = np.zeros((2, 9))
    for attention, (x, y), (_, seen) in zip(student.attentions, pairs, calibration, strict=True):
        with torch.no_grad():
            squares = (attention(x).double().numpy() - y) ** 2
        outputs = seen.reshape(-1, seen.shape[-1])
        variance = ((outputs - outputs.mean(0)) ** 2).sum() / (len(outputs) - 1)
        expected += squares.sum(-1) / variance / len(pairs)
    errors = Teacher(teacher, CALIBRATION).layer_errors(student, BATCH, eager)
    np.testing.assert_allclose(errors.detach().numpy(), expected, rtol=1e-4)
    assert expected.min() > 1e-3


def test_the_divergence_is_that_of_the_student_from_the_teacher() -> None:
    """The sum over the vocabulary of p_teacher (log p_teacher - log p_student); the other direction differs."""
    teacher, student = pair()
    with torch.no_grad():
        logits = [model(BATCH).double().numpy() for model in (teacher, student)]
    p, q = (np.exp(z) / np.exp(z).sum(-1, keepdims=True) for z in logits)
    expected, other = (p * np.log(p / q)).sum(-1), (q * np.log(q / p)).sum(-1)
    divergence = Teacher(teacher, CALIBRATION).divergence(student, BATCH, eager)
    np.testing.assert_allclose(divergence.detach().numpy(), expected, rtol=1e-3, atol=1e-5)
    assert np.abs(expected / other - 1).max() > 0.1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["layers"] * 4 + ["logits"] * 4),
        ({"share": 0.75}, ["layers"] * 6 + ["logits"] * 2),
        ({"share": 0.25, "objective": ["layers", "logits", "text"]}, ["layers"] * 2 + ["logits"] * 3 + ["text"] * 3),
        ({"share": 0.25, "objective": ["text"]}, ["text"] * 8),
    ],
)
def test_objectives_have_their_share_of_the_updates(settings: dict[str, Any], expected: list[str]) -> None:
    assert [Healing(**settings).at(update / 8) for update in range(8)] == expected
    assert Healing(**settings).at(1.0) == expected[-1]
