"""A verdict follows from the interval of a number by one rule."""

from math import inf

import pytest

from attnlab.report.claims import READINGS, Claim, Number, verdict
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
