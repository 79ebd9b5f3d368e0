"""Signatures of `_target_` classes, read from source without importing them.

A class's signature is its configuration schema, and a mistyped key must be refused within seconds: importing torch
alone may take longer. So a name is followed through the files with `ast`: packages, re-exports, aliases, base classes,
dataclasses. Annotations become typing objects (:mod:`attnlab.config.bounds`).
"""

import ast
import collections.abc
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union

import annotated_types

ROOT = Path(__file__).resolve().parents[2]


_TYPES: dict[str, Any] = {  # what the names in annotations mean, from whichever module they come
    **{kind.__name__: kind for kind in (int, float, bool, str, list, dict, tuple, set, frozenset, object, Path)},
    **{name: getattr(collections.abc, name) for name in collections.abc.__all__},
    **{name: getattr(typing, name) for name in ("Any", "Literal", "Annotated", "Union", "Optional")},
    **{name: getattr(annotated_types, name) for name in ("Ge", "Gt", "Le", "Lt", "MultipleOf", "MinLen")},
}


class Unknown:
    """Base of the types that stand for other classes in annotations; they have the name of the class."""


@dataclass(frozen=True)
class Signature:
    """Parameters of a class or function by name, each with its annotation (None: it has none), without `self`.

    `open`: there is a `**kwargs`, or the source does not tell.
    """

    parameters: Mapping[str, Any]
    open: bool = False


class _Definition(NamedTuple):
    module: str
    node: ast.ClassDef | ast.FunctionDef


@lru_cache
def signature(target: str) -> Signature:
    """The signature of a class or function by its dotted name. LookupError: the source of no module defines it."""
    if (defined := _locate(target)) is None:
        raise LookupError(target)
    return _signature_of(defined)


def definition(target: str) -> tuple[str, str] | None:
    """The module that defines what `target` leads to, and its name there; None if the source does not tell."""
    module, path = _split(target)
    defined = _find(module, path[0]) if module and path else None
    return (defined.module, ".".join([defined.node.name, *path[1:]])) if defined else None


@lru_cache
def ancestors(target: str) -> set[str]:
    """A class and those that it derives from, as far as the source tells, each by the module that defines it.

    Of a function its own name.
    """
    names, waiting = set(), [_locate(target)]
    while waiting:
        if (defined := waiting.pop()) and (name := f"{defined.module}.{defined.node.name}") not in names:
            names.add(name)
            waiting += [_follow(defined.module, base) for base in getattr(defined.node, "bases", ())]
    return names


@lru_cache
def modules_of_names() -> dict[str, list[str]]:
    """The modules of each class and function at the top of this package's modules, by its name."""
    modules: dict[str, list[str]] = {}
    for file in sorted((ROOT / "attnlab").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name in re.findall(r"^(?:class|def|async def) (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            modules.setdefault(name, []).append(module)
    return modules


def constant(target: str) -> object:
    """The value of a module's constant, by its dotted name, without importing the module; None where there is none."""
    module, _, name = target.rpartition(".")
    value = _bindings(module).get(name)
    return value.value if isinstance(value, ast.Constant) else None


def siblings(target: str) -> list[str]:
    """The public names in `target`'s module, dotted."""
    module, _ = _split(target)
    return sorted(f"{module}.{name}" for name in _bindings(module) if name[0] not in "_*")


# --- files and names --------------------------------------------------------------------------------------------


@lru_cache
def _file(module: str) -> Path | None:
    """The source file of a module, without importing its parents."""
    top, *rest = module.split(".")
    spec = find_spec(top) if top and top != "attnlab" else None
    if spec and not rest and spec.origin and spec.origin.endswith(".py"):
        return Path(spec.origin)
    folders = [ROOT / top] if top == "attnlab" else (spec and spec.submodule_search_locations) or ()
    for path in (Path(folder, *rest) for folder in folders):
        for candidate in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if candidate.is_file():
                return candidate
    return None


def _split(target: str) -> tuple[str, list[str]]:
    """The longest leading part of a dotted name that is a module, and what is left of it."""
    parts = target.split(".")
    for i in range(len(parts), 0, -1):
        if _file(".".join(parts[:i])):
            return ".".join(parts[:i]), parts[i:]
    return "", parts


@lru_cache
def _bindings(module: str) -> dict[str, ast.AST | str]:
    """What each name at the top level of a module is: a class, a function, an expression, or what is imported, dotted.

    `from x import *` is the name "*x".
    """
    path, bindings = _file(module), dict[str, ast.AST | str]()
    for node in _statements(ast.parse(path.read_bytes()).body) if path else ():
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                bindings[name] = node
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                bindings[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                bindings[name] = value
            case ast.ImportFrom(names=aliases):
                source = _source(module, node)
                for alias in aliases:
                    star = alias.name == "*"
                    bindings[f"*{source}" if star else alias.asname or alias.name] = f"{source}.{alias.name}"
            case ast.Import(names=aliases):
                for alias in aliases:
                    top = alias.name.partition(".")[0]
                    bindings[alias.asname or top] = alias.name if alias.asname else top
    return bindings


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.orelse, *node.body])


def _source(module: str, node: ast.ImportFrom) -> str:
    """The absolute name of the module that `from ... import` reads, inside `module`."""
    path = _file(module)
    package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
    return resolve_name("." * node.level + (node.module or ""), package)


_Seen = frozenset[tuple[str, str]]  # modules and names on the way here: modules may import each other


def _locate(target: str, seen: _Seen = frozenset()) -> _Definition | None:
    """The definition of a dotted name, `module.Name`."""
    module, path = _split(target)
    return _find(module, path[0], seen) if module and len(path) == 1 else None


def _find(module: str, name: str, seen: _Seen = frozenset()) -> _Definition | None:
    """The definition that `name` in `module` leads to."""
    if (module, name) in seen:
        return None
    seen |= {(module, name)}
    match _bindings(module).get(name):
        case ast.ClassDef() | ast.FunctionDef() as node:
            return _Definition(module, node)
        case str(target):
            return _locate(target, seen)
        case ast.expr() as value:
            return _follow(module, value, seen)
    stars = [source[1:] for source in _bindings(module) if source[0] == "*"]
    return next((defined for source in stars if (defined := _find(source, name, seen))), None)


def _follow(module: str, expression: ast.AST, seen: _Seen = frozenset()) -> _Definition | None:
    """The definition that an expression in `module` leads to: a name, `nn.Module`, or `Base[T]`."""
    match expression:
        case ast.Subscript(value=value):
            return _follow(module, value, seen)
        case ast.Name(id=name):
            return _find(module, name, seen)
        case ast.Attribute():
            first, _, rest = ast.unparse(expression).partition(".")
            prefix = _bindings(module).get(first)
            return _locate(f"{prefix}.{rest}", seen) if isinstance(prefix, str) else None
    return None


def _constructor(defined: _Definition) -> _Definition | None:
    """The `__init__` of a class, its own or inherited; of a function the function."""
    if not isinstance(defined.node, ast.ClassDef):
        return defined
    for node in reversed(defined.node.body):  # the last one counts, after overloads
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return _Definition(defined.module, node)
    parents = [_follow(defined.module, base) for base in defined.node.bases]
    return next((init for parent in parents if parent and (init := _constructor(parent))), None)


# --- signatures and annotations ---------------------------------------------------------------------------------


def _signature_of(defined: _Definition) -> Signature:
    is_class = isinstance(defined.node, ast.ClassDef)
    if _is_dataclass(defined.node):
        return Signature(_fields(defined))
    function = _constructor(defined)
    if function is None or isinstance(function.node, ast.ClassDef):
        return Signature({}, open=True)
    arguments = function.node.args
    named = [*[*arguments.posonlyargs, *arguments.args][is_class:], *arguments.kwonlyargs]  # without `self`
    annotations = {a.arg: a.annotation and _annotation(function.module, a.annotation) for a in named}
    match arguments.kwarg:
        case ast.arg(annotation=ast.Subscript(value=ast.Name(id="Unpack"), slice=options)):  # fields of a TypedDict
            keywords = _follow(function.module, options)
            assert keywords is not None
            return Signature(annotations | _fields(keywords))
    return Signature(annotations, open=arguments.kwarg is not None)


def _is_dataclass(node: ast.AST) -> bool:
    return any(_last(decorator) == "dataclass" for decorator in getattr(node, "decorator_list", ()))


def _fields(defined: _Definition) -> dict[str, Any]:
    """A dataclass's fields with their annotations, its bases' first."""
    fields: dict[str, Any] = {}
    assert isinstance(defined.node, ast.ClassDef)
    for base in reversed(defined.node.bases):
        parent = _follow(defined.module, base)
        fields |= _fields(parent) if parent and _is_dataclass(parent.node) else {}
    for node in defined.node.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if _last(annotation) != "ClassVar":
                fields[name] = _annotation(defined.module, annotation)
    return fields


def _last(expression: ast.expr) -> str:
    """The last part of a name, whatever is subscripted or called: `list` for list[int]."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value) | ast.Call(func=value):
            return _last(value)
    return ""


def _annotation(module: str, node: ast.AST) -> Any:
    """An annotation in the source of a module as a typing object."""
    match node:
        case ast.Constant(value=str(text)):
            return _annotation(module, ast.parse(text, mode="eval").body)
        case ast.Constant(value=value):
            return value
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return Union[_annotation(module, left), _annotation(module, right)]  # noqa: UP007
        case ast.List(elts=parts):
            return [_annotation(module, part) for part in parts]
        case ast.Call(args=arguments, keywords=keywords):  # a bound
            kind = _TYPES.get(_last(node))
            return kind and kind(*map(ast.literal_eval, [*arguments, *(keyword.value for keyword in keywords)]))
        case ast.Subscript(value=value, slice=inner):
            return _subscript(module, value, inner.elts if isinstance(inner, ast.Tuple) else [inner])
        case ast.Name() | ast.Attribute() if (name := _last(node)) in _TYPES:
            return _TYPES[name]
        case ast.Name(id=name) if (alias := _alias(module, name)) is not None:
            return alias
        case ast.expr():
            return type(_last(node) or "type", (Unknown,), {})


def _subscript(module: str, value: ast.expr, parts: list[ast.expr]) -> Any:
    kind = _annotation(module, value)
    if kind is Literal:
        return Literal[tuple(map(ast.literal_eval, parts))]
    inner = [_annotation(module, part) for part in parts]
    if kind is Annotated:
        return Annotated[inner[0], *inner[1:]]
    unknown = isinstance(kind, type) and issubclass(kind, Unknown)
    return kind if unknown else kind[tuple(inner) if inner[1:] else inner[0]]


def _alias(module: str, name: str) -> Any:
    """What a name for a type stands for, `Kind = Literal[...]`; None if it is none."""
    match _bindings(module).get(name):
        case ast.Subscript() | ast.BinOp() as value:
            return _annotation(module, value)
        case str(target):
            source, _, original = target.rpartition(".")
            return _alias(source, original)
    return None
