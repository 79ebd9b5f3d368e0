"""Sentences with random facts: what a model is asked to recall from a long text."""

import numpy as np

TEMPLATES = (  # what stands before the answer, in the fact and in the question; short, for windows of few bytes
    "The answer of {name} is",
    "The code for {name} is",
    "The choice of {name} is",
    "The secret of {name} is",
    "The key that {name} has is",
    "The symbol of {name} is",
)
NAMES = (
    "Adele", "Bruno", "Celeste", "Dmitri", "Esther", "Farid", "Greta", "Hugo", "Ines", "Jasper", "Keiko", "Lorenzo",
    "Mabel", "Nikolai", "Oskar", "Petra", "Quentin", "Rosa", "Stefan", "Tamara", "Ursula", "Viktor", "Wanda", "Xenia",
    "Yusuf", "Zofia",
)  # fmt: skip


def sentence(draw: np.random.Generator, digits: int) -> tuple[str, str]:
    """The beginning of a sentence about a random name, and the random number of so many digits that it ends with."""
    beginning = " " + TEMPLATES[draw.integers(len(TEMPLATES))].format(name=NAMES[draw.integers(len(NAMES))])
    return beginning, str(draw.integers(10 ** (digits - 1), 10**digits))
