"""The sample corpus of language modelling, in the layout of whichever corpus is asked for."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Protocol

from attnlab.data.cache import locked
from attnlab.data.samples.markov import Source
from attnlab.errors import DataError

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
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_dir / "samples" / f"text-{name}"
    with locked(folder):
        if not _whole(folder):
            partial = folder.with_name(f".{folder.name}.partial")
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                layout.write_sample(partial, Source())
                digests = {str(p.relative_to(partial)): _digest(p) for p in sorted(partial.rglob("*")) if p.is_file()}
                (partial / "digests.json").write_text(json.dumps(digests))
                shutil.rmtree(folder, ignore_errors=True)
                partial.rename(folder)
            except OSError as error:
                raise DataError(f"{folder}: cannot be written ({error.strerror})") from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def _whole(folder: Path) -> bool:
    try:
        digests: dict[str, str] = json.loads((folder / "digests.json").read_bytes())
        return all(_digest(folder / name) == value for name, value in digests.items())
    except (OSError, ValueError):
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
