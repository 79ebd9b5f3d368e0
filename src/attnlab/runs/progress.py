"""How far a pass over many rows is: a bar on a terminal, lines of the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

log = logging.getLogger(__name__)

SECONDS = 60.0  # between lines of the log


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield what is to be called with the number of rows that are done since the last call.

    Args:
        what: is being done.
        total: rows.
    """
    terminal = sys.stderr.isatty()
    done, said = 0, time.monotonic()
    with Progress(console=Console(stderr=True), transient=True, disable=not terminal) as bar:
        task = bar.add_task(what, total=total)

        def advance(rows: int) -> None:
            nonlocal done, said
            done += rows
            bar.advance(task, rows)
            if not terminal and time.monotonic() - said >= SECONDS:
                said = time.monotonic()
                log.info("%s: %d of %d", what, done, total)

        yield advance
