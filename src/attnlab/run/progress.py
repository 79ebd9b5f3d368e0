"""How far a pass over many rows is: a bar on a terminal, lines of the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from threading import Thread
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

log = logging.getLogger(__name__)

SECONDS = 30.0  # between lines of the log
Value = TypeVar("Value")


class Pass:
    """One pass: called with the number of rows that are done since the last call.

    Args:
        bar: shows it; None: there is no terminal, and lines of the log do.
        what: is being done.
        total: rows; None: not known.
    """

    def __init__(self, bar: Progress | None, what: str, total: int | None) -> None:
        self._bar, self._what, self._total = bar, what, total
        self._done, self._said = 0, time.monotonic()
        self._line: TaskID | None = None if bar is None else bar.add_task(what, total=total)

    def __call__(self, rows: int, *, what: str | None = None, total: int | None = None) -> None:
        """Advance by `rows`. `what` and `total` replace what was given at the beginning."""
        self._done += rows
        self._what, self._total = what or self._what, self._total if total is None else total
        if self._bar is not None and self._line is not None:
            self._bar.update(self._line, completed=self._done, total=self._total, description=self._what)
        elif time.monotonic() - self._said >= SECONDS:
            self._said = time.monotonic()
            if self._total is None:
                log.info("%s%s", self._what, f": {self._done}" if self._done else " ...")
            else:
                log.info("%s: %d of %d", self._what, self._done, self._total)

    def close(self) -> None:
        if self._bar is not None and self._line is not None:
            self._bar.remove_task(self._line)


_bars: list[Progress] = []  # the one that is shown: two on one terminal would overwrite each other


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Pass]:
    """Yield what is to be called with the number of rows that are done since the last call.

    Inside another pass, a line is added to the bar that is shown.

    Args:
        what: is being done.
        total: rows; None: not known.
    """
    if not sys.stderr.isatty() and not _bars:
        yield Pass(None, what, total)
        return
    new = None if _bars else _bar()
    with new or nullcontext():
        if new is not None:
            _bars.append(new)
        one = Pass(_bars[0], what, total)
        try:
            yield one
        finally:
            one.close()
            if new is not None:
                _bars.clear()


def _bar() -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, Remaining(), console=Console(stderr=True), transient=True)


def each(what: str, rows: Iterable[Value]) -> Iterator[Value]:
    """Iterate over rows, and show how far that is.

    Args:
        what: is being done.
        rows: their number is shown where it is known.
    """
    with progress(what, len(rows) if isinstance(rows, Sized) else None) as advance:
        for row in rows:
            yield row
            advance(1)


def waited(what: str, function: Callable[[], Value]) -> Value:
    """The result of a function that stays outside Python for long, where Ctrl-C would have to wait for it.

    It runs in a thread of its own. A signal ends the waiting at once; the thread ends with the process.

    Args:
        what: is being done.
        function: must release Python's lock, as libraries in C++ and Rust do.

    Raises:
        Exception: that of the function.
    """
    found: Future[Value] = Future()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=run, name=what, daemon=True).start()
    with progress(what, None) as advance:
        while not wait([found], timeout=0.5).done:
            advance(0)
    return found.result()
