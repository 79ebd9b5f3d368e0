"""Atomic writes: a reader sees the old file or folder or the new one, never a part of it.

The weights of a run have checksums: `SHA256SUMS` beside the files, as sha256sum writes it and `sha256sum -c` reads it.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from attnlab.errors import DataError, WriteError

SUMS = "SHA256SUMS"
PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial$")  # the end of a name that `replacing` gives
UMASK = os.umask(0)  # it can only be read by setting it, for all threads: so once, while the program starts
os.umask(UMASK)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn every OSError inside the block into a WriteError that names `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of a file; missing folders are made. WriteError: the old file is unchanged."""
    with replacing(path) as partial, writing(path):
        partial.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """:func:`write_bytes` of a text in UTF-8. Line ends stay as they are."""
    write_bytes(path, text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` for the new content, which replaces `path` when the block succeeds.

    Several processes may do this at once: the last one wins. Missing folders are made. After an error the old file is
    unchanged and the new one is removed. WriteError: the folder cannot be made or the file not replaced.
    """
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        with writing(path):
            _complete(partial)
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it must not hide what went wrong: the name is too long, the disk is gone
            partial.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a new, empty folder beside `path`, which replaces `path` when the block succeeds.

    One process at a time may write to a path. The next process removes what a killed one has left behind. After an
    error the old folder is unchanged and the new one is removed. WriteError: the folder cannot be made or replaced.
    """
    partial, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")
    try:
        with writing(path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        yield partial
        with writing(path):
            for file in partial.rglob("*"):
                if file.is_file():
                    _complete(file)
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                path.rename(old)  # a folder cannot be replaced by a rename unless it is empty
            partial.rename(path)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Remove the unfinished files of a killed process from a locked folder and from those below it."""
    for path in folder.rglob(".*.partial"):
        if PARTIAL.search(path.name):
            path.unlink(missing_ok=True)


def _complete(file: Path) -> None:
    """Give a file the mode of a new one, and wait until the disk has it."""
    file.chmod(0o666 & ~UMASK)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


# --- checksums ----------------------------------------------------------------------------------------------------


@contextmanager
def replacing_summed(path: Path) -> Iterator[Path]:
    """:func:`replacing` with a checksum. One process at a time may write in a folder.

    The new checksum is added to the old one before the file is replaced: if the process is killed, the file fits one
    of the two.
    """
    before = _read_sums(path.parent)
    with replacing(path) as partial:
        yield partial
        line = digest_of(partial), path.name
        _write_sums(path.parent, [*before, line])
    _write_sums(path.parent, [*(other for other in before if other[1] != path.name), line])


def verify(path: Path) -> bool:
    """Whether a file has a checksum, which it then fits. DataError: the file is damaged."""
    expected = {digest for digest, name in _read_sums(path.parent) if name == path.name}
    if expected and digest_of(path) not in expected:
        raise DataError(f"{path}: damaged: it is not what {SUMS} beside it says; copy it again, or use another file")
    return bool(expected)


def remove_checksum(path: Path) -> None:
    """Remove the checksum of a file that was removed."""
    _write_sums(path.parent, [line for line in _read_sums(path.parent) if line[1] != path.name])


def digest_of(path: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_sums(folder: Path) -> list[tuple[str, str]]:
    """(digest, name) of each line. DataError: there is a file, and it is no list of checksums."""
    path = folder / SUMS
    try:
        lines = [line.split("  ", 1) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(digest, name) for digest, name in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a list of checksums as sha256sum writes it ({error})") from error


def _write_sums(folder: Path, lines: list[tuple[str, str]]) -> None:
    write_text(folder / SUMS, "".join(f"{digest}  {name}\n" for digest, name in lines))
