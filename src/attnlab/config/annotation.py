"""Whether a value from YAML may stand where a Python annotation does, and how to say so to a person.

Annotations are read as syntax (`ast`), so nothing has to be imported. What is not understood is let through: the class
itself still checks it.
"""

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SCALARS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "Path": "a path"}
_LISTS = {"list", "List", "tuple", "Tuple", "Sequence", "Iterable", "Collection", "set", "frozenset"}
_MAPPINGS = {"dict", "Dict", "Mapping"}


def parse(annotation: str) -> ast.expr:
    """An annotation from its text."""
    return ast.parse(annotation, mode="eval").body


def annotation_of(value: Any) -> ast.expr | None:
    """The annotation that a default value stands for; None if it does not tell (null)."""
    match value:
        case bool() | int() | float() | str():
            return parse(type(value).__name__)
        case Mapping():
            return parse("dict")
        case Sequence():
            elements = {ast.unparse(element) if (element := annotation_of(item)) else "object" for item in value}
            return parse(f"list[{elements.pop()}]" if len(elements) == 1 else "list")
    return None


def fits(annotation: ast.expr, value: Any) -> bool:
    """Whether a plain value, as YAML holds it, may stand where `annotation` does. What is not understood fits."""
    return any(_fits(part, value) for part in _alternatives(annotation))


def words(annotation: ast.expr) -> str:
    """An annotation for a person: `int | None` is "a whole number or null"."""
    return " or ".join(dict.fromkeys(_words(part) for part in _alternatives(annotation)))


def surely_fits(annotation: ast.expr, value: Any) -> bool:
    """Whether it fits an alternative that is understood."""
    return any(_is_clear(part) and _fits(part, value) for part in _alternatives(annotation))


def literals(annotation: ast.expr) -> list[Any]:
    """The values that its `Literal`s list."""
    return [value for part in _alternatives(annotation) if name_of(part) == "Literal" for value in _values(part)]


def _alternatives(annotation: ast.expr) -> Iterator[ast.expr]:
    match annotation:
        case ast.Constant(value=str(text)):
            yield from _alternatives(parse(text))
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            yield from _alternatives(left)
            yield from _alternatives(right)
        case ast.Subscript() if name_of(annotation) == "Union":
            for part in _parts(annotation):
                yield from _alternatives(part)
        case ast.Subscript() if name_of(annotation) == "Optional":
            yield from _alternatives(_parts(annotation)[0])
            yield ast.Constant(None)
        case ast.Subscript() if name_of(annotation) == "Annotated":
            yield from _alternatives(_parts(annotation)[0])
        case _:
            yield annotation


def name_of(expression: ast.expr) -> str:
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value) | ast.Call(func=value):
            return name_of(value)
    return ""


def _parts(annotation: ast.expr) -> list[ast.expr]:
    match annotation:
        case ast.Subscript(slice=ast.Tuple(elts=parts)):
            return parts
        case ast.Subscript(slice=part):
            return [part]
    return []


def _is_clear(annotation: ast.expr) -> bool:
    if name_of(annotation) in _LISTS:
        return all(_is_clear(inner) for part in _parts(annotation) for inner in _alternatives(part))
    known = isinstance(annotation, ast.Constant) or name_of(annotation) in (*_SCALARS, *_MAPPINGS, "Literal")
    return known or name_of(annotation) in ("Any", "object")


def _values(annotation: ast.expr) -> list[Any]:
    return [part.value for part in _parts(annotation) if isinstance(part, ast.Constant)]


def _fits(annotation: ast.expr, value: Any) -> bool:
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return value is None
    name = name_of(annotation)
    if name in ("Any", "object"):
        return True
    if name == "Literal":
        return value in _values(annotation)
    if value is None:
        return False
    if name == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if name == "bool":
        return isinstance(value, bool)
    if name in ("str", "Path"):
        return isinstance(value, str)
    if name in _MAPPINGS:
        return isinstance(value, Mapping)
    if name in _LISTS:
        return isinstance(value, Sequence) and not isinstance(value, str) and _elements_fit(annotation, value)
    return True


def _elements_fit(annotation: ast.expr, values: Sequence[Any]) -> bool:
    parts = _parts(annotation)
    if not parts:
        return True
    if name_of(annotation) in ("tuple", "Tuple") and not (
        isinstance(parts[-1], ast.Constant) and parts[-1].value is ...
    ):
        return len(parts) == len(values) and all(fits(part, value) for part, value in zip(parts, values, strict=True))
    return all(fits(parts[0], value) for value in values)


def _words(annotation: ast.expr) -> str:
    name = name_of(annotation)
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return "null"
    if name == "Literal":
        return " or ".join(str(value) for value in _values(annotation))
    if name in _LISTS:
        parts = [part for part in _parts(annotation) if not (isinstance(part, ast.Constant) and part.value is ...)]
        count = f" of {len(parts)}" if name in ("tuple", "Tuple") and len(parts) > 1 else ""
        return f"a list{count}, each {words(parts[0])}" if parts else "a list"
    if name in _MAPPINGS:
        return "a group of keys"
    return _SCALARS.get(name, f"a {name}")
