"""The compiled library: where it is stored, and that a damaged or foreign file is never loaded."""

import logging
import os
import pwd
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnlab.attention.ops import library as module
from attnlab.attention.ops.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
OTHER = Path(torch.__file__).parent / "lib" / "libshm.so"  # a library without these functions
COMPILER = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *--version*) echo {version}; exit;;
  *-dM*) echo "#define __AVX2__ 1"; exit;;
esac
while [ "$1" != -o ]; do shift; done
{build}
"""


class Compiler:
    """A stand-in for the compiler that copies a finished library, and counts."""

    def __init__(self, folder: Path) -> None:
        self.file, self.log = folder / "compiler", folder / "log"
        self.write()

    def write(self, build: str = f'cp "{library()._name}" "$2"', version: str = "1") -> None:  # type: ignore[union-attr]
        self.file.write_text(COMPILER.format(log=self.log, build=build, version=version))
        self.file.chmod(0o700)

    @property
    def builds(self) -> int:
        return self.log.read_text().count("-shared")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.file))
    monkeypatch.setenv("ATTNLAB_CACHE", str(tmp_path / "cache"))
    return made


def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / f"native-{os.getuid()}"


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in folder(tmp_path).iterdir() if path.name != "lock")


def load() -> Any:
    return library.__wrapped__()


def refused(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """Loading falls back to torch, and one line says why."""
    caplog.clear()
    assert load() is None
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    message = record.getMessage()
    assert reason in message and "training and decoding on a CPU take longer" in message and "\n" not in message


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "truncated": truncate,
    "a byte less": lambda file: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file: file.write_bytes(b""),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "a changed byte": lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\1"),
    "another library": lambda file: shutil.copyfile(OTHER, file),
    "a text": lambda file: file.write_text("GROUP ( libm.so )"),
    "one more byte": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_built_again(damage: Callable[[Path], Any], compiler: Compiler, tmp_path: Path) -> None:
    assert load() is not None and load() is not None and compiler.builds == 1
    (name,) = files(tmp_path)
    file, copy = folder(tmp_path) / name, tmp_path / "copy"
    shutil.copyfile(file, copy)  # this process has loaded the file, and a change of it would be one of its memory
    damage(copy)
    copy.replace(file)
    assert load() is not None and compiler.builds == 2 and files(tmp_path) == [name]


def test_the_folder_is_of_the_user_alone(compiler: Compiler, tmp_path: Path) -> None:
    assert load() is not None and folder(tmp_path).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["mode", "link", "owner"])
def test_a_folder_of_others_is_not_used(
    what: str, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert load() is not None
    if what == "mode":
        folder(tmp_path).chmod(0o770)
    elif what == "link":
        folder(tmp_path).rename(tmp_path / "elsewhere")
        folder(tmp_path).symlink_to(tmp_path / "elsewhere")
    else:
        own, user = folder(tmp_path), os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: user)
        own.rename(folder(tmp_path))
    refused(caplog, "expected a folder of this user")


@pytest.mark.parametrize("changed", ["version", "place", "flags", "source"])
def test_another_compiler_flag_or_source_has_a_file_of_its_own(
    changed: str, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    if changed == "version":
        compiler.write(version="2")
    elif changed == "place":
        monkeypatch.setenv("CXX", str(shutil.copy(compiler.file, tmp_path / "other")))
    elif changed == "flags":
        monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-g"))
    else:
        for file in Path(module.__file__).parent.glob("*.cpp"):
            (tmp_path / file.name).write_bytes(file.read_bytes() + b" ")
        monkeypatch.setattr(module, "__file__", str(tmp_path / "library.py"))
    assert load() is not None and compiler.builds == 2 and len(files(tmp_path)) == 2


def test_a_library_that_does_not_fit_is_built_again_once(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.write(f'cp "{OTHER}" "$2"')
    refused(caplog, "lacks the function linear")
    refused(caplog, "lacks the function linear")
    assert compiler.builds == 2
    compiler.write()
    assert load() is not None and load() is not None and compiler.builds == 3


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        ("echo in a file >&2; echo 'x.cpp:1: error: no' >&2; echo more >&2; exit 1", "x.cpp:1: error: no"),
        ("kill -9 $$", "died with <Signals.SIGKILL"),
        ("exit 0", "No such file"),
        (': > "$2"', "file too short"),
        ('head -c 999 /dev/zero > "$2"', "invalid ELF header"),
        ('mkdir "$2"', "Is a directory"),
    ],
)
def test_a_compiler_that_fails(
    build: str, reason: str, compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.write(build)
    refused(caplog, reason)
    assert not [name for name in files(tmp_path) if name.startswith(module.BUILDING)]


def test_a_compiler_that_never_ends(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.write(f"sleep 1000 & echo $! > {tmp_path / 'child'}; wait")
    monkeypatch.setattr(module, "LIMIT", 0.5)
    refused(caplog, "timed out")
    state = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    assert files(tmp_path) == [] and (not state.exists() or state.read_text().split()[2] == "Z")


def test_another_process_that_never_ends(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LIMIT", 0.2)
    folder(tmp_path).mkdir(mode=0o700, parents=True)
    with module._locked(folder(tmp_path)):
        refused(caplog, "another process has it")


def test_several_processes_build_once_and_remove_what_a_killed_one_left(compiler: Compiler, tmp_path: Path) -> None:
    (folder(tmp_path) / f"{module.BUILDING}old").mkdir(parents=True)
    folder(tmp_path).chmod(0o700)
    compiler.write(f'sleep 0.2; cp "{library()._name}" "$2"')  # type: ignore[union-attr]
    with ThreadPoolExecutor(4) as pool:
        assert None not in list(pool.map(lambda _: load(), range(4)))
    assert compiler.builds == 1 and len(files(tmp_path)) == 1


def test_places_that_cannot_hold_it(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
        refused(caplog, "noexec")
    for place, reason in (("/proc/none", "No such file"), ("/dev/null/x", "Not a directory")):
        monkeypatch.setenv("ATTNLAB_CACHE", place)
        refused(caplog, reason)
    monkeypatch.setenv("ATTNLAB_CACHE", "")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    refused(caplog, "home directory")
