"""The decompositions need torch alone."""

import ast
import sys
from pathlib import Path

import attnlab.compression.decompositions

PACKAGE = Path(attnlab.compression.decompositions.__file__).parent


def test_no_file_names_another_package() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                package = name.partition(".")[0]
                assert package == "torch" or package in sys.stdlib_module_names, f"{path.name} imports {name}"
