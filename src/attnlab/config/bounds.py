"""Types with bounds: whether a value from YAML fits an annotation, and annotations in words for messages.

Bounds are those of annotated_types, `Annotated[int, Ge(1)]`. Other types accept every value but null.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen, MultipleOf

Size = Annotated[int, Ge(1), Le(1_048_576)]  # those of attention/bounds.py, which imports torch
SizeOrZero = Annotated[int, Ge(0), Le(1_048_576)]
Rank = Annotated[int, Ge(1), Le(65536)]
Layers = Annotated[int, Ge(1), Le(1024)]
Rate = Annotated[float, Ge(0), Lt(1)]  # of dropout

_BOUNDS: dict[type, tuple[str, Callable[[Any, Any], bool], str]] = {  # attribute, check of a value, sign in messages
    Ge: ("ge", operator.ge, ">="),
    Gt: ("gt", operator.gt, ">"),
    Le: ("le", operator.le, "<="),
    Lt: ("lt", operator.lt, "<"),
    MultipleOf: ("multiple_of", lambda value, bound: value % bound == 0, ""),
    MinLen: ("min_length", lambda value, bound: len(value) >= bound, ""),
}


def fits(annotation: Any, value: Any) -> bool:
    """Whether a plain value, as YAML holds it, may stand where `annotation` does."""
    return any(_fits(part, value) for part in alternatives(annotation))


def words(annotation: Any) -> str:
    """An annotation in words, for messages: `Annotated[int, Ge(1)] | None` is "int >= 1 or null"."""
    return " or ".join(dict.fromkeys(_words(part) for part in alternatives(annotation)))


def literals(annotation: Any) -> list[Any]:
    """The values that its `Literal`s list."""
    return [value for part in alternatives(annotation) if get_origin(part) is Literal for value in get_args(part)]


def alternatives(annotation: Any) -> Iterator[Any]:
    """The members of a union, each with the bounds that stand around the union."""
    inner, bounds = _split(annotation)
    if get_origin(inner) in (Union, UnionType):
        for part in get_args(inner):
            for member in alternatives(part):
                yield Annotated[member, *bounds] if bounds and member is not NoneType else member
    else:
        yield NoneType if annotation is None else annotation


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation without `Annotated`, and what that adds."""
    return (annotation.__origin__, annotation.__metadata__) if get_origin(annotation) is Annotated else (annotation, ())


def _is_list(annotation: Any) -> bool:
    return _is(annotation, Iterable) and not _is(annotation, Mapping) and annotation is not str


def _is(annotation: Any, base: type) -> bool:
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, base)


def _fits(annotation: Any, value: Any) -> bool:
    inner, bounds = _split(annotation)
    if get_origin(inner) is Literal:
        return any(type(value) is type(item) and value == item for item in get_args(inner))
    if inner in (Any, object):
        return True
    if value is None or inner is NoneType:
        return value is None and inner is NoneType
    if inner in (int, float):
        kind = int if inner is int else int | float
        right = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    elif inner in (bool, str, Path):
        right = isinstance(value, bool if inner is bool else str)
    elif _is(inner, Mapping):
        right = isinstance(value, Mapping)
    elif _is_list(inner):
        right = isinstance(value, Sequence) and not isinstance(value, str) and _elements_fit(inner, value)
    else:
        right = True
    return right and _holds(bounds, value)


def _elements_fit(annotation: Any, values: Sequence[Any]) -> bool:
    parts = get_args(annotation)
    if get_origin(annotation) is tuple and parts[-1] is not Ellipsis:
        return len(parts) == len(values) and all(map(fits, parts, values))
    return not parts or all(fits(parts[0], value) for value in values)


def _bounds(marks: Iterable[Any]) -> Iterator[tuple[type, Any]]:
    """Kind and value of each bound."""
    for mark in marks:
        if type(mark) in _BOUNDS:
            yield type(mark), getattr(mark, _BOUNDS[type(mark)][0])


def _holds(marks: Iterable[Any], value: Any) -> bool:
    return all(_BOUNDS[kind][1](value, bound) for kind, bound in _bounds(marks))


def _words(annotation: Any) -> str:
    inner, added = _split(annotation)
    bounds = dict(_bounds(added))
    limits = " and ".join(f"{_BOUNDS[kind][2]} {bounds[kind]}" for kind in (Ge, Gt, Le, Lt) if kind in bounds)
    rest = f" {limits}" if limits else ""
    if MultipleOf in bounds:
        rest += f", a multiple of {bounds[MultipleOf]}"
    if shortest := bounds.get(MinLen, 0):
        rest += ", not empty" if shortest == 1 else f", at least {shortest} long"
    return _type_in_words(inner) + rest


def _type_in_words(annotation: Any) -> str:
    if annotation is NoneType:
        return "null"
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if _is(annotation, Mapping):
        return "a group of keys"
    if _is_list(annotation):
        parts = [part for part in get_args(annotation) if part is not Ellipsis]
        count = f" of {len(parts)}" if get_origin(annotation) is tuple and len(parts) > 1 else ""
        return f"a list{count}, each {words(parts[0])}" if parts else "a list"
    if annotation is Path:
        return "a path"
    name = getattr(annotation, "__name__", str(annotation))
    return name if annotation in (int, float, bool, str) else f"a {name}"
