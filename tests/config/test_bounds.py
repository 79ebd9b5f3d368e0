"""Values against annotations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Lt, MinLen, MultipleOf

from attnlab.config.nodes import fits, words


class Tensor: ...


CASES = [  # annotation, values that fit, values that do not, words
    (int, [1, -1], [1.0, True, "1", None, [1]], "int"),
    (float, [1, 1.5], [True, "1", None, float("nan"), float("inf")], "float"),
    (bool, [True], [1, "true", None], "bool"),
    (str, ["x"], [1, None], "str"),
    (Path | None, ["x", None], [5], "a path or null"),
    (Literal["a", 2], ["a", 2], ["b", None], "a or 2"),
    (list[int], [[], [1, 2]], [[1.5], "ab", 1, None], "a list, each int"),
    (tuple[int, ...], [[], [1, 2]], [["a"]], "a list, each int"),
    (tuple[int, str], [[1, "a"]], [[1], [1, 2], [1, "a", 1]], "a list of 2, each int"),
    (Sequence[Sequence[int]], [[[1]]], [[1]], None),
    (Mapping[str, int], [{"a": 1}], [1], "a group of keys"),
    (Any, [None, 1, "x"], [], None),
    (Annotated[int, Ge(1)] | None, [1, None], [0, 1.5, True, "1"], "int >= 1 or null"),
    (Annotated[int | None, Ge(1)], [1, None], [0], "int >= 1 or null"),
    (Annotated[float, Gt(0), Lt(1)] | None, [0.5, None], [0, 1, float("inf")], "float > 0 and < 1 or null"),
    (Annotated[int, Ge(0), MultipleOf(2)], [0, 2], [1, -2], "int >= 0, a multiple of 2"),
    (Annotated[int, Ge(1)] | Literal["auto", -1], [2, "auto", -1], [0, "car"], "int >= 1 or auto or -1"),
    (list[Annotated[float, Gt(0)]], [[], [1, 2.5]], [[0], 3], "a list, each float > 0"),
    (Annotated[list[int], MinLen(1)], [[3]], [[], ["a"]], "a list, each int, not empty"),
    (Annotated[str, "a description"], ["", "a"], [1], "str"),
    (Tensor, [1, "x"], [None], "a Tensor"),
]


@pytest.mark.parametrize(("annotation", "good", "bad", "expected"), CASES)
def test_values_and_annotations(annotation: Any, good: list[Any], bad: list[Any], expected: str | None) -> None:
    assert [value for value in good if not fits(annotation, value)] == []
    assert [value for value in bad if fits(annotation, value)] == []
    assert expected in (None, words(annotation))
