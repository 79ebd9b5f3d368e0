"""Signatures read from source equal those that Python itself reports."""

import inspect
import pkgutil
from pathlib import Path
from typing import Unpack, get_args, get_origin, get_type_hints

import pytest

from attnlab.config.nodes import declared, literals, words
from attnlab.config.schema import ancestors, constant, definition, signature


@pytest.mark.parametrize(
    "target",
    [
        "torch.optim.Adam",  # re-exported
        "lightning.pytorch.callbacks.EarlyStopping",
        "attnlab.attention.MHA",
        "attnlab.attention.MTLA",
        "attnlab.config.build.instantiate",  # a function
    ],
)
def test_equal_to_inspect(target: str) -> None:
    schema = signature(target)
    expected = inspect.signature(pkgutil.resolve_name(target)).parameters.values()
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [parameter.name for parameter in expected if parameter.kind not in variable]
    options = [parameter for parameter in expected if parameter.kind == inspect.Parameter.VAR_KEYWORD]
    unpacked = [option.annotation for option in options if get_origin(option.annotation) is Unpack]
    for keywords in unpacked:
        names += get_type_hints(get_args(keywords)[0])
    assert list(schema.parameters) == names
    assert schema.open == (len(options) > len(unpacked))


SOURCE = """
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypedDict, Unpack
import torch.nn as nn
from torch.nn import Linear as Plain

class Options(TypedDict):
    depth: int

class MoreOptions(Options):
    width: "list[Kind]"

class Unreadable:
    def __init__(self, run: print("evaluated"), or_text: int | "x", **options: Unpack[MoreOptions]): ...

Kind = Literal["a", "b"]
Sizes = list[int] | None
raise RuntimeError("imported")

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
    def __init__(self, a: "dict[str, Child] | None", /, b: float = 1.0): ...

Alias = Made
EVERY_TASK = True
LATER = EVERY_TASK

if True:
    class Conditional:
        def __init__(self, inside): ...
"""


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "read_as_source").mkdir()
    (tmp_path / "read_as_source" / "__init__.py").touch()
    (tmp_path / "read_as_source" / "example.py").write_text(SOURCE)
    (tmp_path / "read_as_source" / "star.py").write_text("from .example import *\nfrom .loop import x\n")
    (tmp_path / "read_as_source" / "loop.py").write_text("from .star import x\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("target", "parameters", "is_open"),
    [
        ("example.Child", ["size", "kind", "sizes"], False),
        ("example.Sub", ["in_features", "out_features", "bias", "device", "dtype"], False),
        ("example.Renamed", ["width"], True),
        ("example.Made", ["a", "b"], False),
        ("example.Alias", ["a", "b"], False),
        ("example.Conditional", ["inside"], False),
        ("star.Child", ["size", "kind", "sizes"], False),
    ],
)
def test_forms_of_definition(example: None, target: str, parameters: list[str], is_open: bool) -> None:
    schema = signature(f"read_as_source.{target}")
    assert (list(schema.parameters), schema.open) == (parameters, is_open)


def test_what_else_is_read_without_importing(example: None) -> None:
    module = "read_as_source.example"
    schema = signature(f"{module}.Child")
    assert literals(schema.parameters["kind"]) == ["a", "b"]
    assert signature(f"{module}.Unreadable").parameters["or_text"] is None
    assert words(signature(f"{module}.Unreadable").parameters["width"]) == "a list, each a or b"
    assert declared({"_target_": f"{module}.Unreadable"}, "attention", "depth") == []  # not a mechanism: it is not read
    assert words(schema.parameters["sizes"]) == "a list, each int or null"
    assert definition(f"{module}.Alias") == (module, "Made")
    assert {"torch.nn.modules.linear.Linear", "torch.nn.modules.module.Module"} < ancestors(f"{module}.Renamed")
    assert constant(f"{module}.EVERY_TASK") is True
    assert constant(f"{module}.LATER") is None and constant(f"{module}.NONE") is None
    assert definition("read_as_source.star.x") is None  # modules that import each other
