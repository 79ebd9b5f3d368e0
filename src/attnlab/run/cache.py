"""Folders in the cache: computed once, found again by name, checked when they are opened, computed again when damaged.

The name of a folder ends in a digest of everything that its content depends on, so that nothing changed is taken for
the old.  Features, token ids and sample corpora are stored in this way.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from filelock import AcquireReturnProxy, FileLock, Timeout

from attnlab.errors import DataError, WriteError
from attnlab.run.files import replacing_folder

log = logging.getLogger(__name__)

INDEX = "index.json"
MANIFEST = ".manifest.json"  # hidden: it is no part of a corpus
BY_SIZE = (".wav", ".flac", ".png")  # files that a manifest lists with their size alone

Content = TypeVar("Content")


class Damaged(Exception):
    """A stored folder does not hold what was written to it."""


def stored(folder: Path, read: Callable[[Path], Content], write: Callable[[Path], None]) -> Content:
    """Open a stored folder, which is first computed where it is missing or damaged.

    Processes that need the same folder at the same time wait for the one that computes it.  A part of a folder is never
    seen under its name.

    Args:
        folder: the folder.
        read: opens a folder; raises :class:`Damaged`.
        write: fills a new, empty folder.

    Raises:
        DataError: the folder cannot be written, or what was written cannot be read.
    """
    if folder.is_dir():
        try:
            return _opened(folder, read)
        except Damaged as error:
            log.warning("%s: damaged (%s); computing it again", folder, error)
    with _locked(folder):
        if folder.is_dir():  # another process may have been faster
            try:
                return _opened(folder, read)
            except Damaged:
                pass
        try:
            with replacing_folder(folder) as partial:
                write(partial)
        except WriteError:
            raise
        except OSError as error:
            raise WriteError(error.errno, error.strerror or str(error), str(folder)) from error
        try:
            return read(folder)
        except Damaged as error:
            raise DataError(f"{folder}: what was just written cannot be read ({error}); check the disk") from error


def _opened(folder: Path, read: Callable[[Path], Content]) -> Content:
    """`read(folder)`; what an index of other values than expected raises is damage as well."""
    try:
        return read(folder)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise Damaged(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from error


def stored_files(folder: Path, write: Callable[[Path], None]) -> Path:
    """A stored folder of plain files, whose sizes and contents are checked against a manifest.

    Args:
        folder: the folder.
        write: fills a new, empty folder.

    Returns:
        `folder`.

    Raises:
        DataError: the folder cannot be written.
    """

    def fill(partial: Path) -> None:
        write(partial)
        states = {path.relative_to(partial).as_posix(): _state(path) for path in _files(partial)}
        (partial / MANIFEST).write_text(json.dumps(states))

    return stored(folder, _check_manifest, fill)


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write an index with a checksum of its own.

    Args:
        folder: of a cache entry; the index is written into it.
        index: plain values, which JSON can hold.
    """
    (folder / INDEX).write_text(json.dumps({**index, "check": digest(index)}))


def read_index(folder: Path) -> dict[str, Any]:
    """The index that :func:`write_index` has written.  Raises :class:`Damaged`.

    Args:
        folder: of a cache entry.
    """
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
        check = index.pop("check")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"its index cannot be read: {error}") from error
    if check != digest(index):
        raise Damaged("its index does not fit")
    return index


def digest(plain: Any) -> str:
    """SHA-256 of plain values, 64 hexadecimal digits.

    Args:
        plain: mappings, lists, texts, numbers, None.
    """
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _check_manifest(folder: Path) -> Path:
    try:
        states = json.loads((folder / MANIFEST).read_bytes())
        wrong = next((name for name, state in states.items() if _state(folder / name) != state), None)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise Damaged(str(error)) from error
    if wrong is not None or not states:
        raise Damaged(f"{wrong or MANIFEST} is not what was written")
    return folder


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _state(path: Path) -> list[int | str]:
    size = path.stat().st_size
    return [size] if path.suffix in BY_SIZE else [size, hashlib.sha256(path.read_bytes()).hexdigest()]


def _locked(folder: Path) -> AcquireReturnProxy:
    """The only writer of `folder` while it lasts; the system frees the lock when its holder dies."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return lock.acquire(timeout=0)
    except Timeout:
        log.info("%s: waiting for another process that computes it", folder.name)
        return lock.acquire()
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(folder.parent)) from error
