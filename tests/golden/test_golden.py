"""Losses of tiny seeded runs: a change that should not alter results must not alter these.

The tolerance is for other processors and thread counts, which add in another order. To accept a change that must alter
them: python -m tests.golden
"""

from pathlib import Path
from statistics import fmean

import pytest

from tests.golden.runs import FOLDER, RUNS, file, losses

TOLERANCE = 2e-3  # relative


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_as_before(name: str, tmp_path: Path) -> None:
    expected = [float(line) for line in file(name).read_text().split()]
    assert losses(name, tmp_path) == pytest.approx(expected, rel=TOLERANCE)
    half = len(expected) // 2
    assert fmean(expected[half:]) < 0.99 * fmean(expected[:half])  # a run that learns nothing would prove little


def test_every_file_is_of_a_run() -> None:
    assert {path.stem for path in FOLDER.glob("*_*.txt")} == set(RUNS)
