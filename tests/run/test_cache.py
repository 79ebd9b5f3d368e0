"""Stored folders: written once, checked, computed again when damaged; one writer at a time."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attnlab.errors import DataError
from attnlab.run.cache import Damaged, read_tensors, stored, stored_files, write_tensors


def write(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "a.txt").write_text("text")
    (folder / "b.wav").write_bytes(b"1234")


def test_a_folder_is_written_once(tmp_path: Path) -> None:
    assert stored_files(tmp_path / "x", write) == tmp_path / "x"
    assert stored_files(tmp_path / "x", lambda _: pytest.fail("written again")) == tmp_path / "x"
    assert sorted(path.name for path in (tmp_path / "x").glob("[!.]*")) == ["b.wav", "inner"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda root: (root / "inner" / "a.txt").write_text("Text"),
        lambda root: (root / "b.wav").write_bytes(b"123"),
        lambda root: (root / "b.wav").unlink(),
        lambda root: (root / ".manifest.json").write_text("{}"),
        lambda root: (root / ".manifest.json").unlink(),
    ],
)
def test_what_is_damaged_is_written_again(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    root = stored_files(tmp_path / "x", write)
    damage(root)
    assert stored_files(root, write) == root
    assert len(caplog.messages) == 1 and f"{root}: damaged" in caplog.text
    assert (root / "inner" / "a.txt").read_text() == "text" and (root / "b.wav").read_bytes() == b"1234"
    stored_files(root, lambda _: pytest.fail("written again"))


def test_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).T, "b": torch.tensor(2.5, dtype=torch.float64)}
    for _ in range(2):
        saved, about = stored(tmp_path / "x", read_tensors, lambda folder: write_tensors(folder, tensors, {"n": [1]}))
        assert about == {"n": [1]}
        torch.testing.assert_close(saved, tensors, rtol=0, atol=0)


def test_what_cannot_be_read_after_writing_is_an_error(tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        raise Damaged("wrong")

    with pytest.raises(DataError, match=r"x: damaged \(wrong\)"):
        stored(tmp_path / "x", read, write)


@pytest.mark.parametrize("damaged", [False, True])
def test_the_second_of_two_writers_waits(tmp_path: Path, damaged: bool) -> None:
    if damaged:
        (stored_files(tmp_path / "x", write) / "b.wav").unlink()
    writers: list[str] = []
    inside, go = threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        writers.append(threading.current_thread().name)
        inside.set()
        assert go.wait(10)
        write(folder)

    threads = [threading.Thread(target=stored_files, args=(tmp_path / "x", slow), name=name) for name in "ab"]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert writers == ["a"]
    assert (tmp_path / "x" / "b.wav").read_bytes() == b"1234"
