"""Copies of the source files of classes in one flat folder, with imports of each other.

transformers loads a model's code from a folder without subfolders, and follows relative imports between its files.
Each module that a class needs becomes a file, `attnlab.attention.ops.rope` the file `attention_ops_rope.py`, with its
imports of other modules of the package rewritten. The rest is unchanged: the code that trained the model.
"""

import ast
from collections.abc import Iterable
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path

from attnlab.errors import ConfigError

PACKAGE = "attnlab"
OURS = " Part of attnlab; Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0"
parse = lru_cache(maxsize=64)(ast.parse)


def flat_name(module: str) -> str:
    """The name of a module in the folder: its path with underscores."""
    return module.removeprefix(f"{PACKAGE}.").removeprefix("export.").replace(".", "_")


def flatten(modules: Iterable[str], replaced: Iterable[str] = ()) -> dict[str, str]:
    """The files of modules and of their dependencies in their packages, content by file name.

    Args:
        modules: dotted names. Their imports from their top-level packages and from attnlab are copied too; imports of
            other packages stay.
        replaced: modules that the caller writes instead of a copy.

    Raises:
        ConfigError: a module has no source, or imports another module by name, which a flat folder does not support.
    """
    todo, left_out = list(modules), set(replaced)
    packages = {PACKAGE, *(module.partition(".")[0] for module in todo)}
    files: dict[str, str] = {}
    while todo:
        module = todo.pop()
        name = f"{flat_name(module)}.py"
        if module not in left_out and name not in files:
            files[name], needed = _rewritten(module, packages)
            todo += needed
    return files


def defined_in(module: str, name: str) -> str:
    """The module with the definition of a name of a package, such as `MTLA` of `attnlab.attention`.

    ConfigError: the module has no source.
    """
    spec, _, tree = _parsed(module)
    for node in tree.body if spec.submodule_search_locations else ():
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return defined_in(_source(node, spec), alias.name)
    return module


def _rewritten(module: str, packages: set[str]) -> tuple[str, list[str]]:
    """The source of a module with flat imports, after a line with its origin; and the modules that it needs."""
    spec, text, tree = _parsed(module)
    lines = text.splitlines()
    edits: list[tuple[int, int, list[str]]] = []
    needed: list[str] = []
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            edits.append((node.lineno, node.end_lineno or node.lineno, []))  # for quoted annotations alone
            skipped.update(ast.walk(node))
        elif isinstance(node, ast.Import) and node not in skipped:
            for alias in node.names:
                if alias.name.partition(".")[0] in packages:
                    raise ConfigError(_refusal(module, alias.name))
        elif isinstance(node, ast.ImportFrom) and node not in skipped:
            source = _source(node, spec)
            if source.partition(".")[0] not in packages:
                continue
            by_module: dict[str, list[str]] = {}
            for alias in node.names:
                other = find_spec(source)
                package = other is not None and other.submodule_search_locations is not None
                if alias.name == "*" or other is None or package and find_spec(f"{source}.{alias.name}"):
                    raise ConfigError(_refusal(module, f"{source}.{alias.name}"))
                by_module.setdefault(defined_in(source, alias.name), []).append(ast.unparse(alias))
            indent = " " * node.col_offset
            new = [f"{indent}from .{flat_name(name)} import {', '.join(names)}" for name, names in by_module.items()]
            edits.append((node.lineno, node.end_lineno or node.lineno, new))
            needed += by_module
    for first, last, new in sorted(edits, reverse=True):
        lines[first - 1 : last] = new
    origin = f"# {module}, with imports rewritten.{OURS if module.partition('.')[0] == PACKAGE else ''}"
    return "\n".join([origin, *lines]) + "\n", needed


def _parsed(module: str) -> tuple[ModuleSpec, str, ast.Module]:
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(f"{module}: no Python source; a model with it cannot be exported as a folder with its code")
    text = Path(spec.origin).read_text(encoding="utf-8")
    return spec, text, parse(text)


def _source(node: ast.ImportFrom, spec: ModuleSpec) -> str:
    """The absolute name of the module in an import statement of another module."""
    return resolve_name(f"{'.' * node.level}{node.module or ''}", spec.parent)


def _refusal(module: str, name: str) -> str:
    return (
        f"{module} imports the module {name}; an exported folder has names of modules for "
        "`from ... import <class or function>` alone"
    )
