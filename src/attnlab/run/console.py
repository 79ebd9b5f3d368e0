"""Log lines, tables and progress on a terminal, without control characters of the files that they name."""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from threading import Thread
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining
from rich.segment import Segment

from attnlab.errors import printable


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


class Output:
    """A stream of text that never fails: where its reader is gone or its disk is full, what is printed is dropped.

    Args:
        stream: the stream that is written to, whose other attributes this one has too.
        hold: keep what is printed until `release`.

    Attributes:
        error: why nothing more is printed; None: all was.
    """

    def __init__(self, stream: TextIO, hold: bool = False) -> None:
        self.stream, self._held = stream, [""] if hold else None
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        if self._held is not None:
            self._held.append(text)
        elif self.error is None:
            self._try(self.stream.write, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        if self._held is None and self.error is None:
            self._try(self.stream.flush)

    def release(self) -> None:
        """Print what was held, and all that follows at once."""
        held, self._held = self._held or [], None
        self.write("".join(held))
        self.flush()

    def _try(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except OSError as error:
            self.error = error


@contextmanager
def printed_at_the_end() -> Iterator[None]:
    """Print what the block prints on standard output when it has ended."""
    output: Any = Output(sys.stdout, hold=True)
    try:
        with redirect_stdout(output):
            yield
    finally:
        output.release()


class Screen(Console):
    """rich's Console without control characters in what is printed. Its colours stay."""

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*arguments, **options):
            yield Segment(text if control else printable(text, keep="\n"), style, control)


log = logging.getLogger(__name__)

SECONDS = 30.0  # between lines of the log
Value = TypeVar("Value")


class Pass:
    """One pass over `total` rows; None: not known. Without a bar, the log has a line from time to time."""

    def __init__(self, bar: Progress | None, what: str, total: int | None) -> None:
        self._bar, self._what, self._total = bar, what, total
        self._done, self._logged = 0, time.monotonic()
        self.task: TaskID = TaskID(0) if bar is None else bar.add_task(what, total=total)

    def __call__(self, rows: int, *, what: str | None = None, total: int | None = None) -> None:
        """Advance by `rows`. `what` and `total` replace the earlier ones."""
        self._done += rows
        self._what, self._total = what or self._what, self._total if total is None else total
        if self._bar is not None:
            self._bar.update(self.task, completed=self._done, total=self._total, description=self._what)
        elif time.monotonic() - self._logged >= SECONDS:
            self._logged = time.monotonic()
            done = f": {self._done}" if self._done else " ..."
            log.info("%s%s", self._what, done if self._total is None else f": {self._done} of {self._total}")


_shown: list[Progress] = []  # at most one bar: two on one terminal would overwrite each other


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Pass]:
    """Yield a :class:`Pass`. Inside another pass, a line is added to the bar that is shown."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        if not _shown and sys.stderr.isatty():
            bar = Progress(*columns, Remaining(), console=Console(stderr=True), transient=True)
            _shown.append(stack.enter_context(bar))
            stack.callback(_shown.clear)
        shown = _shown[0] if _shown else None
        current = Pass(shown, what, total)
        if shown:
            stack.callback(shown.remove_task, current.task)
        yield current


def each(what: str, rows: Iterable[Value]) -> Iterator[Value]:
    """Iterate over rows, and show how far that is."""
    with progress(what, len(rows) if isinstance(rows, Sized) else None) as advance:
        for row in rows:
            yield row
            advance(1)


def waited(what: str, function: Callable[[], Value]) -> Value:
    """Return the result of a long function of a library that releases Python's lock; its exception is raised here.

    It runs in another thread, so that Ctrl-C ends the waiting at once; the thread ends with the process.
    """
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    with progress(what, None) as advance:
        while not wait([future], timeout=0.5).done:
            advance(0)
    return future.result()
