"""`from attnlab.attention import MTLA` for another model: torch is all that it needs."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnlab.attention

PACKAGE = Path(attnlab.attention.__file__).parent
IMPORTED = """
import sys, torch
before = set(sys.modules)
{statement}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)))
y = MTLA(16, 2, stride=2)(torch.randn(1, 5, 16))
assert y.shape == (1, 5, 16)
"""


def imported(statement: str, directory: Path) -> list[str]:
    """Packages outside the standard library that `statement` loads after torch."""
    code = IMPORTED.format(statement=statement)
    run = subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_the_folder_works_under_another_name(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "borrowed", ignore=shutil.ignore_patterns("__pycache__"))
    assert imported("from borrowed import MTLA", tmp_path) == ["borrowed"]


@pytest.mark.parametrize("package", [PACKAGE, PACKAGE.parent / "compression" / "decompositions"], ids=lambda p: p.name)
def test_no_file_names_another_package(package: Path) -> None:
    """Imports inside functions too, which loading the package would not show; kernels need triton where they run."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                known = top == "torch" or top == "triton" and path.parent.name == "kernels"
                assert known or top in sys.stdlib_module_names, f"{path.name} imports {name}"
