"""The docstring of every public class and function names each of its arguments."""

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


def arguments(node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """Of a function; of a class those of `__init__`, and the fields of a dataclass or a named tuple."""
    if isinstance(node, ast.FunctionDef):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        yield from (one.arg for one in every if one and one.arg not in ("self", "cls") and one.arg[0] != "_")
        return
    fields = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    fields |= any(ast.unparse(base) == "NamedTuple" for base in node.bases)
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            yield from arguments(part)
        elif fields and isinstance(part, ast.AnnAssign) and "ClassVar" not in ast.unparse(part.annotation):
            name = ast.unparse(part.target)
            yield from [name] if name[0] != "_" else []


def unexplained(module: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Public classes and functions of a module without a docstring, or with arguments that it does not name."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
            text = ast.get_docstring(node) or ""
            known = documented(text)
            left = [name for name in arguments(node) if name not in known]
            if left or not text:
                yield node.name, left


def test_every_argument_is_explained() -> None:
    found = []
    for path, module in modules().items():
        found += [f"{path.relative_to(PACKAGE)}: {name}: {', '.join(left)}" for name, left in unexplained(module)]
    assert not found, "\n".join(found)


def test_the_rule_itself() -> None:
    source = '''
class MHA:
    """Attention.  Others are those of `MLA`.

    Args:
        first, second: two.
    """
    def __init__(self, first, second, latent_dim, third, *, _own): ...
@dataclass
class Pair:
    """A pair of x (B, T, d) and `y`."""
    x: int
    y: int
    z: int
def bare(): ...
'''
    assert list(unexplained(ast.parse(source))) == [("MHA", ["third"]), ("Pair", ["z"]), ("bare", [])]
