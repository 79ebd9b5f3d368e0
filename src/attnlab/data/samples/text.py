"""The sample corpus of language modelling, in the layout of any of its corpora."""

from pathlib import Path
from typing import Any, Protocol

from attnlab.data.samples.markov import Source
from attnlab.runs.cache import digest, stored_files

VERSION = 1  # to be raised when the generator gives other texts


class Layout(Protocol):
    """A reader that can also write."""

    name: str

    def write_sample(self, root: Path, source: Source) -> None: ...


def write_text(cache_dir: Path, layout: Layout) -> Path:
    """The folder of the sample corpus, written unless it is there whole.  DataError: cannot be written."""
    key: dict[str, Any] = {"version": VERSION, "layout": type(layout).__name__} | {
        name: value for name, value in vars(layout).items() if isinstance(value, str | int | float)
    }
    folder = cache_dir / "samples" / f"text-{digest(key)[:16]}"
    return stored_files(folder, lambda partial: layout.write_sample(partial, Source()))
