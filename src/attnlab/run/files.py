"""Atomic writes: a reader finds the old file or folder or the new one, never a part of it."""

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from attnlab.errors import WriteError

PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")  # the end of a name that `replacing` gives


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of a file. Missing folders are made.

    Args:
        path: the file.
        data: its new content.

    Raises:
        WriteError: an OSError (disk full, no permission). The old file is then unchanged and nothing else remains.
    """
    with replacing(path) as partial:
        try:
            partial.write_bytes(data)
        except OSError as error:
            raise _write_error(path, error) from error


def write_text(path: Path, text: str) -> None:
    """:func:`write_bytes` of a text in UTF-8; line ends stay as they are.

    Args:
        path: the file.
        text: its whole content.
    """
    write_bytes(path, text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` for the new content, which replaces `path` when the block succeeds.

    For libraries that write files themselves. Several processes may do this at once: the last one wins.

    Args:
        path: the file. Missing folders are made. Its mode is that of any new file there: libraries write 0600.

    Raises:
        WriteError: the folder cannot be made or the file cannot be replaced. What the block raises is passed on.
            In both cases the old file is unchanged and the new one is removed.
    """
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    _make_folder(path)
    try:
        yield partial
        try:
            partial.chmod(_new_mode(path.parent))
            _sync(partial)
            partial.replace(path)
        except OSError as error:
            raise _write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # it must not hide what went wrong: the name is too long, the disk is gone
            partial.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a new, empty folder beside `path`, which replaces `path` when the block succeeds.

    One process at a time may write to a path: hold a lock where several may try. What a killed process has left
    behind is then removed by the next one.

    Args:
        path: the folder; it need not exist. Missing parents are made.

    Raises:
        WriteError: the folder cannot be made or replaced. What the block raises is passed on. In both cases the old
            folder is unchanged and the new one is removed.
    """
    partial = path.with_name(f".{path.name}.partial")
    old = path.with_name(f".{path.name}.old")
    _make_folder(path)
    try:
        try:
            _remove(partial)
            partial.mkdir()
        except OSError as error:
            raise _write_error(path, error) from error
        yield partial
        try:
            mode = _new_mode(path.parent)
            for file in partial.rglob("*"):
                if file.is_file():
                    file.chmod(mode)
                    _sync(file)
            _remove(old)
            if path.exists():
                path.rename(old)  # a folder cannot be replaced by a rename unless it is empty
            partial.rename(path)
        except OSError as error:
            if old.exists() and not path.exists():
                old.rename(path)
            raise _write_error(path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Remove what a killed process had not written to its end, in a folder and those below it.

    Args:
        folder: nobody else writes there: its lock is held.
    """
    for path in folder.rglob(".*.partial"):
        if PARTIAL.search(path.name):
            path.unlink(missing_ok=True)


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(path, error) from error


def _new_mode(folder: Path) -> int:
    """The permissions of a new file in a folder; the umask itself can only be read by setting it, for all threads."""
    probe = folder / f".{uuid4().hex}.partial"
    try:
        probe.touch()
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _write_error(path: Path, error: OSError) -> WriteError:
    return WriteError(error.errno, error.strerror or str(error), str(path))
