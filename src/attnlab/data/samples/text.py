"""The sample corpus of language modelling, written in the layout of any text corpus."""

from pathlib import Path
from typing import Any, Protocol

from attnlab.data.samples.markov import Source
from attnlab.run.cache import digest, stored_files

VERSION = 1  # increase it when the generator gives other texts


class Layout(Protocol):
    """A reader that can also write the sample corpus in its layout."""

    name: str

    def write_sample(self, root: Path, source: Source) -> None: ...


def write_text(cache_dir: Path, layout: Layout) -> Path:
    """Write the sample corpus, unless it exists.

    Args:
        cache_dir: the directory that samples are stored in.
        layout: the reader whose layout it gets.

    Returns:
        The directory of the corpus.

    Raises:
        DataError: the corpus cannot be written.
    """
    key: dict[str, Any] = {"version": VERSION, "layout": type(layout).__name__} | {
        name: value for name, value in vars(layout).items() if isinstance(value, str | int | float)
    }
    folder = cache_dir / "samples" / f"text-{digest(key)[:16]}"
    return stored_files(folder, lambda partial: layout.write_sample(partial, Source()))
