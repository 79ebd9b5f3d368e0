"""A table of texts, as Markdown, LaTeX and CSV."""

import csv
import io
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attnlab.errors import DataError

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "·": r"$\cdot$"}
LATEX |= {"–": "--", "—": "---"} | {character: f"\\{character}" for character in "&%$#_{}"}


@dataclass
class Grid:
    """`notes` are sentences below the table; what stands between backquotes in them is code."""

    title: str
    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        rule = "| " + " | ".join(["---"] + ["---:"] * (len(self.headers) - 1)) + " |"
        table = [line(self.headers), rule, *map(line, self.rows)]
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([f"# {self.title}", "", *table, *notes, ""])

    def latex(self) -> str:
        r"""A `table` for the booktabs package, notes below it."""

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
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([self.headers, *self.rows])
        return file.getvalue()

    def write(self, stem: Path, *kinds: str) -> list[Path]:
        """Beside each other: stem.md, stem.tex, stem.csv, those that are asked for.  DataError: cannot be written."""
        texts = {"md": self.markdown, "tex": self.latex, "csv": self.csv}
        return [write(stem.with_name(f"{stem.name}.{kind}"), texts[kind]().encode()) for kind in kinds]


def escape(text: str) -> str:
    """Text for LaTeX; `code` becomes typewriter."""
    plain = "".join(LATEX.get(character, character) for character in text)
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", plain)


def write(path: Path, data: bytes) -> Path:
    """Replace a file as a whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(data)
            os.chmod(name, 0o644)  # mkstemp gives 0600
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    return path
