"""Numbers in README.md and in the pages under docs/ and experiments/ are those of the committed records.

A mark is a comment behind the numbers that it holds, invisible on the page:

    37.3 %<!-- = asr_an4_mfcc_xeon.json : quality.wer -->
    7 to 1,016 s<!-- = min max : runs.csv : Seconds of conversion -->
    41 points<!-- = max : sweep.csv : Top-1 dense - compressed : Method=truncatt|irratt; Rank=8 -->

FUNCTIONS (`each` if left out) : FILES : FIELDS : ROWS of a CSV. Files are named from the page's folder, several with a
space between, * and ? as in a shell. A field is a column of a CSV (the second of a name: `NAME 2`) or keys of a record
with dots (* for every part), or two of them, or one and a number, with - * or / between. Several fields or conditions
have `;` between. The last numbers before the mark are compared at their printed precision. `each` has all numbers of a
cell, `among` accepts them anywhere after the mark before, the others take the first of each cell.
"""

import csv
import operator
import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from attnlab.config.build import CONF
from tests.report.conftest import every

ROOT = CONF.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "experiments").rglob("*.md"))]
MARK = re.compile(r"<!-- = (.*?) -->", re.DOTALL)
NUMBER = re.compile(r"(?<!\w)-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
FUNCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    "mean": statistics.mean,
    "median": statistics.median,
    "sd": statistics.stdev,
    "count": len,
    "ratio": lambda values: operator.truediv(*values),  # of two
}
OPERATORS = {"-": operator.sub, "*": operator.mul, "/": operator.truediv}


def rows(path: Path) -> list[dict[str, Any]]:
    if path in every():
        return [every()[path]]
    header, *lines = csv.reader(path.read_text(encoding="utf-8").splitlines())
    names = [name + f" {n}" * (n > 1) for i, name in enumerate(header) for n in [header[: i + 1].count(name)]]
    return [dict(zip(names, line, strict=True)) for line in lines]


def reached(node: Any, keys: Sequence[str]) -> Iterator[Any]:
    """The values below `keys` in a record."""
    if not keys:
        yield node
        return
    parts = {str(i): part for i, part in enumerate(node)} if isinstance(node, list) else node
    for part in parts.values() if keys[0] == "*" else [parts[keys[0]]]:
        yield from reached(part, keys[1:])


def cells(row: dict[str, Any], field: str) -> list[list[float]]:
    """The numbers in each cell of a field."""
    parts = [field] if field in row else re.split(r" ([-*/]) ", field)
    if len(parts) == 1:
        chosen = [row[field]] if field in row else reached(row, field.split("."))
        return [[float(number.replace(",", "")) for number in NUMBER.findall(str(cell))] for cell in chosen]
    left, sign, right = parts
    (other,) = [[float(right)]] if NUMBER.fullmatch(right) else cells(row, right)
    return [[OPERATORS[sign](cell[0], other[0])] for cell in cells(row, left)]


def claimed(mark: str, folder: Path) -> list[float]:
    """The numbers that stand before a mark if it is true."""
    first, *rest = " ".join(mark.split()).split(" : ")
    functions = first.split() if {*first.split()} <= {*FUNCTIONS, "each", "among"} else ["each"]
    files, fields, conditions = [*(rest if functions == first.split() else [first, *rest]), ""][:3]
    chosen: list[dict[str, Any]] = []
    for pattern in files.split():
        file = Path(os.path.normpath(folder / pattern))
        paths = sorted(path for path in every() if path.match(str(file)))
        chosen += [row for path in paths or [file] for row in rows(path)]
    for column, values in (condition.split("=", 1) for condition in filter(None, conditions.split("; "))):
        chosen = [row for row in chosen if row[column] in values.split("|")]
    assert chosen, f"no row with {conditions}"
    columns = [[cell for row in chosen for cell in cells(row, field)] for field in fields.split("; ")]
    if functions[0] in ("each", "among"):
        return [number for column in columns for cell in column for number in cell]
    return [FUNCTIONS[function]([cell[0] for cell in column]) for column in columns for function in functions]


def agrees(printed: str, value: float) -> bool:
    mantissa, _, exponent = printed.replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(printed.replace(",", "")) - value) <= unit / 2 * (1 + 1e-9)


def check(text: str, folder: Path) -> None:
    """Compare each mark of a page with the numbers before it."""
    start = 0
    for mark in MARK.finditer(text):
        values, printed = claimed(mark[1], folder), NUMBER.findall(text[start : mark.start()])
        if mark[1].startswith("among"):
            assert all(any(agrees(number, value) for number in printed) for value in values), (mark[1], values)
        else:
            last = printed[-len(values) :]
            assert len(last) == len(values) and all(map(agrees, last, values)), f"{mark[1]}: {last}, but {values}"
        start = mark.end()
    assert text.count("<!-- =") == len(MARK.findall(text)), "a mark is not closed"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_marked_numbers_are_those_of_the_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    check(text, page.parent)
    assert page.name != "README.md" or page.parent.name == "experiments" or MARK.search(text), "no number is marked"
