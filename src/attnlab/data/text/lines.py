"""Lines of text files, plain or gzipped, checked while they are read."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from attnlab.errors import DataError


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, without line ends; a `.gz` file is decompressed.

    Only a line feed ends a line, because corpora have other separators inside words.

    Args:
        path: the file.

    Raises:
        DataError: the file cannot be read, is empty, or is not text.
    """
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if b"\0" in raw:
                    raise DataError(f"{path}: line {number} has zero bytes: expected UTF-8 text, this is a binary file")
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: line {number} is not UTF-8 ({error.reason}): expected a text file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not number:
        raise DataError(f"{path}: the file is empty; expected text, one sentence or paragraph per line")


def find(root: Path, names: list[str], what: str) -> Path:
    """The first of `names` that exists under `root`, plain or gzipped.

    Args:
        root: the directory of the corpus.
        names: file names relative to `root`, in order of preference.
        what: the content of the file, for the error message.

    Raises:
        DataError: there is none.
    """
    for name in names:
        for path in (root / name, root / f"{name}.gz"):
            if path.is_file():
                return path
            if path.is_dir():
                raise DataError(f"{path}: a directory; expected a file ({what})")
    raise DataError(f"{root / names[0]}: no such file ({what}); data_root names the directory that holds it")
