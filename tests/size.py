"""python -m tests.size: what the package weighs, as one table in Markdown.

The main command is traced with three updates, after a first run has prepared its sample corpus. Private names are those
of this package and of others, by ruff. Seconds of the default tests are those of a quiet machine: `make test`.
"""

import ast
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "attnlab"
COMMAND = ["src/run.py", "task=mustc", "attention=mtla", "stride=2", "debug=fast", "hardware=cpu"]
SMALL = 75  # lines


def lines(*folders: Path) -> tuple[int, int]:
    """Lines and files of Python in these folders."""
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files), len(files)


def traced() -> tuple[int, int]:
    """Files with a function that the main command executes, and the lines of all these functions."""
    with tempfile.TemporaryDirectory() as folder:
        data, report, settings = (Path(folder, name) for name in ("data", "report.json", "settings"))
        settings.write_text("[run]\npatch = _exit\n")  # by which the command ends
        coverage = [sys.executable, "-m", "coverage"]
        run = [*coverage, "run", f"--rcfile={settings}", f"--data-file={data}", f"--source={PACKAGE}"]
        for i, program in enumerate(([sys.executable], run)):
            command = [*program, *COMMAND, f"hydra.run.dir={folder}/{i}"]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        write = ["json", f"--data-file={data}", "-q", "-o", str(report)]
        subprocess.run([*coverage, *write], cwd=ROOT, check=True)
        files = json.loads(report.read_text())["files"]
    counts = []
    for file, measured in files.items():
        executed = {name for name, region in measured["functions"].items() if name and region["executed_lines"]}
        sizes = dict(functions(ast.parse((ROOT / file).read_text(encoding="utf-8"))))
        counts.append(sum(sizes[name] for name in executed))
    return sum(map(bool, counts)), sum(counts)


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """The qualified names of functions below a node, and their lines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, (child.end_lineno or 0) - child.lineno + 1
        below = f"{prefix}{child.name}." if isinstance(child, ast.FunctionDef | ast.ClassDef) else prefix
        yield from functions(child, below)


def findings(folder: Path, *options: str) -> int:
    """The number of findings of ruff in a folder."""
    command = ["ruff", "check", "--isolated", "--preview", *options, "--output-format=json", str(folder)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    return len(json.loads(done.stdout))


def imported(path: Path) -> Iterator[str]:
    """Modules and names that a file imports from the package, dotted."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnlab"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def small_modules() -> int:
    """Modules under 75 lines that one other module imports. Modules that no other imports are found by their name."""
    importers = Counter(name for path in PACKAGE.rglob("*.py") for name in set(imported(path)))
    small = 0
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        short = len(path.read_text(encoding="utf-8").splitlines()) < SMALL
        small += path.name != "__init__.py" and short and importers[name] == 1
    return small


def rows() -> Iterator[tuple[str, str]]:
    yield "src/attnlab, lines / files", "{:,} / {}".format(*lines(PACKAGE))
    for rooms in (("config", "run"), ("report",)):
        yield " + ".join(rooms), f"{lines(*(PACKAGE / room for room in rooms))[0]:,}"
    yield "tests, lines", f"{lines(ROOT / 'tests')[0]:,}"
    yield "files / lines executed by the main command", "{} / {:,}".format(*traced())
    complexity = "--select=C901", "--config=lint.mccabe.max-complexity=15"
    yield "functions above complexity 15", str(findings(PACKAGE, *complexity))
    yield "modules with one importer and under 75 lines", str(small_modules())
    yield "private names that tests touch", str(findings(ROOT / "tests", "--select=SLF001,PLC2701"))


if __name__ == "__main__":
    print("| | |\n| --- | ---: |", *(f"| {name} | {value} |" for name, value in rows()), sep="\n")
