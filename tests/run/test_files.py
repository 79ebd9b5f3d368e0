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


def test_a_file_is_replaced_and_its_folders_are_made(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a" / "b", b"one")
    write_text(tmp_path / "a" / "b", "zwei Töne\r\n")
    assert (tmp_path / "a" / "b").read_bytes() == "zwei Töne\r\n".encode()
    assert os.listdir(tmp_path / "a") == ["b"]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_follow_the_umask_whatever_a_library_gives_them(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "file") as new:
            new.touch(0o600)
        with replacing_folder(tmp_path / "folder") as folder:
            (folder / "file").touch(0o600)
    finally:
        os.umask(before)
    for path in (tmp_path / "file", tmp_path / "folder" / "file"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with files_up_to(100), pytest.raises(WriteError, match="file: cannot be written") as caught:
        write_bytes(path, b"new" * 1000)
    assert isinstance(caught.value, OSError) and isinstance(caught.value, AttnlabError)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write_bytes(tmp_path / "file", b"new")
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value) == f"{tmp_path}/file: cannot be written (No space left on device); disk full"
    with pytest.raises(WriteError), replacing_folder(tmp_path / "folder") as new:
        (new / "x").touch()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("write", [lambda path: write_bytes(path, b""), lambda path: _folder(path, "")])
def test_a_file_in_the_place_of_a_folder_is_one_line(tmp_path: Path, write: Callable[[Path], None]) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(WriteError, match=r"a/b: cannot be written \((File exists|Not a directory)\)"):
        write(tmp_path / "a" / "b")


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
    assert os.listdir(path.parent) == ["weights"]


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as first, replacing(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # its block ended last


def _folder(path: Path, text: str) -> None:
    with replacing_folder(path) as new:
        (new / "inner").mkdir()
        (new / "inner" / "file").write_text(text)


def test_replacing_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "corpus"
    _folder(path, "first")
    (path / "extra").touch()
    _folder(path, "second")
    assert (path / "inner" / "file").read_text() == "second"
    with pytest.raises(KeyError), replacing_folder(path) as new:
        (new / "inner").mkdir()
        raise KeyError
    assert (path / "inner" / "file").read_text() == "second"
    assert os.listdir(path) == ["inner"] and os.listdir(path.parent) == ["corpus"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    for name in (".corpus.partial", ".corpus.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rest").touch()
    _folder(tmp_path / "corpus", "whole")
    assert os.listdir(tmp_path) == ["corpus"] and os.listdir(tmp_path / "corpus") == ["inner"]
