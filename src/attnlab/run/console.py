"""What reaches a terminal: log lines and tables, without control characters of the files that they tell of."""

import copy
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.segment import Segment

from attnlab.errors import printable


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the moment: a progress bar puts its own stream there, and keeps lines apart."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # type: ignore[override]
        return sys.stderr

    def setStream(self, stream: TextIO) -> None:
        raise TypeError("this handler writes to sys.stderr")

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(arguments := record.args, tuple):
            record = copy.copy(record)
            texts = str, Path, BaseException
            record.args = tuple(printable(str(one)) if isinstance(one, texts) else one for one in arguments)
        return printable(super().format(record), keep="\n")


class Screen(Console):
    """rich's console for tables of what files hold; arguments are its own. Its colours are its own as well."""

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*arguments, **options):
            yield Segment(text if control else printable(text, keep="\n"), style, control)
