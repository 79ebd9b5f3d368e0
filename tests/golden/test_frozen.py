"""Configurations, printed texts and refusals are as before. Their files, and how to write them again: frozen.py."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.golden import frozen

EVERY = 6  # the others are slow
AGAIN = "If the change is intended, write the files again: python -m tests.golden.frozen"


def some(values: Iterable[Any]) -> list[Any]:
    """All of them, most marked slow."""
    return [pytest.param(value, marks=[pytest.mark.slow] * bool(i % EVERY)) for i, value in enumerate(values)]


def test_every_option_has_its_configuration() -> None:
    texts = frozen.CONFIGURATIONS.read_text(encoding="utf-8")
    assert [line[3:] for line in texts.splitlines() if line.startswith("## ")] == frozen.command_lines(), AGAIN


@pytest.mark.parametrize("line", some(frozen.command_lines()))
def test_a_configuration(line: str) -> None:
    texts = frozen.CONFIGURATIONS.read_text(encoding="utf-8").split("\n\n")
    assert frozen.configurations([line])[line].strip() in [text.strip() for text in texts], AGAIN


@pytest.mark.parametrize("line", frozen.PRINTED)
def test_what_is_printed(line: str) -> None:
    assert frozen.printed(line) in frozen.OUTPUTS.read_text(encoding="utf-8"), AGAIN


@pytest.mark.parametrize("refusal", some(frozen.refusals()), ids=lambda refusal: " ".join(refusal[0])[:60])
def test_a_refusal_names_the_key(refusal: tuple[list[str], str, str]) -> None:
    arguments, key, nearest = refusal
    message = frozen.refusal(arguments)
    assert "\n" not in message
    assert message.startswith(key)
    assert frozen.nearest(message) == nearest
