"""Signatures of `_target_` classes, read from source without importing them.

A signature is the schema of a node, and importing torch takes longer than a typo may cost. So `ast` follows a name
through packages, re-exports, aliases, base classes and dataclasses. Annotations are evaluated without builtins.
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
from typing import Any, NamedTuple

import annotated_types

ROOT = Path(__file__).resolve().parents[2]


_TYPES: dict[str, Any] = {  # what the names in annotations mean, from whichever module they come
    **{kind.__name__: kind for kind in (int, float, bool, str, list, dict, tuple, set, frozenset, object, Path)},
    **{name: getattr(collections.abc, name) for name in collections.abc.__all__},
    **{name: getattr(typing, name) for name in ("Any", "Literal", "Annotated", "Union", "Optional")},
    **{name: getattr(annotated_types, name) for name in ("Ge", "Gt", "Le", "Lt", "MultipleOf", "MinLen")},
}


@dataclass(frozen=True)
class Signature:
    """Parameters by name with their annotation or None, without `self`. `open`: there may be a `**kwargs`."""

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
    if _is_dataclass(defined.node):
        return Signature(_fields(defined))
    function = _constructor(defined)
    if function is None or isinstance(function.node, ast.ClassDef):
        return Signature({}, open=True)
    arguments = function.node.args
    named = [*arguments.posonlyargs, *arguments.args][isinstance(defined.node, ast.ClassDef) :]  # without `self`
    annotations = {
        one.arg: one.annotation and _annotation(function.module, one.annotation)
        for one in (*named, *arguments.kwonlyargs)
    }
    match arguments.kwarg:
        case ast.arg(annotation=ast.Subscript(value=ast.Name(id="Unpack"), slice=options)):  # fields of a TypedDict
            keywords = _follow(function.module, options)
            assert keywords is not None
            return Signature(annotations | _fields(keywords))
    return Signature(annotations, open=arguments.kwarg is not None)


def definition(target: str) -> tuple[str, str] | None:
    """The module that defines what `target` leads to, and its name there; None if the source does not tell."""
    module, path = _split(target)
    defined = _find(module, path[0]) if module and path else None
    return (defined.module, ".".join([defined.node.name, *path[1:]])) if defined else None


@lru_cache
def ancestors(target: str) -> set[str]:
    """The dotted names of a class and its bases, by the modules that define them; of a function its name."""
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
    """The value of a constant by its dotted name, without importing its module; None if it is missing."""
    module, _, name = target.rpartition(".")
    value = _bindings(module).get(name)
    return value.value if isinstance(value, ast.Constant) else None


def documentation(target: str, name: str) -> str:
    """The text about an argument in the docstring of a class, its constructor, or a base; empty if none has it."""
    entry = re.compile(rf"^ +(?:\w+, )*{re.escape(name)}(?:, \w+)*(?: \([^)]*\))?: +(.+(?:\n {{8,}}.+)*)", re.MULTILINE)
    waiting = [_locate(target)]
    for defined in waiting:  # grows
        for one in (defined, _constructor(defined)) if defined else ():
            if one and (match := entry.search(ast.get_docstring(one.node) or "")):
                return " ".join(match[1].split())
        waiting += [_follow(defined.module, base) for base in getattr(defined.node, "bases", ())] if defined else []
    return ""


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
    """The top level of a module: classes, functions, expressions, and dotted imports; "*x" for `from x import *`."""
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
    """The `__init__` of a class, maybe inherited; a function itself."""
    if not isinstance(defined.node, ast.ClassDef):
        return defined
    for node in reversed(defined.node.body):  # the last one counts, after overloads
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return _Definition(defined.module, node)
    parents = [_follow(defined.module, base) for base in defined.node.bases]
    return next((init for parent in parents if parent and (init := _constructor(parent))), None)


# --- annotations --------------------------------------------------------------------------------------------------


def _is_dataclass(node: ast.AST) -> bool:
    names = (ast.unparse(decorator).partition("(")[0] for decorator in getattr(node, "decorator_list", ()))
    return isinstance(node, ast.ClassDef) and any(name.rpartition(".")[2] == "dataclass" for name in names)


def _fields(defined: _Definition) -> dict[str, Any]:
    """The fields of a dataclass or a TypedDict with their annotations, those of its bases first."""
    fields: dict[str, Any] = {}
    if not isinstance(defined.node, ast.ClassDef):
        return fields
    for base in reversed(defined.node.bases):
        parent = _follow(defined.module, base)
        if parent and _is_dataclass(parent.node) == _is_dataclass(defined.node):
            fields |= _fields(parent)
    for node in defined.node.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind) if "ClassVar" not in ast.unparse(kind):
                fields[name] = _annotation(defined.module, kind)
    return fields


class _Other(type):
    """Types that stand for modules and for classes that are not read, and have their names."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _TYPES.get(name) or _Other(name, (), {})

    def __getitem__(cls, parts: Any) -> type:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> None:
        """An unknown bound."""


class _Names(dict[str, Any]):
    """The names in the annotations of a module."""

    def __init__(self, module: str) -> None:
        super().__init__(_TYPES)
        self.module = module

    def __missing__(self, name: str) -> Any:
        match _bindings(self.module).get(name):
            case ast.Subscript() | ast.BinOp() as value:  # a name for a type, such as Kind = Literal[...]
                return _annotation(self.module, value)
            case str(target) if not _file(target):
                source, _, original = target.rpartition(".")
                return _Names(source)[original]
        return _Other(name, (), {})


def _annotation(module: str, node: ast.expr) -> Any:
    """An annotation in the source of a module as a typing object; None if it cannot be read, as without one."""
    try:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        return eval(compile(ast.Expression(node), module, "eval"), {"__builtins__": {}}, _Names(module))
    except (SyntaxError, TypeError, ValueError, RecursionError):
        return None
