"""Annotations with bounds, read as source and kept at construction."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from annotated_types import Ge, Gt, Lt, MinLen

from attnlab.attention import MHA
from attnlab.config.annotation import fits, parse, surely_fits, within, words
from attnlab.config.bounds import bounded
from attnlab.config.schema import signature

CASES = [  # annotation, values that fit, values that do not, words
    ("Annotated[int, Ge(1)]", [1, 5], [0, 1.5, True, None, "1"], "int >= 1"),
    ("Annotated[int, Ge(1)] | None", [1, None], [0], "int >= 1 or null"),
    ("Annotated[int | None, Ge(1)]", [1, None], [0], "int >= 1 or null"),
    ("Optional[Annotated[float, Gt(0), Lt(1)]]", [0.5, None], [0, 1, float("inf")], "float > 0 and < 1 or null"),
    ("Annotated[float, annotated_types.Ge(ge=0)]", [0, 0.5], [-1, float("nan")], "float >= 0"),
    ("Annotated[int, Ge(1)] | Literal['auto']", [2, "auto"], [0, "car"], "int >= 1 or auto"),
    ("Annotated[int, Ge(1)] | Literal[-1]", [2, -1], [0, -2], "int >= 1 or -1"),
    ("list[Annotated[float, Gt(0)]]", [[], [1, 2.5]], [[0], 3], "a list, each float > 0"),
    ("Annotated[list[int], MinLen(1)]", [[3]], [[], ["a"]], "a list, each int, not empty"),
    ("Annotated[str, MinLen(1)]", ["a"], ["", 1], "str, not empty"),
    ("Annotated[str, 'a description']", ["", "a"], [1], "str"),
    ("bool", [True], [1, "true"], "bool"),
    ("Path", ["x"], [5], "a path"),
]


@pytest.mark.parametrize(("text", "good", "bad", "expected"), CASES)
def test_bounds(text: str, good: list[Any], bad: list[Any], expected: str) -> None:
    annotation = parse(text)
    for value in good:
        assert fits(annotation, value) and surely_fits(annotation, value), value
    for value in bad:
        assert not fits(annotation, value), value
    assert words(annotation) == expected


def test_only_bounds_matter_once_python_has_built_the_value() -> None:
    assert within(parse("Annotated[int, Ge(1)] | None"), None)
    assert within(parse("MHA | Annotated[int, Ge(1)]"), object())
    assert not within(parse("Annotated[int, Ge(1)] | None"), 0)
    assert not within(parse("list[Annotated[int, Ge(1)]]"), (1, 0))


@bounded
@dataclass(frozen=True)
class Settings:
    size: Annotated[int, Ge(1)] = 1
    sizes: Annotated[list[Annotated[int, Ge(1)]], MinLen(1)] | None = None


@bounded
class Plain:
    def __init__(self, rate: Annotated[float, Gt(0), Lt(1)], *, attention: MHA | None = None) -> None:
        self.rate = rate


def test_a_class_keeps_its_bounds_without_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The annotations are read from this file, as the configuration's check reads them."""
    found = signature(f"{__name__}.Settings")
    assert found is not None and not fits(found.parameters["size"] or parse("object"), 0)
    assert Settings(2, sizes=[3]).size == 2 and Plain(0.5).rate == 0.5
    for make, message in [
        (lambda: Settings(0), "size=0: expected int >= 1"),
        (lambda: Settings(sizes=[]), r"sizes=\[\]: expected a list, each int >= 1, not empty or null"),
        (lambda: Settings(sizes=[0]), r"sizes=\[0\]"),
        (lambda: Plain(rate=1.0), "rate=1.0: expected float > 0 and < 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="unexpected keyword argument 'sise'"):
        Settings(sise=1)  # type: ignore[call-arg]
