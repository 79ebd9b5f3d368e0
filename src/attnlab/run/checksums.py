"""Checksums of the weights of a run: `SHA256SUMS` beside the files, as sha256sum writes it and `sha256sum -c` reads it.

A file is written first, then its new checksum is added to the old one, then it replaces the old file: whenever a
process is killed, the file that is there fits one of the lines of its name.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnlab.errors import DataError
from attnlab.run.files import replacing, write_text

SUMS = "SHA256SUMS"


@contextmanager
def replacing_summed(path: Path) -> Iterator[Path]:
    """:func:`attnlab.run.files.replacing` with a checksum. One process at a time may write in a folder.

    Raises:
        WriteError: as `replacing` raises it.
    """
    with replacing(path) as partial:
        yield partial
        digest = digest_of(partial)
        _write(
            path.parent, [*(line for line in _read(path.parent) if line != (digest, path.name)), (digest, path.name)]
        )
    _write(path.parent, [*_others(path), (digest, path.name)])


def verify(path: Path) -> bool:
    """Whether a file has a checksum, which it then fits.

    Raises:
        DataError: it is not what was written.
    """
    expected = {digest for digest, name in _read(path.parent) if name == path.name}
    if expected and digest_of(path) not in expected:
        raise DataError(
            f"{path}: damaged: its content is not what {SUMS} beside it says; copy the file again, or use another "
            "file of the run's checkpoints/"
        )
    return bool(expected)


def forget(path: Path) -> None:
    """Remove the checksum of a file that was removed."""
    others = _others(path)
    if others != _read(path.parent):
        _write(path.parent, others)


def digest_of(path: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _others(path: Path) -> list[tuple[str, str]]:
    return [line for line in _read(path.parent) if line[1] != path.name]


def _read(folder: Path) -> list[tuple[str, str]]:
    """(digest, name) of each line. DataError: there is a file, and it is no list of checksums."""
    path = folder / SUMS
    if not path.is_file():
        return []
    try:
        lines = [line.split("  ", 1) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(digest, name) for digest, name in lines]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a list of checksums as sha256sum writes it ({error})") from error


def _write(folder: Path, lines: list[tuple[str, str]]) -> None:
    write_text(folder / SUMS, "".join(f"{digest}  {name}\n" for digest, name in lines))
