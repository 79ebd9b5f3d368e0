"""Files of a corpus or of the cache that are not what they should be: one line that names the file."""

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import soundfile
from PIL import Image
from pyarrow import parquet

from attnlab.data.corpus import inspect_audio
from attnlab.data.files import read_json, read_text, rows
from attnlab.data.images.folder import Images
from attnlab.data.speech.an4 import AN4
from attnlab.data.speech.spoken_language import Picovoice
from attnlab.data.speech.stored import frames, read_features
from attnlab.data.text.corpora import parquet_texts
from attnlab.data.text.parallel import Parallel
from attnlab.data.text.summaries import SPLIT_FILE, XSum
from attnlab.errors import DataError
from attnlab.run.cache import INDEX, MANIFEST, read_index, stored, stored_files, write_index
from attnlab.run.fingerprint import file_digests
from attnlab.tasks.sequence_to_text.predict import _length

DEEP = "[" * 100_000


def refused(read: Callable[[], object], said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        read()
    assert "\n" not in str(caught.value)


def test_features_that_are_no_array_of_numbers(tmp_path: Path) -> None:
    empty, words, directory = (tmp_path / name for name in ("a.npy", "b.npy", "c.npy"))
    empty.touch()
    np.save(words, np.array([["a", "b"]]))
    directory.mkdir()
    refused(lambda: frames(empty, 2), r"a\.npy: .*\(an empty file\)")
    refused(lambda: read_features(words, 2), r"b\.npy: .*\(expected an array of numbers")
    refused(lambda: frames(directory, 2), r"c\.npy: ")
    for foreign in (pickle.dumps([1.0]), b"PK\x03\x04 an archive"):
        words.write_bytes(foreign)
        refused(lambda: frames(words, 2), r"b\.npy: .*write it again \(it does not begin as a \.npy file does")
    np.save(words, np.ones((3, 2)))
    words.write_bytes(words.read_bytes()[:-8])
    refused(lambda: frames(words, 2), r"b\.npy: expected a feature file; delete a damaged one and write it again")
    np.save(words, np.ones((3, 2), dtype=np.int16))
    assert read_features(words, 2).dtype == np.float32


def test_a_parquet_column_of_another_type(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [1, 2]}), path)
    refused(lambda: list(parquet_texts(path)), r"a\.parquet: the column `text` holds int; expected str")
    parquet.write_table(pyarrow.table({"text": ["one", None]}), path)
    assert list(parquet_texts(path)) == ["one", ""]


def test_json_that_is_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": ' + DEEP)
    refused(lambda: list(rows(path)), r"a\.jsonl line 1: JSON is nested too deeply")
    refused(lambda: read_json(path), r"a\.jsonl line 1: JSON is nested too deeply")


def test_json_objects_of_several_lines(tmp_path: Path) -> None:
    path, text = tmp_path / "x.json", '{\n"a": 1\n} {\n"a": 2}\n\n{"a": 3}\n'
    path.write_text(text)
    assert [(row.number, row.values) for row in rows(path)] == [(1, {"a": 1}), (3, {"a": 2}), (6, {"a": 3})]
    path.write_text(text + '{"a": 3\n')
    refused(lambda: list(rows(path)), "x.json line 7: malformed JSON")
    path.write_text("3\n")
    refused(lambda: list(rows(path)), "x.json line 1: expected a JSON object, found int")
    path.write_text('[{"a": 1}, {"a": 2}]')
    assert [row.where for row in rows(path)] == [f"{path} item 1", f"{path} item 2"]


@pytest.mark.parametrize("content", ['{"train": {"a": 1}}', '{"train": [[1]]}', "[1]", '{"train": "abc"}'])
def test_split_lists_of_another_shape(tmp_path: Path, content: str) -> None:
    (tmp_path / "bbc-summary-data").mkdir()
    (tmp_path / SPLIT_FILE).write_text(content)
    refused(lambda: XSum().read(tmp_path, "train", "text", False), "no list of ids under 'train'; expected {train")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", r"selection\.tsv: an empty file"),
        ("file\tcoffeeDrink\tsplit\na.wav\ttrain\n", r"selection\.tsv line 2: expected file, class, and train or test"),
        ("file\tcoffeeDrink\tsplit\na.wav\tlatte\tdev\n", r"selection\.tsv line 2: expected file, class, and train"),
        ("file\tcoffeeDrink\tsplit\na.wav\tlatte\ttrain\n", r"label\.json: expected .*slot coffeeDrink of a.wav"),
    ],
)
def test_a_table_of_splits_of_another_shape(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "label.json").write_text("{}")
    (tmp_path / "selection.tsv").write_text(content)
    refused(lambda: Picovoice().read(tmp_path, "train", "audio", False), expected)


def test_lists_of_a_split_without_a_line(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for name in ("an4_train.fileids", "an4_train.transcription"):
        (tmp_path / "etc" / name).touch()
    refused(lambda: AN4().read(tmp_path, "train", "audio", False), r"an4_train\.fileids: an empty file; expected")


def test_a_directory_in_a_file_s_place(tmp_path: Path) -> None:
    refused(lambda: read_text(tmp_path), "a directory; expected a text file")
    for name in ("train.en", "dev.en", "dev.de", "test.en", "test.de"):
        (tmp_path / name).write_text("a\n")
    (tmp_path / "train.de").mkdir()
    refused(lambda: Parallel().find(tmp_path, "train", "text"), r"train\.de: a directory; expected a file")


def test_images_that_are_too_large_or_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "cat" / "a.png")
    images = Images(tmp_path, 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    refused(lambda: images[0], r"a\.png: too large to be decoded")


@pytest.mark.parametrize("wrong", ["[]", "3", "null", '"text"', '{"count": []}', '{"check": 1}', DEEP])
def test_a_cache_heals(tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    folder = tmp_path / "a"

    def open_index() -> int:
        return stored(folder, lambda path: int(read_index(path)["count"]), lambda path: write_index(path, {"count": 3}))

    assert open_index() == 3
    (folder / INDEX).write_text(wrong)
    assert open_index() == 3 and "computing it again" in caplog.text
    write_index(folder, {"count": [1]})  # sound, and of another kind
    assert open_index() == 3

    files = tmp_path / "b"
    stored_files(files, lambda path: void((path / "x").write_text("x")))
    (files / MANIFEST).write_text(wrong)
    assert (stored_files(files, lambda path: void((path / "x").write_text("x"))) / "x").read_text() == "x"
    assert "x" in json.loads((files / MANIFEST).read_text())

    memo = tmp_path / "digests.json"
    first = file_digests([files / "x"], memo)
    for content in (wrong, json.dumps({str(files / "x"): "no list"}), json.dumps({str(files / "x"): [1]})):
        memo.write_text(content)
        assert file_digests([files / "x"], memo) == first


def void(_: object) -> None:
    """A writer returns nothing."""


@pytest.mark.parametrize("rate", [1, 999, 2_000_000_000])
def test_a_recording_of_an_impossible_rate(rate: int, tmp_path: Path) -> None:
    """At 1 Hz, a short file would be resampled for minutes."""
    path = tmp_path / "a.wav"
    soundfile.write(path, np.zeros(8000), rate)
    refused(lambda: inspect_audio(path, "train.tsv line 2"), rf"a\.wav: the header has a rate of {rate} Hz; expec")
    refused(lambda: _length(path), rf"a\.wav: the header has a rate of {rate} Hz; expected 1000 to 384000 Hz")
