"""Files and folders that are replaced at once or not at all."""

import errno
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnlab.errors import AttnlabError, WriteError
from attnlab.run.files import replacing, replacing_folder, write_bytes, write_text


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Writing more than `size` bytes to a file fails with EFBIG."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_folder(path: Path, text: str) -> None:
    with replacing_folder(path) as new:
        (new / "inner").mkdir()
        (new / "inner" / "file").write_text(text)


def test_files_follow_the_umask_whatever_a_library_gives_them(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with replacing(tmp_path / "file") as new:
        new.touch(0o600)
    with replacing_folder(tmp_path / "folder") as folder:
        (folder / "file").touch(0o600)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "file", "folder/file")}
    assert len(modes) == 1


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with files_up_to(100), pytest.raises(WriteError, match="file: ") as caught:
        write_bytes(path, b"new" * 1000)
    assert isinstance(caught.value, OSError) and isinstance(caught.value, AttnlabError)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match=f"{tmp_path}/file: .*disk full") as caught:
        write_bytes(tmp_path / "file", b"new")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(WriteError, match="folder: "):
        write_folder(tmp_path / "folder", "new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("write", [write_text, write_folder])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(WriteError, match=r"a/b: .*(File exists|Not a directory)"):
        write(tmp_path / "a" / "b", "")


def test_replacing_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "weights"
    with replacing(path) as new:
        assert new.parent == path.parent and not path.exists()
        new.write_text("first")
    with pytest.raises(KeyError), replacing(path) as new:
        new.write_text("half of the second")
        raise KeyError
    with pytest.raises(WriteError), replacing(path):
        pass  # nothing was written
    assert path.read_text() == "first"
    write_text(path, "zwei Töne\r\n")
    assert path.read_bytes() == "zwei Töne\r\n".encode()
    with replacing(path) as new, replacing(path) as other:
        new.write_text("new")
        other.write_text("other")
    assert path.read_text() == "new"  # its block ended last
    assert os.listdir(path.parent) == ["weights"]


def test_replacing_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "corpus"
    write_folder(path, "first")
    (path / "extra").touch()
    for name in (".corpus.partial", ".corpus.old"):  # of a killed process
        (path.parent / name).mkdir()
        (path.parent / name / "rest").touch()
    write_folder(path, "second")
    with pytest.raises(KeyError), replacing_folder(path) as new:
        (new / "inner").mkdir()
        raise KeyError
    assert (path / "inner" / "file").read_text() == "second"
    assert os.listdir(path) == ["inner"] and os.listdir(path.parent) == ["corpus"]
