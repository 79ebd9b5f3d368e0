"""A table of texts, as Markdown, LaTeX and CSV."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attnlab.run.files import write_text

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
    """

    title: str
    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([self.headers, *self.rows])
        return file.getvalue()

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
        return paths


def escape(text: str) -> str:
    """`text` with LaTeX's special characters escaped; text in backquotes becomes typewriter."""
    plain = "".join(LATEX.get(character, character) for character in text)
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", plain)
