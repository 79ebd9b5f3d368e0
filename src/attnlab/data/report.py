"""What a run reads of its data, what it leaves out, and what it uses in another form, by split.  Imports no torch.

A reader calls :func:`left_out` and :func:`noted`, from any depth.  They write to the :class:`Split` whose block is open
(:meth:`Report.of`), as `warnings.warn` writes to the filters that are in force.  Threads and processes that are started
inside the block do not see it.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

log = logging.getLogger(__name__)

Item = TypeVar("Item")
FILES = "files"  # the name of the block for what belongs to no split


@dataclass(slots=True)
class Note:
    """How often something happened, and where first."""

    count: int = 0
    example: str = ""


@dataclass(slots=True)
class Split:
    """What was read of one split.

    Attributes:
        used: the number of examples that the run uses; None: not counted.
        unit: what an example is called.
        left_out: examples that are not used, by reason.
        noted: what is used in another form than it has in the files, by description.
    """

    used: int | None = None
    unit: str = "examples"
    left_out: dict[str, Note] = field(default_factory=dict)
    noted: dict[str, Note] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """The number of examples that are left out."""
        return sum(note.count for note in self.left_out.values())

    def plain(self) -> dict[str, Any]:
        """Plain values for the record."""
        sizes = {} if self.used is None else {"read": self.used + self.missing, "used": self.used, "unit": self.unit}
        return sizes | {
            kind: {text: {"count": note.count, "example": note.example} for text, note in notes.items()}
            for kind, notes in (("left_out", self.left_out), ("noted", self.noted))
            if notes
        }

    def __str__(self) -> str:
        size = [] if self.used is None else [f"{self.used} {self.unit}"]
        if self.left_out and self.used is not None:
            size = [f"{self.used} of {self.used + self.missing} {self.unit}"]
        parts = [f"left out: {_shown(self.left_out)}"] * bool(self.left_out) + [_shown(self.noted)] * bool(self.noted)
        return "; ".join(size + parts)


class Report:
    """What a run has read; `splits`: by name, in the order in which they were read."""

    def __init__(self) -> None:
        self.splits: dict[str, Split] = {}

    @contextmanager
    def of(self, split: str) -> Iterator[Split]:
        """A block in which :func:`left_out` and :func:`noted` write to a split, or to FILES."""
        reached = _reached.set(self.splits.setdefault(split, Split()))
        try:
            yield self.splits[split]
        finally:
            _reached.reset(reached)

    def plain(self) -> dict[str, Any]:
        """Plain values for the record, those of splits of which something was read."""
        return {name: plain for name, split in self.splits.items() if (plain := split.plain())}

    def show(self) -> None:
        """Log a line for each split: a warning where something was left out or noted."""
        for name, split in self.splits.items():
            if text := str(split):
                log.log(logging.WARNING if split.left_out or split.noted else logging.INFO, "%s: %s", name, text)


_reached: ContextVar[Split | None] = ContextVar("attnlab_split", default=None)


def left_out(reason: str, example: str = "", count: int = 1) -> None:
    """Note examples or files that are not used.

    Args:
        reason: short and without names, because equal reasons are counted together.
        example: the file, file and line, or id of the first one.
    """
    _note("left_out", reason, example, count)


def noted(text: str, example: str = "", count: int = 1) -> None:
    """Note examples that are used in another form than they have in the files, such as texts that are cut."""
    _note("noted", text, example, count)


def restore(plain: Mapping[str, Any]) -> None:
    """Note again what :meth:`Split.plain` has of something stored, which is not read again."""
    for kind in ("left_out", "noted"):
        for text, note in plain.get(kind, {}).items():
            _note(kind, text, note["example"], note["count"])


def apart(items: Iterable[Item]) -> Iterator[tuple[Item, Split]]:
    """Each item with what is noted while it is read, for :func:`restore` where the item is used."""
    iterator, notes = iter(items), Split()
    while True:
        reached = _reached.set(notes)
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            _reached.reset(reached)
        yield item, notes
        if notes.left_out or notes.noted:
            notes = Split()


def _note(kind: str, text: str, example: str, count: int) -> None:
    if count < 1:
        return
    if (split := _reached.get()) is None:
        log.warning("%s: %s", kind.replace("_", " "), _shown({text: Note(count, example)}))
    else:
        note = getattr(split, kind).setdefault(text, Note(0, example))
        note.count += count


def _shown(notes: Mapping[str, Note]) -> str:
    return ", ".join(
        f"{text}: {note.count}{f' ({note.example})' if note.example else ''}" for text, note in notes.items()
    )
