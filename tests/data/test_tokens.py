"""Ids on disk: built once, damage is noticed; and shards of other programs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from attnlab.data.text.tokens import HEADER, MAGIC, build, open_shard
from attnlab.errors import DataError

BATCHES = [([[1, 2, 3], [4]], 5), ([[5, 6]], 2)]


def test_a_file_is_built_once_and_found_again(tmp_path: Path) -> None:
    calls = []

    def batches() -> Iterator[tuple[list[list[int]], int]]:
        calls.append(1)
        yield from BATCHES

    wide = build(tmp_path / "wide", [([[65536, 0]], 1)], 65537)
    assert wide.read(0, 2).tolist() == [65536, 0] and (tmp_path / "wide" / "tokens.bin").stat().st_size == 8
    with pytest.raises(DataError, match="give no tokens"):
        build(tmp_path / "none", [([[]], 0)], 10)
    for _ in range(2):
        file = build(tmp_path / "train-1", batches(), 10)
        assert (tmp_path / "train-1" / "tokens.bin").stat().st_size == 12
        assert file.read(0, 6).tolist() == [1, 2, 3, 4, 5, 6] and file.read(2, 4).tolist() == [3, 4]
        assert (len(file), file.words) == (6, 7)
    assert len(calls) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if "lock" not in path.name) == ["train-1", "wide"]


@pytest.mark.parametrize("damage", ["bit", "short"])
def test_a_damaged_file_is_built_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path / "a", BATCHES, 10)
    data = tmp_path / "a" / "tokens.bin"
    if damage == "bit":
        content = bytearray(data.read_bytes())
        content[4] ^= 8
        data.write_bytes(content)
    else:
        data.write_bytes(data.read_bytes()[:-2])
    assert build(tmp_path / "a", BATCHES, 10).read(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert "computing it again" in caplog.text


def write_shard(path: Path, ids: list[int], magic: int = MAGIC, version: int = 1, count: int | None = None) -> Path:
    header = np.zeros(HEADER, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype="<u2").tobytes())
    return path


def test_a_shard_with_and_without_a_header(tmp_path: Path) -> None:
    assert open_shard(write_shard(tmp_path / "a.bin", [7, 8, 9]), 10).read(0, 3).tolist() == [7, 8, 9]
    np.arange(5, dtype="<u2").tofile(tmp_path / "train.bin")
    assert open_shard(tmp_path / "train.bin", 10).read(0, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("content", "magic"),
    [
        ({"version": 2}, MAGIC),
        ({"count": 4}, MAGIC),
        ({"magic": 20240801}, 20240801),  # uint32 ids of the Llama 3 vocabulary
        ({"magic": int(np.int32(MAGIC).byteswap())}, int(np.int32(MAGIC).byteswap())),  # another byte order
        ({"ids": []}, MAGIC),
    ],
)
def test_a_shard_with_a_wrong_header(tmp_path: Path, content: dict[str, int], magic: int) -> None:
    path = write_shard(tmp_path / "a.bin", **{"ids": [1, 2, 3], **content})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=rf"a.bin: the header is \[{magic}, .*; expected .* \[{MAGIC}, 1, "):
        open_shard(path, 10)


@pytest.mark.parametrize(
    ("length", "message"), [(1029, "1029 bytes"), (200, f"the header is .{MAGIC}"), (0, "0 bytes; expected uint16")]
)
def test_a_shard_that_is_cut(tmp_path: Path, length: int, message: str) -> None:
    path = write_shard(tmp_path / "a.bin", [1, 2, 3])
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match=rf"a.bin: {message}"):
        open_shard(path, 10)


def test_an_id_outside_the_vocabulary(tmp_path: Path) -> None:
    file = open_shard(write_shard(tmp_path / "a.bin", [1, 2, 50300, 3]), 50257)
    assert file.read(0, 2).tolist() == [1, 2]
    with pytest.raises(DataError, match=r"a.bin: id 50300 at position 2 is outside the vocabulary of 50257"):
        file.read(1, 4)
