"""Ids on disk: found again, whole or noticed; and other people's shards."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from attnlab.data.text import tokens
from attnlab.data.text.tokens import HEADER, MAGIC, build, open_shard
from attnlab.errors import DataError

BATCHES = [([[1, 2, 3], [4]], 5), ([[5, 6]], 2)]


def test_a_file_is_built_once_and_found_again(tmp_path: Path) -> None:
    calls = []

    def batches() -> Iterator[tuple[list[list[int]], int]]:
        calls.append(1)
        yield from BATCHES

    for _ in range(2):
        file = build(tmp_path / "train-1", batches(), 10)
        assert file.read(0, 6).tolist() == [1, 2, 3, 4, 5, 6] and file.read(2, 4).tolist() == [3, 4]
        assert (len(file), file.words) == (6, 7)
    assert len(calls) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if "lock" not in path.name) == ["train-1"]


@pytest.mark.parametrize("vocab_size", [65536, 65537])
def test_ids_are_as_wide_as_they_must_be(tmp_path: Path, vocab_size: int) -> None:
    file = build(tmp_path / "a", [([[vocab_size - 1, 0]], 1)], vocab_size)
    assert file.read(0, 2).tolist() == [vocab_size - 1, 0]
    assert (tmp_path / "a" / "tokens.bin").stat().st_size == (4 if vocab_size == 65536 else 8)


@pytest.mark.parametrize("damage", ["bit", "short", "index", "index is no JSON", "dtype"])
def test_a_damaged_file_is_built_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path / "a", BATCHES, 10)
    data, index = tmp_path / "a" / "tokens.bin", tmp_path / "a" / "index.json"
    if damage == "bit":
        content = bytearray(data.read_bytes())
        content[4] ^= 8
        data.write_bytes(content)
    elif damage == "short":
        data.write_bytes(data.read_bytes()[:-2])
    elif damage == "index is no JSON":
        index.write_text("{")
    else:
        plain = json.loads(index.read_text())
        index.write_text(json.dumps(plain | ({"dtype": "<u1"} if damage == "dtype" else {"texts": 9})))
    assert build(tmp_path / "a", BATCHES, 10).read(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert "computing it again" in caplog.text


def test_damage_in_a_large_file_is_found_where_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "EAGER", 0)
    monkeypatch.setattr(tokens, "BLOCK", 8)
    build(tmp_path / "a", [([list(range(10))], 1)], 10)
    data = tmp_path / "a" / "tokens.bin"
    content = bytearray(data.read_bytes())
    content[9] ^= 1  # id 4, in the second block of four
    data.write_bytes(content)
    file = build(tmp_path / "a", [], 10)
    assert file.read(0, 4).tolist() == [0, 1, 2, 3] and file.read(8, 10).tolist() == [8, 9]
    with pytest.raises(DataError, match=r"tokens.bin: damaged; delete .*/a and run again"):
        file.read(3, 5)


def test_texts_without_tokens_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give no tokens"):
        build(tmp_path / "a", [([[]], 0)], 10)
    assert not (tmp_path / "a").exists()


def write_shard(path: Path, ids: list[int], magic: int = MAGIC, version: int = 1, count: int | None = None) -> Path:
    header = np.zeros(HEADER, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype="<u2").tobytes())
    return path


def test_a_shard_s_header_is_no_text(tmp_path: Path) -> None:
    assert open_shard(write_shard(tmp_path / "a.bin", [7, 8, 9]), 10).read(0, 3).tolist() == [7, 8, 9]


def test_a_shard_may_have_no_header(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    np.arange(5, dtype="<u2").tofile(path)
    assert open_shard(path, 10).read(0, 5).tolist() == [0, 1, 2, 3, 4]


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
