"""The docstring of a public class or function names each argument, in the packages that are complete."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "attnlab"
NOT_YET = ("bench", "config")  # shorten this; never add to it
OTHERS = re.compile(r"(?:Others|Arguments) are those of `(\w+)`")
WORDS = r"\**(\w+(?:(?:,| and) \**\w+)*)"


@cache
def classes() -> dict[str, str]:
    """The docstring of every class of the package, so that a subclass can say that others are those of its base."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = ast.get_docstring(node) or ""
    return found


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


def unexplained(source: str) -> Iterator[tuple[str, list[str]]]:
    """Public classes and functions of a module without a docstring, or with arguments that it does not name."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
            text = ast.get_docstring(node) or ""
            left = [name for name in arguments(node) if name not in documented(text)]
            if left or not text:
                yield node.name, left


def test_every_argument_is_explained() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        if module.parts[0] not in NOT_YET:
            found += [f"{module}: {name}: {left}" for name, left in unexplained(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_what_is_left_is_not_complete_already() -> None:
    for name in NOT_YET:
        assert any(any(unexplained(path.read_text())) for path in (PACKAGE / name).rglob("*.py")), f"{name} is complete"


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
    assert list(unexplained(source)) == [("MHA", ["third"]), ("Pair", ["z"]), ("bare", [])]
