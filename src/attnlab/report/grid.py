"""A table of texts, as Markdown, LaTeX and CSV."""

import csv
import io
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attnlab.run.files import write_text
from attnlab.run.store import SavedRecord

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "·": r"$\cdot$"}
LATEX |= {"–": "--", "—": "---"} | {character: f"\\{character}" for character in "&%$#_{}"}


@dataclass
class Grid:
    """A table.

    Args:
        title: the heading or caption.
        headers: of the columns.
        rows: one text for each column.
        notes: sentences below the table, in which backquotes mark code.
        records: what is known of each record behind the table; a CSV of its own.
    """

    title: str
    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: list[dict[str, str]] = field(default_factory=list)

    def list_records(self, records: Sequence[dict[str, str]]) -> None:
        """Note where the records lie, and list them in the CSV beside the table.

        Args:
            records: of each one its name in the table, its `File`, and other facts by their headings.
        """
        if not records:
            return
        self.records = list(records)
        folder = os.path.commonpath([os.path.dirname(record["File"]) or "." for record in records])
        files = f"{len(records)} file{'s' if len(records) > 1 else ''}"
        facts = ", ".join(key.lower() for key in list(records[0])[1:])
        self.notes.append(f"Records: {files} in `{folder}`, listed in the CSV file that ends in _records ({facts}).")

    def markdown(self) -> str:
        """A heading, a table with the numbers flush right, and the notes as a list."""

        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        rule = "| " + " | ".join(["---"] + ["---:"] * (len(self.headers) - 1)) + " |"
        table = [line(self.headers), rule, *map(line, self.rows)]
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([f"# {self.title}", "", *table, *notes, ""])

    def latex(self) -> str:
        r"""A `table` environment that needs the booktabs package, with the notes below the rows."""

        def line(cells: Sequence[str]) -> str:
            return " & ".join(map(escape, cells)) + r" \\"

        notes = [f"\\par\\smallskip\\noindent {escape(note)}" for note in self.notes]
        return "\n".join(
            [
                r"\begin{table}\centering\footnotesize",
                f"\\caption{{{escape(self.title)}}}",
                f"\\begin{{tabular}}{{l{'r' * (len(self.headers) - 1)}}}",
                r"\toprule",
                line(self.headers),
                r"\midrule",
                *map(line, self.rows),
                r"\bottomrule",
                r"\end{tabular}",
                r"\raggedright",
                *notes,
                r"\end{table}",
                "",
            ]
        )

    def csv(self) -> str:
        """Headers and rows, without title and notes."""
        return _csv([self.headers, *self.rows])

    def write(self, stem: Path, *kinds: str) -> list[Path]:
        """Write the table to files.

        Args:
            stem: the path without suffix.
            kinds: the suffixes, of md, tex and csv.

        Returns:
            The paths of the files.

        Raises:
            WriteError: a file cannot be written.
        """
        texts = {"md": self.markdown, "tex": self.latex, "csv": self.csv}
        paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
        for path, kind in zip(paths, kinds, strict=True):
            write_text(path, texts[kind]())
        if self.records:
            paths.append(stem.with_name(f"{stem.name}_records.csv"))
            write_text(paths[-1], _csv([list(self.records[0]), *(list(record.values()) for record in self.records)]))
        return paths


def _csv(rows: Iterable[Sequence[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def facts(name: str, saved: SavedRecord, protocol: str = "") -> dict[str, str]:
    """The facts of a record behind a table.

    Args:
        name: what the table calls it.
        saved: the record.
        protocol: how it was measured; empty: as its `inference.protocol` says.
    """
    record, environment = saved.record, saved.record["environment"]
    return {
        "Record": name,
        "File": saved.name,
        "Seed": str(record["seed"]),
        "Corpus": re.sub(r" at .*(?=: train )", "", record["corpus"]),  # without where it lies
        "Device": environment["device"],
        "Git": environment["git"],
        "Protocol": protocol or record["inference"]["protocol"],
        "Command": record["command"],
    }


def escape(text: str) -> str:
    """`text` with LaTeX's special characters escaped; text in backquotes becomes typewriter."""
    plain = "".join(LATEX.get(character, character) for character in text)
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", plain)
