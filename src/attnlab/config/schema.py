"""Signatures of `_target_` classes, read from source without importing them.

A class's signature is its configuration schema, and a mistyped key must be refused within seconds: importing torch
alone may take longer. So a name is followed through the files with `ast`: packages, re-exports, aliases, base classes,
dataclasses.
"""

import ast
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from attnlab.config.annotation import name_of

ROOT = Path(__file__).resolve().parents[2]
_PLAIN = ("typing", "collections", "pathlib", "builtins")  # modules whose names in an annotation say little


@dataclass(frozen=True)
class Signature:
    """Parameters by name, each with its annotation (None: it has none). `open`: other keywords are accepted.

    Args:
        parameters: the arguments of a class or function, without `self`.
        open: whether there is a `**kwargs`.
        module: where the annotations stand, so that their names can be followed.
    """

    parameters: Mapping[str, ast.expr | None]
    open: bool = False
    module: str = ""


@dataclass(frozen=True)
class Lineage:
    """What a dotted name leads to, as its source says.

    Args:
        kind: of the definition; "value" is a module, a constant, or anything else that can be no class.
        ancestors: a class and those that it derives from, as "module.Name" of their definitions.
        complete: whether all of them were found in source.
    """

    kind: Literal["class", "function", "value"]
    ancestors: frozenset[str] = frozenset()
    complete: bool = True


class _Found(NamedTuple):
    module: str
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache
def signature(target: str) -> Signature | None:
    """The signature of the dotted name `target`; None where the source does not tell (compiled code).

    Raises LookupError if there is no such module, or a module of this package without such a name.
    """
    module, path = _split(target)
    if not module or not path:
        raise LookupError(target)
    found = _find(module, path[0])
    for name in path[1:]:
        found = _member(found, name) if found else None
    if found:
        return _signature_of(found)
    if module.partition(".")[0] == "attnlab":
        raise LookupError(target)
    return None


def definition(target: str) -> tuple[str, str] | None:
    """The module that defines what `target` leads to, and its name there; None if the source does not tell."""
    module, path = _split(target)
    found = _find(module, path[0]) if module and path else None
    return (found.module, ".".join([found.node.name, *path[1:]])) if found else None


def lineage(target: str) -> Lineage | None:
    """The kind of definition that a dotted name leads to, and a class's ancestors; None if the source does not tell.

    Args:
        target: for instance attnlab.attention.MLA.
    """
    module, path = _split(target)
    if not module:
        return None
    if not path or any(isinstance(node, ast.Import) and path[0] in _bound(node) for node in _body(module)):
        return Lineage("value")
    found = _find(module, path[0])
    for name in path[1:]:
        found = _member(found, name) if found else None
    if found is None:
        constants = [node for name, node in _definitions(module) if name == path[0] and isinstance(node, ast.Assign)]
        known = any(isinstance(node.value, ast.Constant | ast.List | ast.Tuple | ast.Dict) for node in constants)
        submodule = any(
            name == path[0] and isinstance(node, ast.ImportFrom) and _file(f"{_source(module, node)}.{path[0]}")
            for name, node in _definitions(module)
        )
        return Lineage("value") if known or submodule else None
    if not isinstance(found.node, ast.ClassDef):
        return Lineage("function")
    ancestors, complete, waiting = set(), True, [found]
    while waiting:
        one = waiting.pop()
        name = f"{one.module}.{one.node.name}"
        if name not in ancestors and isinstance(one.node, ast.ClassDef):
            ancestors.add(name)
            bases = [_follow(one.module, base) for base in one.node.bases if name_of(base) != "object"]
            complete = complete and None not in bases
            waiting += [base for base in bases if base is not None]
    return Lineage("class", frozenset(ancestors), complete)


def classes_of(target: str, parameter: str) -> list[str]:
    """The classes that the annotation of a parameter names, dotted; empty if it names none or has none.

    `Callable[..., Encoder]` names Encoder, `dict[str, Step] | None` names Step.

    Args:
        target: a class or function.
        parameter: one of its parameters.
    """
    found = signature(target)
    annotation = found.parameters.get(parameter) if found else None
    return list(_classes(found.module, annotation)) if found and annotation is not None else []


def returned(target: str) -> list[str]:
    """The classes that the annotation of a function's result names, dotted; empty for anything else.

    Args:
        target: a function.
    """
    module, path = _split(target)
    found = _find(module, path[0]) if module and len(path) == 1 else None
    annotation = None if found is None or isinstance(found.node, ast.ClassDef) else found.node.returns
    return list(_classes(found.module, _expand(found.module, annotation))) if found and annotation else []


def _classes(module: str, annotation: ast.expr) -> Iterator[str]:
    match annotation:
        case ast.Subscript() if name_of(annotation) == "Literal":
            return
        case ast.Subscript(slice=ast.Tuple(elts=parts)):
            for part in parts[:1] if name_of(annotation) in ("Annotated", "tuple") else parts[-1:]:
                yield from _classes(module, part)
        case ast.Subscript(slice=part):
            yield from _classes(module, part)
        case ast.BinOp(left=left, right=right):
            yield from _classes(module, left)
            yield from _classes(module, right)
        case ast.Name() | ast.Attribute():
            one = _follow(module, annotation)
            if one and isinstance(one.node, ast.ClassDef) and one.module.partition(".")[0] not in _PLAIN:
                yield f"{one.module}.{one.node.name}"


@lru_cache
def _everything() -> dict[str, list[str]]:
    """The classes and functions at the top of this package's modules, each with its modules."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "attnlab").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name in re.findall(r"^(?:class|def|async def) (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(name, []).append(module)
    return found


def definitions(name: str) -> list[str]:
    """The modules of this package that define a class or function of this name.

    Args:
        name: of the class or function.
    """
    return list(dict.fromkeys(_everything().get(name, [])))


def is_class(target: str) -> bool:
    """Whether a dotted name leads to a class in the source of a module.

    Args:
        target: for instance attnlab.attention.MLA.
    """
    module, path = _split(target)
    found = _find(module, path[0]) if module and len(path) == 1 else None
    return found is not None and isinstance(found.node, ast.ClassDef)


def constant(target: str) -> object:
    """The value of a module's constant, by its dotted name, without importing the module; None where there is none.

    Args:
        target: for instance attnlab.modes.describe.KEEPS.
    """
    module, _, name = target.rpartition(".")
    for bound, node in _definitions(module):
        if bound == name and isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return node.value.value
    return None


def names_in(package: str) -> list[str]:
    """The texts that the classes in the modules of a package have as their attribute `name`, in order.

    Args:
        package: for instance attnlab.metrics.
    """
    found = []
    for file in sorted((ROOT / package.replace(".", "/")).glob("*.py")):
        for _, node in _definitions(f"{package}.{file.stem}"):
            for part in node.body if isinstance(node, ast.ClassDef) else ():
                match part:
                    case ast.Assign(targets=[ast.Name(id="name")], value=ast.Constant(value=str(name))):
                        found.append(name)
    return found


def siblings(target: str) -> list[str]:
    """The public names in `target`'s module, dotted."""
    module, _ = _split(target)
    return sorted({f"{module}.{name}" for name, _ in _definitions(module) if name[0] not in "_*"})


@lru_cache
def _file(module: str) -> Path | None:
    """The source file of a module, found without importing its parents."""
    if not module:
        return None
    top, *rest = module.split(".")
    if top == "attnlab":
        folders = [ROOT / "attnlab"]
    else:
        spec = find_spec(top)
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
def _body(module: str) -> tuple[ast.stmt, ...]:
    path = _file(module)
    return tuple(_statements(ast.parse(path.read_bytes()).body)) if path else ()


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _definitions(module: str) -> Iterator[tuple[str, ast.stmt]]:
    """Every name that a module binds at its top level, with the statement; `from x import *` is the name "*"."""
    for node in _body(module):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.ImportFrom(names=aliases):
                yield from ((alias.asname or alias.name, node) for alias in aliases)


def _bound(node: ast.Import) -> list[str]:
    """The names that `import` statements bind."""
    return [alias.asname or alias.name.partition(".")[0] for alias in node.names]


def _source(module: str, node: ast.ImportFrom) -> str:
    """The absolute name of the module that `from ... import` reads, inside `module`."""
    if not node.level:
        return node.module or ""
    path = _file(module)
    up = node.level - (path is not None and path.name == "__init__.py")
    parts = module.split(".")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def _find(module: str, name: str, seen: tuple[tuple[str, str], ...] = ()) -> _Found | None:
    """The definition that `name` in `module` leads to. `seen`: how it came here, for modules that import each other."""
    if (module, name) in seen:
        return None
    seen = (*seen, (module, name))
    found = None
    for bound, node in _definitions(module):  # the last one counts, as when the module runs
        if bound != name:
            continue
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found = _Found(module, node)
            case ast.ImportFrom():
                found = _find(_source(module, node), _original(node, name), seen) or found
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                found = _follow(module, value, seen) or found
    if found is None:
        stars = [node for bound, node in _definitions(module) if bound == "*" and isinstance(node, ast.ImportFrom)]
        found = next((star for node in stars if (star := _find(_source(module, node), name, seen))), None)
    return found


def _original(node: ast.ImportFrom, name: str) -> str:
    """What an imported name is called where it comes from."""
    return next(alias.name for alias in node.names if (alias.asname or alias.name) == name)


def _follow(module: str, expression: ast.expr, seen: tuple[tuple[str, str], ...] = ()) -> _Found | None:
    """The definition that a name or an attribute (`nn.Module`) leads to, inside `module`."""
    match expression:
        case ast.Name(id=name):
            return _find(module, name, seen)
        case ast.Subscript(value=value):  # Base[T]
            return _follow(module, value, seen)
        case ast.Attribute(value=ast.expr() as value, attr=attribute):
            prefix = ast.unparse(value)
            for node in _body(module):
                match node:
                    case ast.Import(names=aliases):
                        for alias in aliases:
                            if (alias.asname or alias.name) == prefix:
                                return _find(alias.name, attribute, seen)
                            if alias.asname is None and prefix.startswith(f"{alias.name.partition('.')[0]}."):
                                return _find(prefix, attribute, seen)
                    case ast.ImportFrom(names=aliases):
                        for alias in aliases:
                            if (alias.asname or alias.name) == prefix:
                                return _find(f"{_source(module, node)}.{alias.name}", attribute, seen)
    return None


def _member(found: _Found, name: str) -> _Found | None:
    """A method of a class (`Model.from_config`), inherited ones included."""
    if isinstance(found.node, ast.ClassDef):
        for node in reversed(found.node.body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return _Found(found.module, node)
        for base in found.node.bases:
            parent = _follow(found.module, base)
            member = _member(parent, name) if parent else None
            if member:
                return member
    return None


def _signature_of(found: _Found) -> Signature | None:
    if not isinstance(found.node, ast.ClassDef):
        function = found.node
        bound = any(name_of(decorator) == "classmethod" for decorator in function.decorator_list)
        return _from_arguments(found.module, function.args, skip_first=bound)
    if any(name_of(decorator) == "dataclass" for decorator in found.node.decorator_list):
        return _from_fields(found)
    init = _member(found, "__init__")
    if init and not isinstance(init.node, ast.ClassDef):
        return _from_arguments(init.module, init.node.args, skip_first=True)
    return None


def _from_arguments(module: str, arguments: ast.arguments, skip_first: bool) -> Signature:
    positional = [*arguments.posonlyargs, *arguments.args][skip_first:]
    everything = [*positional, *arguments.kwonlyargs]
    annotations = {a.arg: a.annotation and _expand(module, a.annotation) for a in everything}
    match arguments.kwarg:
        case ast.arg(annotation=ast.Subscript(value=ast.Name(id="Unpack"), slice=options)):  # fields of a TypedDict
            keywords = _follow(module, options)
            assert keywords is not None
            return Signature(annotations | _from_fields(keywords).parameters, module=module)
    return Signature(annotations, open=arguments.kwarg is not None, module=module)


def _from_fields(found: _Found) -> Signature:
    """A dataclass's fields, its bases' first."""
    fields: dict[str, ast.expr | None] = {}
    assert isinstance(found.node, ast.ClassDef)
    for base in reversed(found.node.bases):
        parent = _follow(found.module, base)
        if parent and isinstance(parent.node, ast.ClassDef):
            fields |= _from_fields(parent).parameters
    for node in found.node.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if name_of(annotation) != "ClassVar":
                fields[name] = _expand(found.module, annotation)
    return Signature(fields, module=found.module)


def _expand(module: str, annotation: ast.expr) -> ast.expr:
    """An annotation with its module's names for types (`Kind = Literal[...]`) written out."""

    class Expander(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return _alias(module, node.id) or node

        def visit_Constant(self, node: ast.Constant) -> ast.expr:
            return self.visit(ast.parse(node.value, mode="eval").body) if isinstance(node.value, str) else node

        def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
            return node if name_of(node) == "Literal" else self.generic_visit(node)  # type: ignore[return-value]

    return Expander().visit(copy.deepcopy(annotation))


def _alias(module: str, name: str) -> ast.expr | None:
    """What a name for a type stands for, if it is made in this package."""
    if module.partition(".")[0] != "attnlab":
        return None
    for bound, node in _definitions(module):
        if bound == name:
            match node:
                case ast.Assign(value=(ast.Subscript() | ast.BinOp()) as value):
                    return _expand(module, value)
                case ast.AnnAssign(value=(ast.Subscript() | ast.BinOp()) as value):
                    return _expand(module, value)
                case ast.ImportFrom():
                    return _alias(_source(module, node), _original(node, name))
    return None
