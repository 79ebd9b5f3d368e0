"""Signatures of `_target_` classes, read from source without importing them.

A class's signature is its configuration schema, and a mistyped key must be refused within seconds: importing torch
alone may take longer. So a name is followed through the files with `ast`: packages, re-exports, aliases, base classes,
dataclasses. Annotations become typing objects (:mod:`attnlab.config.annotation`); a class in one of them becomes a
:class:`Named`.
"""

import ast
import collections.abc
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types

from attnlab.config.annotation import File

ROOT = Path(__file__).resolve().parents[2]
_TYPES: dict[str, Any] = {  # what the names in annotations mean, from whichever module they come
    **{kind.__name__: kind for kind in (int, float, bool, str, list, dict, tuple, set, frozenset, object, Path, File)},
    **{name: getattr(collections.abc, name) for name in collections.abc.__all__},
    **{name: getattr(typing, name) for name in ("Any", "Literal", "Annotated", "Union", "Optional")},
    **{name: getattr(annotated_types, name) for name in ("Ge", "Gt", "Le", "Lt", "MultipleOf", "MinLen")},
    **{"List": list, "Dict": dict, "Tuple": tuple},
}
_Seen = frozenset[tuple[str, str]]


class Named:
    """Base of the types that stand for other classes in annotations.

    Attributes:
        module: whose annotation has the name.
        name: as it is written there, possibly dotted.
    """

    module: ClassVar[str]
    name: ClassVar[str]


@dataclass(frozen=True)
class Signature:
    """Parameters of a class or function by name, each with its annotation (None: it has none), without `self`.

    `open`: there is a `**kwargs`.
    """

    parameters: Mapping[str, Any]
    open: bool = False


class _Definition(NamedTuple):
    module: str
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache
def signature(target: str) -> Signature | None:
    """The signature of the dotted name `target`; None where the source does not tell (compiled code).

    Raises LookupError if there is no such module, or a module of this package without such a name.
    """
    module, path = _split(target)
    defined = _locate(target)
    if not path or not module or (defined is None and module.partition(".")[0] == "attnlab"):
        raise LookupError(target)
    return _signature_of(defined) if defined else None


def definition(target: str) -> tuple[str, str] | None:
    """The module that defines what `target` leads to, and its name there; None if the source does not tell."""
    module, path = _split(target)
    defined = _find(module, path[0]) if module and path else None
    return (defined.module, ".".join([defined.node.name, *path[1:]])) if defined else None


def ancestors(target: str) -> set[str]:
    """A class and those that it derives from, as far as the source tells, each by the module that defines it.

    Empty for anything but a class.
    """
    names, waiting = set(), [_locate(target)]
    while waiting:
        defined = waiting.pop()
        if (
            defined
            and isinstance(defined.node, ast.ClassDef)
            and (name := f"{defined.module}.{defined.node.name}") not in names
        ):
            names.add(name)
            waiting += [_follow(defined.module, base) for base in defined.node.bases]
    return names


def _name(defined: _Definition) -> str:
    return f"{defined.module}.{defined.node.name}"


def classes_of(target: str, parameter: str) -> list[str]:
    """The classes that the annotation of a parameter names, dotted; empty if it names none or has none.

    `Callable[..., Encoder]` names Encoder, `dict[str, Step] | None` names Step.
    """
    defined = signature(target)
    return list(_classes(defined.parameters.get(parameter))) if defined else []


def _classes(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, type) and issubclass(annotation, Named):
        defined = _follow(annotation.module, ast.parse(annotation.name, mode="eval").body)
        if defined and isinstance(defined.node, ast.ClassDef):
            yield _name(defined)
    elif (origin := get_origin(annotation)) is not Literal:
        parts = get_args(annotation)
        for part in parts if origin is Union else parts[:1] if origin in (Annotated, tuple) else parts[-1:]:
            yield from _classes(part)


@lru_cache
def _modules_of_names() -> dict[str, list[str]]:
    """The classes and functions at the top of this package's modules, each with its modules."""
    modules: dict[str, list[str]] = {}
    for file in sorted((ROOT / "attnlab").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name in re.findall(r"^(?:class|def|async def) (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            modules.setdefault(name, []).append(module)
    return modules


def definitions(name: str) -> list[str]:
    """The modules of this package that define a class or function of this name."""
    return list(dict.fromkeys(_modules_of_names().get(name, [])))


def constant(target: str) -> object:
    """The value of a module's constant, by its dotted name, without importing the module; None where there is none."""
    module, _, name = target.rpartition(".")
    for node in _bindings(module).get(name, ()):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return node.value.value
    return None


def names_in(package: str) -> list[str]:
    """The texts that the classes in the modules of a package have as their attribute `name`, in order."""
    modules = [f"{package}.{file.stem}" for file in sorted((ROOT / package.replace(".", "/")).glob("*.py"))]
    nodes = [node for module in modules for nodes in _bindings(module).values() for node in nodes]
    names = []
    for part in (part for node in nodes if isinstance(node, ast.ClassDef) for part in node.body):
        match part:
            case ast.Assign(targets=[ast.Name(id="name")], value=ast.Constant(value=str(name))):
                names.append(name)
    return names


def siblings(target: str) -> list[str]:
    """The public names in `target`'s module, dotted."""
    module, _ = _split(target)
    imports = {name for name, nodes in _bindings(module).items() if isinstance(nodes[-1], ast.Import)}
    return sorted(f"{module}.{name}" for name in _bindings(module).keys() - imports if name[0] not in "_*")


# --- files and names --------------------------------------------------------------------------------------------


@lru_cache
def _file(module: str) -> Path | None:
    """The source file of a module, defined without importing its parents."""
    top, *rest = module.split(".")
    if top == "attnlab":
        folders = [ROOT / "attnlab"]
    else:
        spec = find_spec(top) if top else None
        folders = [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
        if spec and not rest and not folders and spec.origin and spec.origin.endswith(".py"):
            return Path(spec.origin)
    for folder in folders:
        path = folder.joinpath(*rest)
        for candidate in (path / "__init__.py", path.with_name(path.name + ".py")):
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
def _bindings(module: str) -> dict[str, list[ast.stmt]]:
    """Every name that a module binds at its top level, with the statements; `from x import *` is the name "*"."""
    path, bindings = _file(module), dict[str, list[ast.stmt]]()
    for node in _statements(ast.parse(path.read_bytes()).body) if path else ():
        names: list[str] = []
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names = [name]
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case ast.ImportFrom(names=aliases):
                names = [alias.asname or alias.name for alias in aliases]
            case ast.Import(names=aliases):
                names = [alias.asname or alias.name.partition(".")[0] for alias in aliases]
        for name in names:
            bindings.setdefault(name, []).append(node)
    return bindings


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _imported(module: str, node: ast.stmt, name: str) -> str:
    """The dotted name that an import in `module` binds to `name`; empty for other statements."""
    match node:
        case ast.Import(names=aliases):
            return next((alias.name for alias in aliases if alias.asname == name), name)
        case ast.ImportFrom(names=aliases):
            original = next((alias.name for alias in aliases if (alias.asname or alias.name) == name), name)
            return f"{_source(module, node)}.{original}"
    return ""


def _source(module: str, node: ast.ImportFrom) -> str:
    """The absolute name of the module that `from ... import` reads, inside `module`."""
    if not node.level:
        return node.module or ""
    path, parts = _file(module), module.split(".")
    up = node.level - (path is not None and path.name == "__init__.py")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def _locate(target: str, seen: _Seen = frozenset()) -> _Definition | None:
    """The definition of a dotted name, `module.Name`."""
    module, path = _split(target)
    return _find(module, path[0], seen) if module and len(path) == 1 else None


def _find(module: str, name: str, seen: _Seen = frozenset()) -> _Definition | None:
    """The definition that `name` in `module` leads to. `seen`: how it came here, for modules that import each other."""
    if (module, name) in seen:
        return None
    seen |= {(module, name)}
    for node in reversed(_bindings(module).get(name, ())):  # the last one counts, as when the module runs
        defined = None
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                return _Definition(module, node)
            case ast.ImportFrom():
                defined = _locate(_imported(module, node, name), seen)
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                defined = _follow(module, value, seen)
        if defined:
            return defined
    stars = [node for node in _bindings(module).get("*", ()) if isinstance(node, ast.ImportFrom)]
    return next((defined for node in stars if (defined := _find(_source(module, node), name, seen))), None)


def _follow(module: str, expression: ast.expr, seen: _Seen = frozenset()) -> _Definition | None:
    """The definition that an expression in `module` leads to: a name, `nn.Module`, or `Base[T]`."""
    if isinstance(expression, ast.Subscript):
        expression = expression.value
    first, _, rest = (ast.unparse(expression) if isinstance(expression, ast.Name | ast.Attribute) else "").partition(
        "."
    )
    if not rest:
        return _find(module, first, seen) if first else None
    prefixes = [_imported(module, node, first) for node in reversed(_bindings(module).get(first, ()))]
    return next((defined for prefix in prefixes if prefix and (defined := _locate(f"{prefix}.{rest}", seen))), None)


def _constructor(defined: _Definition) -> _Definition | None:
    """The `__init__` of a class, its own or inherited; of a function the function."""
    if not isinstance(defined.node, ast.ClassDef):
        return defined
    for node in reversed(defined.node.body):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return _Definition(defined.module, node)
    parents = [_follow(defined.module, base) for base in defined.node.bases]
    return next((init for parent in parents if parent and (init := _constructor(parent))), None)


# --- signatures and annotations ---------------------------------------------------------------------------------


def _signature_of(defined: _Definition) -> Signature | None:
    is_class = isinstance(defined.node, ast.ClassDef)
    if is_class and any(_last(decorator) == "dataclass" for decorator in defined.node.decorator_list):
        return Signature(_fields(defined))
    function = _constructor(defined)
    if function is None or isinstance(function.node, ast.ClassDef):
        return None
    arguments = function.node.args
    named = [*[*arguments.posonlyargs, *arguments.args][is_class:], *arguments.kwonlyargs]  # without `self`
    annotations = {a.arg: a.annotation and _annotation(function.module, a.annotation) for a in named}
    match arguments.kwarg:
        case ast.arg(annotation=ast.Subscript(value=ast.Name(id="Unpack"), slice=options)):  # fields of a TypedDict
            keywords = _follow(function.module, options)
            assert keywords is not None
            return Signature(annotations | _fields(keywords))
    return Signature(annotations, open=arguments.kwarg is not None)


def _fields(defined: _Definition) -> dict[str, Any]:
    """A dataclass's fields with their annotations, its bases' first."""
    fields: dict[str, Any] = {}
    assert isinstance(defined.node, ast.ClassDef)
    for base in reversed(defined.node.bases):
        parent = _follow(defined.module, base)
        fields |= _fields(parent) if parent and isinstance(parent.node, ast.ClassDef) else {}
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


def _annotation(module: str, node: ast.expr) -> Any:
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
    return type(_last(node) or "type", (Named,), {"module": module, "name": ast.unparse(node)})


def _subscript(module: str, value: ast.expr, parts: list[ast.expr]) -> Any:
    kind = _annotation(module, value)
    if kind is Literal:
        return Literal[tuple(map(ast.literal_eval, parts))]
    if kind is Annotated:
        bounds = [_annotation(module, part) for part in parts[1:] if isinstance(part, ast.Call)]
        known = [bound for bound in bounds if bound is not None]
        first = _annotation(module, parts[0])
        return Annotated[first, *known] if known else first
    inner = tuple(_annotation(module, part) for part in parts)
    return kind if isinstance(kind, type) and issubclass(kind, Named) else kind[inner if len(inner) > 1 else inner[0]]


def _alias(module: str, name: str) -> Any:
    """What a name for a type stands for, `Kind = Literal[...]`; None if it is none."""
    for node in _bindings(module).get(name, ()):
        match node:
            case ast.Assign(value=ast.Subscript() | ast.BinOp() as value):
                return _annotation(module, value)
            case ast.AnnAssign(value=(ast.Subscript() | ast.BinOp()) as value):
                return _annotation(module, value)
            case ast.ImportFrom():
                source, _, original = _imported(module, node, name).rpartition(".")
                return _alias(source, original)
    return None
