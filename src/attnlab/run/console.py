"""Log lines and tables on a terminal, without control characters of the files that they name."""

import copy
import logging
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.segment import Segment
from rich.table import Table

from attnlab.config.build import leaves
from attnlab.errors import printable
from attnlab.run.record import NOT_RUN

DESCRIBED = ("parameters", "kv_cache", "multiply_adds_per_token", "compression", "memory")  # sections of the record


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the moment: a progress bar puts another stream there, and separates lines."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # type: ignore[override]
        return sys.stderr

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(arguments := record.args, tuple):
            record = copy.copy(record)
            texts = str, Path, BaseException
            record.args = tuple(printable(str(value)) if isinstance(value, texts) else value for value in arguments)
        return printable(super().format(record), keep="\n")


class Screen(Console):
    """rich's Console without control characters in what is printed. Its colours stay."""

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*arguments, **options):
            yield Segment(text if control else printable(text, keep="\n"), style, control)


def show_description(record: Mapping[str, Any]) -> None:
    """Print the record of mode=describe as a table: title and sizes by section."""
    names = [record[key] for key in ("task", "attention", "compress", "scale") if record[key] not in (None, "none")]
    table = Table(title=" · ".join(map(str, names)), show_header=False, title_justify="left")
    for section in DESCRIBED:
        rows = [(path, value) for path, value in leaves(record.get(section, {})) if value not in (NOT_RUN, None)]
        if rows:
            table.add_section()
            table.add_row(f"[bold]{section.replace('_', ' ')}[/]", "")
        for path, value in rows:
            shown = (
                f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
            )
            table.add_row(f"  {path.replace('.', ', ').replace('_', ' ')}", shown)
    console = Screen(highlight=False)
    console.print(table)
    console.print("The whole record as JSON: the same command with its output in a file or a pipe.")
