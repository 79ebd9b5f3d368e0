import os
import resource
from pathlib import Path

import pytest

from attnlab.errors import DataError
from attnlab.runs.files import write_atomically


def test_writes_and_makes_folders(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b", b"one")
    write_atomically(tmp_path / "a" / "b", b"two")
    assert (tmp_path / "a" / "b").read_bytes() == b"two"
    assert os.listdir(tmp_path / "a") == ["b"]


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(DataError, match="file: cannot be written"):
            write_atomically(path, b"new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
