"""Writing files so that no reader ever sees half of one."""

from pathlib import Path
from uuid import uuid4

from attnlab.errors import DataError


def write_atomically(path: Path, data: bytes) -> None:
    """Raises DataError (disk full, no permission); then nothing is left behind and an older `path` stays."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
