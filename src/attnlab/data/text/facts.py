"""Texts with facts that are repeated: sentences with an invented name and a number, of which a model retrieves most.

No name and no number is one of the needle's (`tasks.language_modelling.needle`), whose names are shorter, and whose
numbers have five digits by default.
"""

import numpy as np

from attnlab.data.samples.world import random_fact
from attnlab.data.text.vocabulary import Vocabulary

DIGITS, LETTERS = 6, 9
REPEATED = 0.75  # share of the facts that repeat one of the same text
AT_ONCE = 0.25  # share of the texts that begin with a fact: trained models treat the first positions in their own way


def with_facts(ids: list[int], vocabulary: Vocabulary, draw: np.random.Generator) -> list[int]:
    """A text of as many ids, with new and repeated facts between its pieces."""
    most, place = max(2, len(ids) * 3 // 4), 0  # ids between two facts
    row: list[int] = []
    facts: list[list[int]] = []
    while len(row) < len(ids):
        size = 0 if not row and draw.random() < AT_ONCE else int(draw.integers(1, most))
        row += ids[place : place + size]
        place += size
        if not facts or draw.random() >= REPEATED:
            facts.append(vocabulary.ids("{} {}.".format(*random_fact(draw, DIGITS, LETTERS))))
            row += facts[-1]
        else:
            row += facts[draw.integers(len(facts))]
    return row[: len(ids)]
