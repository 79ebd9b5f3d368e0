"""Copies of the sources of classes in one flat folder."""

import ast
import sys
from pathlib import Path

import pytest

from attnlab.attention import MTLA, AbsoluteMultiLinear
from attnlab.errors import ConfigError
from attnlab.export.sources import flat_name, flatten


def imports(text: str) -> set[tuple[int, str]]:
    """Level and module of every import of a file."""
    nodes = list(ast.walk(ast.parse(text)))
    plain = {(0, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {(node.level, node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("cls", [MTLA, AbsoluteMultiLinear])
def test_a_mechanism_and_all_that_it_needs(cls: type) -> None:
    files = flatten([cls.__module__, "attnlab.models.decoder"])
    assert f"{flat_name(cls.__module__)}.py" in files and "models_decoder.py" in files
    for name, text in files.items():
        for level, module in imports(text):
            assert module.partition(".")[0] != "attnlab", name
            assert level in (0, 1) and (not level or f"{module}.py" in files), name
    others = {"attention_mtla.py", "attention_multilinear_absolute.py"} - {f"{flat_name(cls.__module__)}.py"}
    assert not others & set(files)  # of other mechanisms nothing


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users", raising=False)  # of another test
    return tmp_path / "users"


def test_a_mechanism_of_a_users_own_package(package: Path) -> None:
    (package / "parts.py").write_text("WIDTH = 3\n")
    (package / "fast.py").write_text(
        "import math\nfrom attnlab.attention import (\n    MHA,\n    Cache as LayerCache,\n)\n\n\nclass Fast(MHA):\n"
        "    def build(self) -> int:\n        from .parts import WIDTH\n\n        return WIDTH\n"
    )
    files = flatten(["users.fast"])
    assert {"users_fast.py", "users_parts.py", "attention_mha.py"} <= set(files)
    assert files["users_fast.py"].splitlines()[:4] == [
        "# users.fast, with imports rewritten.",
        "import math",
        "from .attention_mha import MHA",
        "from .attention_base import Cache as LayerCache",
    ]
    assert "        from .users_parts import WIDTH\n" in files["users_fast.py"]
    assert "Apache-2.0" in files["attention_mha.py"].splitlines()[0]


@pytest.mark.parametrize(
    "line", ["import attnlab.attention", "from attnlab.attention import mtla", "from attnlab.errors import *"]
)
def test_a_module_as_a_whole_is_refused(line: str, package: Path) -> None:
    (package / "modules.py").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match="users.modules imports the module attnlab"):
        flatten(["users.modules"])


def test_what_has_no_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="__main__: no Python source|nowhere: no Python source"):
        flatten(["nowhere"])
