"""Checksums of weights: whatever is damaged is seen, and a process that is killed leaves nothing that looks damaged."""

import subprocess
from pathlib import Path

import pytest
import torch

from attnlab.errors import DataError
from attnlab.pretrained.weights import read_checkpoint, write_weights
from attnlab.run import files
from attnlab.run.files import SUMS, remove_checksum, replacing_summed, verify
from attnlab.training.checkpoints import AtomicCheckpointIO


def write(path: Path, text: str) -> None:
    with replacing_summed(path) as partial:
        partial.write_text(text)


def test_files_have_the_checksums_of_sha256sum(tmp_path: Path) -> None:
    write(tmp_path / "a b", "one")
    write(tmp_path / "c", "two")
    write(tmp_path / "c", "three")
    assert verify(tmp_path / "a b") and verify(tmp_path / "c")
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "a b: OK\nc: OK\n"
    remove_checksum(tmp_path / "c")
    assert not verify(tmp_path / "c") and verify(tmp_path / "a b")


@pytest.mark.parametrize("moment", ["before the file is replaced", "after"])
def test_a_process_that_is_killed_damages_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    path = tmp_path / "last.ckpt"
    write(path, "old")
    write_text, calls = files.write_text, []

    def killed(place: Path, text: str) -> None:
        calls.append(place)
        if moment == "after" and len(calls) == 2:
            raise KeyboardInterrupt
        write_text(place, text)
        if moment != "after":
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        write(path, "new")
    assert path.read_text() == ("new" if moment == "after" else "old") and verify(path)


@pytest.mark.parametrize("name", ["averaged.safetensors", "last.ckpt"])
def test_any_flipped_byte_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    weights = {"layer.weight": torch.ones(4, 5)}
    if name == "last.ckpt":
        content = {"state_dict": {f"model.{key}": value for key, value in weights.items()}, "identity": {"a": 1}}
        AtomicCheckpointIO().save_checkpoint(content, path)
    else:
        write_weights(path, weights, {"a": 1})
    saved, identity = read_checkpoint(path)
    assert identity == {"a": 1} and torch.equal(saved["layer.weight"], weights["layer.weight"])
    data = path.read_bytes()
    for place in (0, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(DataError, match=f"{path}: damaged"):
            read_checkpoint(path)
    AtomicCheckpointIO().remove_checkpoint(path)
    assert (tmp_path / SUMS).read_text() == ""
