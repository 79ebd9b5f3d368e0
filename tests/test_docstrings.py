"""Every public class and function has a docstring, which gives the shape or meaning of each tensor it takes."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "attnlab"
OTHERS = re.compile(r"(?:Others|Arguments) are those of `(\w+)`")
WORDS = r"\**(\w+(?:(?:,| and) \**\w+)*)"


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def classes() -> dict[str, str]:
    """The docstring of every class of the package, so that a subclass can say that others are those of its base."""
    nodes = [node for module in modules().values() for node in module.body if isinstance(node, ast.ClassDef)]
    return {node.name: ast.get_docstring(node) or "" for node in nodes}


def documented(text: str) -> set[str]:
    """The names that a docstring explains: entries of `Args:`, names in backquotes, names with a shape: x (B, T, d)."""
    entries = re.findall(rf"^[ \t]*{WORDS}:", text, re.MULTILINE) + re.findall(rf"{WORDS} \(", text)
    named = set(re.findall(r"\w+", " ".join([*entries, *re.findall(r"`([^`]+)`", text)])))
    for base in OTHERS.findall(" ".join(text.split())):
        named |= documented(classes()[base])
    return named


def tensors(node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """The tensors that a function takes, or `__init__` of a class, or that a dataclass or a named tuple holds."""
    if isinstance(node, ast.FunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        yield from (one.arg for one in arguments if one.arg[0] != "_" and is_tensor(one.annotation))
        return
    fields = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    fields |= any(ast.unparse(base) == "NamedTuple" for base in node.bases)
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            yield from tensors(part)
        elif fields and isinstance(part, ast.AnnAssign) and is_tensor(part.annotation):
            name = ast.unparse(part.target)
            yield from [name] if name[0] != "_" else []


def is_tensor(annotation: ast.expr | None) -> bool:
    return annotation is not None and "Tensor" in re.findall(r"\w+", ast.unparse(annotation))


def unexplained(module: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Public classes and functions of a module without a docstring, or with tensors that it does not name."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
            text = ast.get_docstring(node) or ""
            known = documented(text)
            left = [name for name in tensors(node) if name not in known]
            if left or not text:
                yield node.name, left


def test_every_tensor_is_explained() -> None:
    missing = []
    for path, module in modules().items():
        missing += [f"{path.relative_to(PACKAGE)}: {name}: {', '.join(left)}" for name, left in unexplained(module)]
    assert not missing, "\n".join(missing)
