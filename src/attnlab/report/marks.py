"""Marks: comments behind the numbers of a page, which name the committed records that have these numbers.

    37.3 %<!-- = asr_an4_mfcc_xeon.json : quality.wer -->
    7 to 1,016 s<!-- = min max : runs.csv : Seconds of conversion -->
    41 points<!-- = max : sweep.csv : Top-1 dense - compressed : Method=truncatt|irratt; Rank=8 -->

FUNCTIONS (`each` if left out) : FILES : FIELDS : ROWS of a CSV. Files are named from the page's folder, several with a
space between, * and ? as in a shell. A field is a column of a CSV (the second of a name: `NAME 2`) or keys of a record
with dots (* for every part), or two of them, or one and a number, with - * or / between. Several fields or conditions
have `;` between. The last numbers before the mark are compared at their printed precision. `each` has all numbers of a
cell, `among` accepts them anywhere after the mark before, the others take the first of each cell.

The rows of a CSV belong to the records that NAME_records.csv beside it lists, by their `Record` or their row.
"""

import csv
import operator
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attnlab.errors import ConfigError
from attnlab.run.record import RECORD
from attnlab.run.store import SavedRecord, collect

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
NOTE = re.compile(r" \[\w\]$")  # the letter of a note behind a row's name
MACHINE = re.compile(r"EPYC|Xeon|\b[A-Z]\d{2,3}\b")  # in the name of a device: what a page calls it
SEEDLESS = ("bench", "describe", "statistics")  # modes whose numbers no seed changes


@dataclass(frozen=True)
class Evidence:
    """What a mark names: its numbers, and the records behind them; no records where none are committed.

    Args:
        listed: the seeds in the column `Seed` of its rows.
    """

    values: list[float]
    records: list[SavedRecord]
    listed: frozenset[int] = frozenset()

    @property
    def machines(self) -> set[str]:
        """The machines of the records, by their short names: H100, Xeon."""
        devices = [saved.record["environment"]["device"] for saved in self.records]
        return {match[0] if (match := MACHINE.search(device)) else device for device in devices}

    @property
    def days(self) -> set[str]:
        """The days on which the records of mode=bench were measured."""
        return {saved.record["started"][:10] for saved in self.records if "bench" in saved.record}

    @property
    def failed(self) -> list[str]:
        """The names of the records of mode=bench whose check failed."""
        return [saved.name for saved in self.records if failed(saved.record)]

    @property
    def seeds(self) -> set[int]:
        """The seeds of the runs whose numbers depend on them."""
        return {saved.record["seed"] for saved in self.records if saved.record["mode"] not in SEEDLESS} | self.listed

    def __add__(self, other: "Evidence") -> "Evidence":
        """What both name, a record once."""
        records = {saved.path: saved for saved in [*self.records, *other.records]}
        return Evidence(self.values + other.values, list(records.values()), self.listed | other.listed)

    def about(self) -> str:
        """What a page says of the records in brackets: machines, days, seeds; empty without a record of a run."""
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) > 1)}" if self.seeds else ""
        words = [*sorted(self.machines), *sorted(self.days), seeds]
        return f"({', '.join(filter(None, words))})" if any(words) else ""

    def places(self, root: Path) -> str:
        """A line with the folders of the records below `root`, and what :meth:`about` says of them."""
        folders: dict[tuple[str, ...], list[SavedRecord]] = {}
        for saved in self.records:
            run, single = saved.path.relative_to(root).parent, Evidence([], [saved])
            folder = run.parent if saved.path.name == RECORD else run
            folders.setdefault((folder.as_posix(), *single.machines, *single.days), []).append(saved)
        parts = [
            f"`{folder}` {Evidence([], saved).about()}" + ", checks passed" * ("bench" in saved[0].record)
            for (folder, *_), saved in sorted(folders.items())
        ]
        return f"Records: {'; '.join(parts)}." if parts else ""


def failed(record: Mapping[str, Any]) -> bool:
    """Whether a record of mode=bench has a variant that was not equal to its reference, so that it has no ratio."""
    from attnlab.bench.compare import failures

    bench = record.get("bench", {"rows": [], "checks": {}})
    kinds = {row["what"] for row in bench["rows"]}
    return any(failures(check, what) for check in bench["checks"].values() if "tolerance" in check for what in kinds)


class Marks:
    """The numbers of marks, from the files below a folder of experiments."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    @cached_property
    def records(self) -> dict[Path, SavedRecord]:
        """The records by their paths; those of packed lines have no file."""
        return {saved.path: saved for saved in collect([self.root])}

    def evidence(self, mark: str, folder: Path) -> Evidence:
        """The numbers that stand before a mark if it is true.

        Raises:
            ConfigError: it names no file, no such column or key, or no row has its conditions.
        """
        try:
            return self._evidence(mark, folder)
        except (OSError, KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            about = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError(f"mark {' '.join(mark.split())!r}: expected FILES : FIELDS : ROWS ({about})") from error

    def _evidence(self, mark: str, folder: Path) -> Evidence:
        first, *rest = " ".join(mark.split()).split(" : ")
        functions = first.split() if {*first.split()} <= {*FUNCTIONS, "each", "among"} else ["each"]
        files, fields, conditions = [*(rest if functions == first.split() else [first, *rest]), ""][:3]
        chosen: list[tuple[dict[str, Any], list[SavedRecord]]] = []
        for pattern in files.split():
            file = Path(os.path.normpath(folder.absolute() / pattern))
            paths = sorted(path for path in self.records if path.match(str(file)))
            chosen += [row for path in paths or [file] for row in self._rows(path)]
        for column, values in (condition.split("=", 1) for condition in filter(None, conditions.split("; "))):
            chosen = [(row, behind) for row, behind in chosen if row[column] in values.split("|")]
        if not chosen:
            raise KeyError(f"no row with {conditions}")
        columns = [[cell for row, _ in chosen for cell in _cells(row, field)] for field in fields.split("; ")]
        records = list({saved.path: saved for _, behind in chosen for saved in behind}.values())
        seeds = frozenset(int(row["Seed"]) for row, _ in chosen if str(row.get("Seed")).isdigit())
        if functions[0] in ("each", "among"):
            return Evidence([number for column in columns for cell in column for number in cell], records, seeds)
        values_of = [[cell[0] for cell in column] for column in columns]
        return Evidence([FUNCTIONS[function](values) for values in values_of for function in functions], records, seeds)

    def _rows(self, path: Path) -> list[tuple[dict[str, Any], list[SavedRecord]]]:
        """The rows of a CSV, or a record, each with the records behind it."""
        if path in self.records:
            return [(self.records[path].record, [self.records[path]])]
        behind = self._behind(path)
        return [(row, behind.get(row.get("Record", ""), behind.get(_label(row), []))) for row in read(path)]

    def _behind(self, path: Path) -> dict[str, list[SavedRecord]]:
        """The records behind the rows of a CSV, by their names there and by the rows' names."""
        listed = path.with_name(f"{path.stem}_records.csv")
        named: dict[str, list[SavedRecord]] = {}
        for line in read(listed) if listed.exists() else []:
            saved = self.records.get(self.root.parent / line["File"])
            for name in {line["Record"], line.get("Row", "")}:
                named.setdefault(name, []).extend([saved] if saved else [])
        return named


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV; a second column of one name is `NAME 2`."""
    header, *lines = csv.reader(path.read_text(encoding="utf-8").splitlines())
    names = [name + f" {n}" * (n > 1) for i, name in enumerate(header) for n in [header[: i + 1].count(name)]]
    return [dict(zip(names, line, strict=True)) for line in lines]


def _label(row: Mapping[str, Any]) -> str:
    """The name of a table's row, without the letter of its note."""
    return NOTE.sub("", str(next(iter(row.values()))))


def _reached(node: Any, keys: Sequence[str]) -> Iterator[Any]:
    """The values below `keys` in a record."""
    if not keys:
        yield node
        return
    parts = {str(i): part for i, part in enumerate(node)} if isinstance(node, list) else node
    for part in parts.values() if keys[0] == "*" else [parts[keys[0]]]:
        yield from _reached(part, keys[1:])


def _cells(row: dict[str, Any], field: str) -> list[list[float]]:
    """The numbers in each cell of a field."""
    parts = [field] if field in row else re.split(r" ([-*/]) ", field)
    if len(parts) == 1:
        chosen = [row[field]] if field in row else _reached(row, field.split("."))
        return [[float(number.replace(",", "")) for number in NUMBER.findall(str(cell))] for cell in chosen]
    left, sign, right = parts
    (other,) = [[float(right)]] if NUMBER.fullmatch(right) else _cells(row, right)
    return [[OPERATORS[sign](cell[0], other[0])] for cell in _cells(row, left)]
