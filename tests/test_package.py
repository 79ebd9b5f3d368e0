"""The package as a user installs it: a wheel, away from this checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.run.test_processes import write_texts
from tests.tasks.language_modelling.test_task import TINY

ROOT = Path(__file__).parents[1]
QUESTIONS = ROOT / "src/attnlab/tasks/lighteval"


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DATA_ROOT")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def copy_of_the_source(place: Path) -> Path:
    place.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "conf"):
        shutil.copytree(ROOT / name, place / name, symlinks=True, ignore=ignored)
    return place


def build(kind: str, source: Path, place: Path) -> Path:
    """Build the sdist or the wheel without network, by the setuptools of the tests."""
    script = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    return place / run(sys.executable, "-c", script, place, cwd=source).splitlines()[-1]


def contents(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    return build("wheel", copy_of_the_source(place / "source"), place)


def test_the_wheel_has_the_package_and_its_configuration_alone(wheel: Path) -> None:
    names = contents(wheel)
    assert {name.partition("/")[0] for name in names} == {"attnlab", "attnlab-0.1.0.dist-info"}
    page = [("src/attnlab", f"*.{ending}") for ending in ("html", "css", "js", "tsv")]
    for folder, files in (("src/attnlab", "*.py"), ("conf", "*.yaml"), *page):
        inside = "attnlab/conf" if folder == "conf" else "attnlab"
        expected = {f"{inside}/{path.relative_to(ROOT / folder)}" for path in (ROOT / folder).rglob(files)}
        if folder == "conf":  # and the questions of mode=evaluate, in the harness's form
            expected |= {f"attnlab/{path.relative_to(ROOT / 'src/attnlab')}" for path in QUESTIONS.rglob(files)}
        assert {name for name in names if name.endswith(files[1:])} == expected


@pytest.mark.slow
def test_the_sdist_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", copy_of_the_source(tmp_path / "source"), tmp_path)
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    assert contents(build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path)) == contents(wheel)


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The `bin` folder of an environment with the wheel, whose dependencies are those of the tests."""
    place = wheel.parent / "venv"
    venv.create(place)
    python = place / "bin" / "python"
    run(sys.executable, "-m", "pip", f"--python={python}", "install", "--no-deps", "--no-index", wheel, cwd=place)
    (site,) = (place / "lib").glob("python*/site-packages")
    # Folders that a .pth file names are searched for modules. Their own .pth files, one of which leads to the editable
    # attnlab, are not read.
    (site / "tests.pth").write_text("".join(f"{path}\n" for path in {*map(sysconfig.get_path, ("purelib", "platlib"))}))
    return python.parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project, which has a package `src` of its own."""
    (tmp_path / "src").mkdir()
    for name in ("__init__", "run"):
        (tmp_path / "src" / f"{name}.py").write_text("raise ImportError('this is not attnlab')\n")
    return tmp_path


@pytest.mark.slow
def test_the_command_works_in_a_project_with_its_own_src(installed: Path, project: Path) -> None:
    record = json.loads(run(installed / "attnlab", "task=wikitext2", "mode=describe", cwd=project))
    about = record["status"], record["task"], record["environment"]["git"]
    assert about == ("finished", "wikitext2", "not a checkout")
    corpus = write_texts(project)
    options = [f"data_root={corpus}", f"cache_dir={project}/cache", "task.train.max_steps=4", "hydra.run.dir=run"]
    run(installed / "python", "-m", "attnlab", "task=wikitext2", "hardware=cpu", *TINY, *options, cwd=project)
    record = json.loads((project / "run" / "record.json").read_text())
    assert (record["status"], record["training"]["steps"]) == ("finished", 4)
    assert record["command"].startswith("python -m attnlab task=wikitext2")
    where = run(installed / "python", "-c", "import attnlab.cli as c; print(c.__file__, c.CONF)", cwd=project)
    assert all(Path(path).is_relative_to(installed.parent / "lib") for path in where.split())


def test_nothing_in_the_package_imports_the_tests() -> None:
    for path in (ROOT / "src" / "attnlab").rglob("*.py"):
        assert not re.search(r"^\s*(?:from|import) (?:tests|src)\b", path.read_text(), re.MULTILINE), path
    assert not [path for path in (ROOT / "conf").rglob("*.yaml") if "tests." in path.read_text()]
