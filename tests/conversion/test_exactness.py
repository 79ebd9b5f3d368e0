"""Whole converted models against transformers in float64, and the committed matrix of their differences."""

import csv
import io

import pytest

from attnlab.config.build import CONF
from tests.attention.mechanisms import error
from tests.conversion.exactness import BOUND, NAMES, TARGETS, logits, row, table
from tests.conversion.models import FAMILIES, tokens

COMMITTED = CONF.parent / "experiments/convert/exactness.csv"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_decoder_is_exact_in_float64(name: str) -> None:
    ids = tokens(2, 24)
    want, decoder = logits(name, ids)
    assert error(decoder(ids), want) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_full_rank_is_exact_in_a_whole_model(name: str) -> None:
    values = row(name)
    numbers = [value for value in values if isinstance(value, float)]
    assert len(numbers) >= (2 if "window" in name else 4)  # MTLA and TPA have no windows, TPA no biases and no norms
    assert max(numbers) < BOUND


@pytest.mark.slow
def test_the_committed_matrix_is_that_of_these_models() -> None:
    """Its numbers are rounding errors, which differ between machines; what is exact and what is refused does not."""
    committed, now = (list(csv.reader(io.StringIO(text))) for text in (COMMITTED.read_text(), table().csv()))
    assert [line[0] for line in committed[1:]] == list(NAMES.values()) and committed[0][2:] == list(TARGETS)
    assert [line[0] for line in committed] == [line[0] for line in now]
    for before, after in zip(committed[1:], now[1:], strict=True):
        for old, new in zip(before[1:], after[1:], strict=True):
            if old.startswith("refused"):
                assert new == old
            else:
                assert float(old) < BOUND and float(new) < BOUND
