"""Whether a value from YAML fits a Python annotation, and annotations in words for messages.

Annotations are read as syntax (`ast`), so nothing has to be imported. What is not understood is accepted: the class
itself still checks it.

Bounds are written as annotated-types writes them, `Annotated[int, Ge(1)]`: Ge, Gt, Le, Lt, MultipleOf, and MinLen for
texts and lists. They are known by name, so a package that must not depend on annotated-types may define its own.
"""

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SCALARS = ("int", "float", "bool", "str")
_LISTS = {"list", "List", "tuple", "Tuple", "Sequence", "Iterable", "Collection", "set", "frozenset"}
_MAPPINGS = {"dict", "Dict", "Mapping"}
_BOUNDS = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}


def parse(annotation: str) -> ast.expr:
    """An annotation from its text.

    Args:
        annotation: for instance "int | None".
    """
    return ast.parse(annotation, mode="eval").body


def annotation_of(value: Any) -> ast.expr | None:
    """The annotation that a default value stands for; None if it does not tell (null).

    Args:
        value: the default, as YAML holds it.
    """
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
    """Whether a plain value, as YAML holds it, may stand where `annotation` does. What is not understood fits.

    Args:
        annotation: as source.
        value: as YAML holds it.
    """
    return any(_fits(part, value) for part in _alternatives(annotation))


def surely_fits(annotation: ast.expr, value: Any) -> bool:
    """Whether it fits an alternative that is understood.

    Args:
        annotation: as source.
        value: as YAML holds it.
    """
    return any(_is_clear(part) and _fits(part, value) for part in _alternatives(annotation))


def within(annotation: ast.expr, value: Any) -> bool:
    """Whether a Python value lies within the bounds of an annotation; of types only those with bounds are checked.

    Args:
        annotation: as source.
        value: any.
    """
    parts = list(_alternatives(annotation))
    if isinstance(value, int | float) and not isinstance(value, bool):
        limits = [part for part in parts if name_of(part) == "Annotated"]
        return not limits or any(_fits(part, value) for part in parts)
    if not isinstance(value, list | tuple):
        return True
    for part in parts:
        inner = _parts(part)[0] if name_of(part) == "Annotated" else part
        if name_of(inner) in _LISTS and _parts(inner):
            return _holds(part, value) and all(within(_parts(inner)[0], item) for item in value)
    return True


def words(annotation: ast.expr) -> str:
    """An annotation in words, for messages: `Annotated[int, Ge(1)] | None` is "int >= 1 or null".

    Args:
        annotation: as source.
    """
    return " or ".join(dict.fromkeys(_words(part) for part in _alternatives(annotation)))


def literals(annotation: ast.expr) -> list[Any]:
    """The values that its `Literal`s list.

    Args:
        annotation: as source.
    """
    return [value for part in _alternatives(annotation) if name_of(part) == "Literal" for value in _values(part)]


def name_of(expression: ast.expr) -> str:
    """The last part of a name, whatever is subscripted or called: `list` for list[int].

    Args:
        expression: as source.
    """
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value) | ast.Call(func=value):
            return name_of(value)
    return ""


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
            first, *metadata = _parts(annotation)
            bounds = [mark for mark in metadata if name_of(mark) in (*_BOUNDS, "MultipleOf", "MinLen")]
            for part in _alternatives(first):
                none = isinstance(part, ast.Constant) and part.value is None
                yield part if none or not bounds else _annotated(part, bounds)
        case _:
            yield annotation


def _annotated(part: ast.expr, bounds: list[ast.expr]) -> ast.expr:
    return ast.Subscript(ast.Name("Annotated"), ast.Tuple([part, *bounds], ast.Load()), ast.Load())


def _parts(annotation: ast.expr) -> list[ast.expr]:
    match annotation:
        case ast.Subscript(slice=ast.Tuple(elts=parts)):
            return parts
        case ast.Subscript(slice=part):
            return [part]
    return []


def _is_clear(annotation: ast.expr) -> bool:
    if name_of(annotation) == "Annotated":
        return _is_clear(_parts(annotation)[0])
    if name_of(annotation) in _LISTS:
        return all(_is_clear(inner) for part in _parts(annotation) for inner in _alternatives(part))
    known = isinstance(annotation, ast.Constant) or name_of(annotation) in (*_SCALARS, "Path", *_MAPPINGS, "Literal")
    return known or name_of(annotation) in ("Any", "object")


def _values(annotation: ast.expr) -> list[Any]:
    return [ast.literal_eval(part) for part in _parts(annotation)]


def _fits(annotation: ast.expr, value: Any) -> bool:
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return value is None
    name = name_of(annotation)
    if name in ("Any", "object"):
        return True
    if name == "Literal":
        return any(type(value) is type(item) and value == item for item in _values(annotation))
    if value is None:
        return False
    if name == "Annotated":
        return _fits(_parts(annotation)[0], value) and _holds(annotation, value)
    if name == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if name == "bool":
        return isinstance(value, bool)
    if name in ("str", "Path"):
        return isinstance(value, str)
    if name in _MAPPINGS:
        return isinstance(value, Mapping)
    if name in _LISTS:
        return isinstance(value, Sequence) and not isinstance(value, str) and _elements_fit(annotation, value)
    return True


def _holds(annotation: ast.expr, value: Any) -> bool:
    """Whether a value of the right type lies within the bounds of an `Annotated`; others have none."""
    for kind, bound in _bounds(annotation):
        if kind == "MinLen":
            within = len(value) >= bound
        elif kind == "MultipleOf":
            within = value % bound == 0
        else:
            within = {"Ge": value >= bound, "Gt": value > bound, "Le": value <= bound, "Lt": value < bound}[kind]
        if not within:
            return False
    return True


def _bounds(annotation: ast.expr) -> list[tuple[str, Any]]:
    if name_of(annotation) != "Annotated":
        return []
    marks = [mark for mark in _parts(annotation)[1:] if isinstance(mark, ast.Call)]
    return [(name_of(mark), ast.literal_eval([*mark.args, *(k.value for k in mark.keywords)][0])) for mark in marks]


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
    if name == "Annotated":
        return f"{words(_parts(annotation)[0])}{_limits(annotation)}"
    if name == "Literal":
        return " or ".join(str(value) for value in _values(annotation))
    if name in _LISTS:
        parts = [part for part in _parts(annotation) if not (isinstance(part, ast.Constant) and part.value is ...)]
        count = f" of {len(parts)}" if name in ("tuple", "Tuple") and len(parts) > 1 else ""
        return f"a list{count}, each {words(parts[0])}" if parts else "a list"
    if name in _MAPPINGS:
        return "a group of keys"
    return "a path" if name == "Path" else name if name in _SCALARS else f"a {name}"


def _limits(annotation: ast.expr) -> str:
    """ " >= 0 and < 1", or ", not empty"."""
    bounds = _bounds(annotation)
    numbers = " and ".join(f"{_BOUNDS[kind]} {bound}" for kind, bound in bounds if kind in _BOUNDS)
    numbers += "".join(f", a multiple of {bound}" for kind, bound in bounds if kind == "MultipleOf")
    shortest = max([bound for kind, bound in bounds if kind == "MinLen"], default=0)
    least = "" if not shortest else ", not empty" if shortest == 1 else f", at least {shortest} long"
    return (f" {numbers}" if numbers else "") + least
