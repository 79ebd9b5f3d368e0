"""Signatures read from source equal those that Python itself reports."""

import inspect
import pkgutil
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import pytest

import attnlab.config.schema as module
from attnlab.config.annotation import annotation_of, fits, literals, parse, surely_fits, words
from attnlab.config.schema import siblings, signature


@pytest.mark.parametrize(
    "target",
    [
        "torch.optim.Adam",  # re-exported
        "torch.optim.lr_scheduler.LambdaLR",
        "torch.nn.Linear",
        "torch.nn.LayerNorm",
        "torch.nn.TransformerEncoder",
        "attnlab.attention.MHA",
        "attnlab.attention.MTLA",
        "attnlab.config.build.instantiate",  # a function
        "json.JSONEncoder",
    ],
)
def test_equal_to_inspect(target: str) -> None:
    found = signature(target)
    expected = inspect.signature(pkgutil.resolve_name(target)).parameters.values()
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    assert found is not None
    names = [parameter.name for parameter in expected if parameter.kind not in variable]
    options = [parameter for parameter in expected if parameter.kind == inspect.Parameter.VAR_KEYWORD]
    unpacked = [option.annotation for option in options if get_origin(option.annotation) is Unpack]
    for keywords in unpacked:
        names += get_type_hints(get_args(keywords)[0])
    assert list(found.parameters) == names
    assert found.open == (len(options) > len(unpacked))


SOURCE = """
import collections.abc as abc
from dataclasses import dataclass, field
from typing import ClassVar, Literal
import torch.nn as nn
from torch.nn import Linear as Plain

Kind = Literal["a", "b"]
Sizes = list[int] | None

@dataclass
class Base:
    size: int
    count: ClassVar[int] = 3

@dataclass(frozen=True)
class Child(Base):
    kind: Kind = "a"
    sizes: "Sizes" = None

class Sub(nn.Linear):
    pass

class Renamed(Plain):
    def __init__(self, *args, width: "int | str" = 1, **kwargs): ...

class Made:
    def __init__(self, a, /, b: float = 1.0): ...

    @classmethod
    def from_b(cls, b: float): ...

Alias = Made

if True:
    class Conditional:
        def __init__(self, inside): ...
"""


@pytest.fixture
def example(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "attnlab").mkdir()
    (tmp_path / "attnlab" / "__init__.py").touch()
    (tmp_path / "attnlab" / "example.py").write_text(SOURCE)
    (tmp_path / "attnlab" / "star.py").write_text("from .example import *\nfrom .loop import x\n")
    (tmp_path / "attnlab" / "loop.py").write_text("from .star import x\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for cached in (module._file, module._body):
        cached.cache_clear()
    yield
    for cached in (module._file, module._body):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("target", "parameters", "is_open"),
    [
        ("attnlab.example.Child", ["size", "kind", "sizes"], False),
        ("attnlab.example.Sub", ["in_features", "out_features", "bias", "device", "dtype"], False),
        ("attnlab.example.Renamed", ["width"], True),
        ("attnlab.example.Made", ["a", "b"], False),
        ("attnlab.example.Made.from_b", ["b"], False),
        ("attnlab.example.Alias", ["a", "b"], False),
        ("attnlab.example.Conditional", ["inside"], False),
        ("attnlab.star.Child", ["size", "kind", "sizes"], False),
    ],
)
def test_forms_of_definition(example: None, target: str, parameters: list[str], is_open: bool) -> None:
    found = signature(target)
    assert found is not None
    assert (list(found.parameters), found.open) == (parameters, is_open)


def test_names_for_types_are_written_out(example: None) -> None:
    found = signature("attnlab.example.Child")
    assert found is not None
    kind, sizes = found.parameters["kind"], found.parameters["sizes"]
    assert kind is not None and literals(kind) == ["a", "b"]
    assert sizes is not None and words(sizes) == "a list, each int or null"


@pytest.mark.parametrize(
    "target", ["attnlab.example.Nothing", "attnlab.nothing.Child", "nothing", "attnlab.example", "attnlab.star.x"]
)
def test_a_name_that_is_not_there(example: None, target: str) -> None:
    with pytest.raises(LookupError):
        signature(target)


def test_names_beside() -> None:
    assert "attnlab.attention.MTLA" in siblings("attnlab.attention.Nothing")
    assert siblings("nowhere.Nothing") == []


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        ("int", [1, -1], [1.0, True, "1", None, [1]]),
        ("float", [1, 1.5], [True, "1", None, float("nan"), float("inf")]),
        ("bool", [True], [1, "true", None]),
        ("str", ["x"], [1, None]),
        ("Path | None", ["x", None], [1]),
        ("Optional[int]", [1, None], [1.5]),
        ("Union[int, 'str']", [1, "x"], [None, 1.5]),
        ("Literal['a', 2]", ["a", 2], ["b", None]),
        ("list[int]", [[], [1, 2]], [[1.5], "ab", 1, None]),
        ("tuple[int, ...]", [[], [1, 2]], [["a"]]),
        ("tuple[int, str]", [[1, "a"]], [[1], [1, 2], [1, "a", 1]]),
        ("Sequence[Sequence[int]]", [[[1]]], [[1]]),
        ("Mapping[str, int]", [{"a": 1}], [1]),
        ("Annotated[int, 'x']", [1], ["x"]),
        ("Any", [None, 1, "x"], []),
        ("Tensor", [1, "x"], [None]),
        ("'int | None'", [1, None], ["x"]),
    ],
)
def test_values_and_annotations(annotation: str, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not fits(parse(annotation), value)] == []
    assert [value for value in bad if fits(parse(annotation), value)] == []


def test_what_surely_fits() -> None:
    assert surely_fits(parse("float | Tensor"), 1.0)
    assert not surely_fits(parse("float | Tensor"), "x") and fits(parse("float | Tensor"), "x")
    assert not surely_fits(parse("list[float | Tensor]"), [1.0])


@pytest.mark.parametrize(
    ("value", "phrase"),
    [
        (1, "int"),
        (1.0, "float"),
        (True, "bool"),
        ("x", "str"),
        ([1, 2], "a list, each int"),
        ([1, "a"], "a list"),
        ({}, "a group of keys"),
    ],
)
def test_the_annotation_of_a_default(value: Any, phrase: str) -> None:
    annotation = annotation_of(value)
    assert annotation is not None and words(annotation) == phrase
    assert fits(annotation, value)


def test_null_has_no_annotation() -> None:
    assert annotation_of(None) is None
