"""Records as a data frame, and tables of texts as Markdown, LaTeX and CSV."""

import csv
import io
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pandas as pd

from attnlab.config.build import at
from attnlab.errors import DataError
from attnlab.run.files import write_text
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "·": r"$\cdot$"}
LATEX |= {"–": "--", "—": "---"} | {character: f"\\{character}" for character in "&%$#_{}"}


def frame(records: Iterable[SavedRecord], **columns: str | Callable[[SavedRecord], Any]) -> pd.DataFrame:
    """A row for each record: the record in the column `saved`, then values of a dotted key or function, or None."""
    rows = [
        {"saved": saved}
        | {name: get(saved) if callable(get) else at(saved.record, get) for name, get in columns.items()}
        for saved in records
    ]
    return pd.DataFrame(rows, columns=["saved", *columns], dtype=object)


def differing(names: Sequence[Any], settings: Sequence[Mapping[str, Any]], always: Collection[str] = ()) -> list[str]:
    """For each run its settings, as words, in which runs of the same name differ, and `always` those of these keys."""
    lines = []
    for name, own in zip(names, settings, strict=True):
        others = [other for key, other in zip(names, settings, strict=True) if key == name]
        differ = {key for key in own if any(str(other.get(key)) != str(own[key]) for other in others)}
        shown = [key for key in own if key in differ or (key in always and own[key] is not None)]
        lines.append(" ".join(f"{key}={own[key]}" for key in shown))
    return lines


def known(values: Iterable[float | None]) -> list[float]:
    """The values that were measured."""
    return [value for value in values if not pd.isna(value)]  # type: ignore[misc]


def finished(records: Iterable[SavedRecord], is_of: Callable[[SavedRecord], Any], what: str) -> list[SavedRecord]:
    """The finished records for which `is_of` is true; DataError if none is of `what`."""
    chosen = [saved for saved in records if saved.record["status"] == "finished" and is_of(saved)]
    if not chosen:
        raise DataError(f"no finished record {what} among these records")
    return chosen


def spread(values: Iterable[float], form: str, error: float | None = None) -> str:
    """Mean ± standard deviation (of a single value `error`); `not run` without values, or where one is missing."""
    values = list(values)
    if not values or any(map(pd.isna, values)):
        return NOT_RUN
    width = stdev(values) if len(values) > 1 else error
    return f"{mean(values):{form}}" + ("" if width is None or pd.isna(width) else f" ± {width:{form}}")


def read_runs(path: Path, columns: Sequence[str], numbers: Iterable[str]) -> pd.DataFrame:
    """A runs.csv, the numbers in a table of runs whose records are not committed; `not run` is NaN in `numbers`.

    Raises:
        DataError: the file is something else.
    """
    kinds = {column: float if column in numbers else str for column in columns}
    missing = dict.fromkeys(numbers, ["", NOT_RUN])
    try:
        return pd.read_csv(path, header=0, names=list(columns), dtype=kinds, keep_default_na=False, na_values=missing,
                           index_col=False, float_precision="round_trip")  # fmt: skip
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


@dataclass
class Grid:
    """A table of texts with notes below it, which have code in backquotes, and facts of the records behind it."""

    title: str
    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: list[dict[str, str]] = field(default_factory=list)

    def list_records(self, records: Sequence[dict[str, str]]) -> None:
        """Note where the records lie. Each has its name in the table, its `File` and other facts."""
        if not records:
            return
        self.records = list(records)
        folder = os.path.commonpath([os.path.dirname(record["File"]) or "." for record in records])
        files = f"{len(records)} file{'s' if len(records) > 1 else ''}"
        facts = ", ".join(key.lower() for key in list(records[0])[1:])
        self.notes.append(f"Records: {files} in `{folder}`, listed in the CSV file that ends in _records ({facts}).")

    def markdown(self) -> str:
        """A heading, a table with numbers flush right, and the notes as a list."""
        rule = ["---"] + ["---:"] * (len(self.headers) - 1)
        cells = [self.headers, rule, *self.rows]
        lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([f"# {self.title}", "", *lines, *notes, ""])

    def latex(self) -> str:
        r"""A `table` environment with the notes below the rows. It needs the package booktabs."""
        headers, *rows = (" & ".join(map(escape, row)) + r" \\" for row in [self.headers, *self.rows])
        columns = "l" + "r" * (len(self.headers) - 1)
        begin = [r"\begin{table}\centering\footnotesize", f"\\caption{{{escape(self.title)}}}"]
        begin += [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", headers, r"\midrule"]
        notes = [f"\\par\\smallskip\\noindent {escape(note)}" for note in self.notes]
        end = [r"\bottomrule", r"\end{tabular}", r"\raggedright", *notes, r"\end{table}", ""]
        return "\n".join([*begin, *rows, *end])

    def csv(self) -> str:
        """Headers and rows, without title and notes."""
        return _csv([self.headers, *self.rows])

    def write(self, stem: Path, *kinds: str) -> list[Path]:
        """Write the table as `stem` with suffixes md, tex or csv, and facts of its records to `stem`_records.csv."""
        texts = {"md": self.markdown, "tex": self.latex, "csv": self.csv}
        files = {stem.with_name(f"{stem.name}.{kind}"): texts[kind]() for kind in kinds}
        if self.records:
            rows = [list(self.records[0]), *(list(record.values()) for record in self.records)]
            files[stem.with_name(f"{stem.name}_records.csv")] = _csv(rows)
        for path, text in files.items():
            write_text(path, text)
        return list(files)


def facts(name: str, saved: SavedRecord, protocol: str = "") -> dict[str, str]:
    """The facts of a record behind a table, by their headings; `name`: what the table calls it."""
    record, environment = saved.record, saved.record["environment"]
    return {
        "Record": name,
        "File": saved.name,
        "Seed": str(record["seed"]),
        "Corpus": re.sub(r" at .*(?=: train )", "", record["corpus"]),  # without its path
        "Device": environment["device"],
        "Git": environment["git"],
        "Protocol": protocol or record["inference"]["protocol"],
        "Command": record["command"],
    }


def escape(text: str) -> str:
    """Escape LaTeX's special characters; text in backquotes becomes typewriter."""
    plain = "".join(LATEX.get(character, character) for character in text)
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", plain)


def _csv(rows: Iterable[Sequence[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()
