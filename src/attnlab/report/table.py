"""Records as a data frame, and tables of texts as Markdown, LaTeX and CSV."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pandas as pd

from attnlab.config.batch import counted
from attnlab.config.build import at
from attnlab.errors import DataError, printable
from attnlab.run import markup
from attnlab.run.files import write_text
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "·": r"$\cdot$"}
LATEX |= {"–": "--", "—": "---"} | {character: f"\\{character}" for character in "&%$#_{}"}


def frame(records: Iterable[SavedRecord], **columns: str | Callable[[SavedRecord], Any]) -> pd.DataFrame:
    """A row for each record: the record in the column `saved`, then values of a dotted key or a function, or None."""
    rows = [
        {"saved": saved}
        | {name: get(saved) if callable(get) else at(saved.record, get) for name, get in columns.items()}
        for saved in records
    ]
    return pd.DataFrame(rows, columns=["saved", *columns], dtype=object)


def differing(names: Sequence[Any], settings: Sequence[Mapping[str, Any]], always: Collection[str] = ()) -> list[str]:
    """The settings of each run in which runs of its name differ, as words; settings in `always` are always named."""
    lines = []
    for name, chosen in zip(names, settings, strict=True):
        others = [other for key, other in zip(names, settings, strict=True) if key == name]
        differ = {key for key in chosen if any(str(other.get(key)) != str(chosen[key]) for other in others)}
        shown = [key for key in chosen if key in differ or (key in always and chosen[key] is not None)]
        lines.append(" ".join(f"{key}={chosen[key]}" for key in shown))
    return lines


def known(values: Iterable[float | None]) -> list[float]:
    """The values that were measured."""
    return [value for value in values if not pd.isna(value)]  # type: ignore[misc]


def finished(records: Iterable[SavedRecord], is_of: Callable[[SavedRecord], Any], what: str) -> list[SavedRecord]:
    """The finished records for which `is_of` is true; DataError, which names `what`, if there are none."""
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
    """Read a runs.csv, which has the numbers of runs without committed records. `not run` in `numbers` becomes NaN.

    Raises:
        DataError: the file cannot be read as such a table.
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
    """A table of texts, the notes below it, and facts of the records behind it.

    Args:
        rows: lines of Markdown with code in backquotes and links to files; any other markup is shown as it is typed.
        notes: the same.
        is_markup: headers, rows and notes are Markdown of any kind, which a user has written.
    """

    title: str
    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: list[dict[str, str]] = field(default_factory=list)
    is_markup: bool = False

    def list_records(self, records: Sequence[dict[str, str]]) -> None:
        """Add a note that says where the records lie. Each has its name in the table, its `File` and other facts."""
        self.records = list(records)
        if records:
            folder = os.path.commonpath([os.path.dirname(record["File"]) or "." for record in records])
            files, facts = counted(len(records), "file"), ", ".join(key.lower() for key in list(records[0])[1:])
            where = f"{files} in `{folder}`, listed in the CSV file that ends in _records ({facts})"
            self.notes.append(f"Records: {where}.")

    def markdown(self) -> str:
        """Return a heading, a table with numbers flush right, and the notes as a list."""
        rule = ["---"] + ["---:"] * (len(self.headers) - 1)
        cells = [self.headers, rule, *self.rows]
        shown = str if self.is_markup else markup.inline
        lines = [f"| {' | '.join(markup.cell(shown(cell)) for cell in row)} |" for row in cells]
        notes = ["", *(f"- {shown(note)}" for note in self.notes)] if self.notes else []
        return "\n".join([f"# {self.title}", "", *lines, *notes, ""])

    def latex(self) -> str:
        r"""Return a `table` environment with the notes below the rows. It needs the package booktabs."""
        headers, *rows = (" & ".join(map(escape, row)) + r" \\" for row in [self.headers, *self.rows])
        columns = "l" + "r" * (len(self.headers) - 1)
        begin = [r"\begin{table}\centering\footnotesize", f"\\caption{{{escape(self.title)}}}"]
        begin += [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", headers, r"\midrule"]
        notes = [f"\\par\\smallskip\\noindent {escape(note)}" for note in self.notes]
        end = [r"\bottomrule", r"\end{tabular}", r"\raggedright", *notes, r"\end{table}", ""]
        return "\n".join([*begin, *rows, *end])

    def csv(self) -> str:
        """Return headers and rows, without title and notes."""
        return as_csv(pd.DataFrame(self.rows, columns=self.headers))

    def write(self, stem: Path, *kinds: str) -> list[Path]:
        """Write the table as `stem` with the suffixes md, tex or csv, and its records' facts to `stem`_records.csv."""
        texts = {"md": self.markdown, "tex": self.latex, "csv": self.csv}
        files = {stem.with_name(f"{stem.name}.{kind}"): texts[kind]() for kind in kinds}
        if self.records:
            behind = Grid(self.title, list(self.records[0]), [list(record.values()) for record in self.records])
            files[stem.with_name(f"{stem.name}_records.csv")] = behind.csv()
        for path, text in files.items():
            write_text(path, text)
        return list(files)


def as_csv(data: pd.DataFrame) -> str:
    """The text of a CSV file. A text that spreadsheets would compute gets an apostrophe."""
    rows = [[markup.spreadsheet(value) for value in row] for row in data.itertuples(index=False, name=None)]
    return pd.DataFrame(rows, columns=data.columns, dtype=object).to_csv(index=False, lineterminator="\n")


def facts(name: str, saved: SavedRecord, protocol: str = "") -> dict[str, str]:
    """The facts of a record behind a table, by their headings; `name`: the record's name in the table."""
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
    plain = "".join(LATEX.get(character, character) for character in printable(" ".join(text.split())))
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", plain)
