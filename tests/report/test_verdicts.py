"""A verdict follows from the interval of a number by one rule."""

import shutil
from math import inf
from pathlib import Path

import pytest
import yaml

from attnlab.config.build import CONF
from attnlab.errors import ConfigError
from attnlab.report.claims import FILE, READINGS, Claim, Number, render, verdict
from attnlab.report.marks import Evidence


@pytest.mark.parametrize(
    ("number", "asks", "is_like", "expected"),
    [
        (Number(96, 96, exact=True), (96, 96), True, "reproduced"),
        (Number(95, 95, exact=True), (96, 96), True, "refuted"),
        (Number(96, 96, exact=True), (96, 96), False, "undecided at our size"),
        (Number(5.5, 6), (5.3, inf), True, "holds at our size"),
        (Number(3.6, 4), (5.3, inf), True, "does not hold at our size"),
        (Number(5, 6), (5.3, inf), True, "undecided at our size"),
        (Number(3.6, 4), (5.3, inf), False, "undecided at our size"),
        (Number(0.4, 2, p=0.01), (0, inf), True, "holds at our size"),
        (Number(-2, -0.4, p=0.01), (0, inf), True, "does not hold at our size"),
        (Number(-2, -0.4, p=0.05), (0, inf), True, "undecided at our size"),
        (Number(-2, -0.4, p=float("nan")), (0, inf), True, "undecided at our size"),
        (Number(-2, 0.4, p=0.01), (0, inf), True, "undecided at our size"),
    ],
)
def test_a_verdict(number: Number, asks: tuple[float, float], is_like: bool, expected: str) -> None:
    assert verdict(number, *asks, is_like=is_like) == expected


def test_the_numbers_of_marks_become_an_interval() -> None:
    assert READINGS["more"]([47.9, 48.1], 1).low == pytest.approx(-0.2)
    assert READINGS["times"]([2560, 500], 1).high == 5.12
    assert READINGS["spread"]([3.9, 3.6, 4.0], 1) == Number(3.6, 4.0)
    assert READINGS["difference"]([5.5, 3.0, 7.9, 3, 0.01, 0.1], 1) == Number(3.0, 7.9, p=0.1)
    one, many = (READINGS["seeds"]([67.0, 75.9, 72.3, 83.0, 84.8, 84.8], planned) for planned in (1, 24))
    assert one.low == many.low < one.high < 0 and many.p == pytest.approx(24 * one.p)


def test_two_seeds_decide_nothing() -> None:
    claim = Claim("C", "W", "Y", reads="difference", asks=(0, None))
    values = [-3.0, -4.0, -2.0, 3, 0.001, 0.004]
    assert claim.verdict(Evidence(values, [], frozenset({1, 2, 3}))) == "does not hold at our size"
    assert claim.verdict(Evidence(values, [], frozenset({1, 2}))) == "undecided at our size"


KERNEL = (
    "0.237<!-- = gpu/bench/bench.csv : ms : Record=R1; Shape=batch 64 prefix 0 context 32768; Variant=mtla triton -->"
)
SEARCH = "204<!-- = gpu/bench/bench.csv : ms : Record=R5; Variant=mtla -->"


def test_a_verdict_refuses_a_number_whose_check_failed(tmp_path: Path) -> None:
    """The search on an H100: its check compared products in TF32 with float64."""
    root = tmp_path / "experiments"
    shutil.copytree(CONF.parent / "experiments" / "gpu" / "bench", root / "gpu" / "bench")

    def page(number: str) -> str:
        claim = {"claim": "C", "where": "W", "why": "Y", "number": number}
        (root / FILE).write_text(yaml.safe_dump({"title": "T", "papers": {"P": {"claims": [claim]}}}, width=1000))
        return render(root / FILE)[0].read_text()

    text = page(KERNEL)
    assert f"| 1 | C | {KERNEL} (H100, 2026-11-26) | not run |" in text and "checks passed" in text
    with pytest.raises(ConfigError, match="claims.yaml.*table1_s3_h100.*its check failed"):
        page(SEARCH)
