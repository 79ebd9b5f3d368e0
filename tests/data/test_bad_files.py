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

from attnlab.data.corpus import inspect_audio, read_records, read_text
from attnlab.data.images.folder import Images
from attnlab.data.questions.rows import rows
from attnlab.data.speech.ami import AMI, Kaldi
from attnlab.data.speech.an4 import AN4
from attnlab.data.speech.spoken_language import Picovoice
from attnlab.data.speech.stored import frames, read_features
from attnlab.data.text.corpora import read_parquet
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
    refused(lambda: frames(empty, 2), r"a\.npy: not a readable feature file \(an empty file\)")
    refused(lambda: read_features(words, 2), r"b\.npy: not a readable feature file \(expected an array of numbers")
    refused(lambda: frames(directory, 2), r"c\.npy: ")
    for foreign in (pickle.dumps([1.0]), b"PK\x03\x04 an archive"):
        words.write_bytes(foreign)
        refused(
            lambda: frames(words, 2), r"b\.npy: .*\(it does not begin as a \.npy file does\); delete it and write it"
        )
    np.save(words, np.ones((3, 2)))
    words.write_bytes(words.read_bytes()[:-8])
    refused(lambda: frames(words, 2), r"b\.npy: not a readable feature file \(.*\); delete it and write it again")
    np.save(words, np.ones((3, 2), dtype=np.int16))
    assert read_features(words, 2).dtype == np.float32


def test_a_parquet_column_of_another_type(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [1, 2]}), path)
    refused(lambda: list(read_parquet(path)), r"a\.parquet: the column `text` is of type int64; expected string")
    parquet.write_table(pyarrow.table({"text": ["one"]}), path)
    assert list(read_parquet(path)) == ["one"]


def test_json_that_is_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": ' + DEEP)
    refused(lambda: list(read_records(path)), r"a\.jsonl line 1: JSON nested too deeply")
    refused(lambda: list(rows(path, ["a"])), r"a\.jsonl line 1: JSON nested too deeply")
    document = tmp_path / "a.json"
    document.write_text(DEEP)
    refused(lambda: list(rows(document, ["a"])), r"a\.json: JSON nested too deeply")


@pytest.mark.parametrize("content", ['{"train": {"a": 1}}', '{"train": [[1]]}', "[1]", '{"train": "abc"}', DEEP])
def test_split_lists_of_another_shape(tmp_path: Path, content: str) -> None:
    (tmp_path / "bbc-summary-data").mkdir()
    (tmp_path / SPLIT_FILE).write_text(content)
    refused(lambda: XSum().read(tmp_path, "train", "text", False), "no list of ids under 'train'; expected {train")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", r"selection\.tsv line 1: expected the names of three columns, file, coffeeDrink and split"),
        ("file\n", r"selection\.tsv line 1: expected the names of three columns"),
        ("file\tcoffeeDrink\tsplit\na.wav\ttrain\n", r"selection\.tsv line 2: expected file, class and split"),
        ("file\tcoffeeDrink\tsplit\na.wav\tlatte\tdev\n", r"selection\.tsv line 2: split 'dev'; expected train"),
        ("file\tcoffeeDrink\tsplit\n" + "x" * 200_000, r"selection\.tsv: not a table of file, class and split"),
    ],
)
def test_a_table_of_splits_of_another_shape(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "label.json").write_text("{}")
    (tmp_path / "selection.tsv").write_text(content)
    refused(lambda: Picovoice().read(tmp_path, "train", "audio", False), said)


def test_lists_of_a_split_without_a_line(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for name in ("an4_train.fileids", "an4_train.transcription"):
        (tmp_path / "etc" / name).touch()
    refused(lambda: AN4().read(tmp_path, "train", "audio", False), r"an4_train\.fileids: no utterances; expected")
    ami = tmp_path / "ami"
    for folder in ("words", "segments", "corpusResources", "splits"):
        (ami / folder).mkdir(parents=True)
    (ami / "corpusResources" / "meetings.xml").write_text("<meetings/>")
    (ami / "splits" / "split_train.orig").touch()
    refused(lambda: AMI().read(ami, "train", "audio", False), "train has no words")
    (ami / "splits" / "split_train.orig").write_text('["ES2002a"]\n')
    refused(lambda: AMI().read(ami, "train", "audio", False), r"no meeting \[\"ES2002a\"\], which train needs")


def test_a_directory_in_a_file_s_place(tmp_path: Path) -> None:
    refused(lambda: read_text(tmp_path), "it is a directory; expected a file")


def test_images_that_are_too_large_or_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "cat" / "a.png")
    images = Images(tmp_path, 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    refused(lambda: images[0], r"a\.png: too large to be decoded")


def test_a_segment_that_ends_after_its_recording(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    soundfile.write(tmp_path / "a.wav", np.zeros(16000), 16000)
    (folder / "text").write_text("u WORD\n")
    (folder / "wav.scp").write_text("r a.wav\n")
    for ends, said in (("1.50", r"segments line 1: it ends at 1.50 s, but a\.wav is 1\.00 s long"),):
        (folder / "segments").write_text(f"u r 0.20 {ends}\n")
        refused(lambda: Kaldi().read(tmp_path, "train", "audio", False), said)
    (folder / "segments").write_text("u r 2.00 2.50\n")
    refused(lambda: Kaldi().read(tmp_path, "train", "audio", False), r"it starts at 2\.00 s")
    (folder / "segments").write_text("u r 0.20 1.02\n")  # rounded
    (segment,) = Kaldi().read(tmp_path, "train", "audio", False)
    assert (segment.start, segment.num_samples) == (3200, 12800)  # type: ignore[attr-defined]


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
    refused(lambda: inspect_audio(path, "train.tsv line 2"), rf"a\.wav: its header says {rate} samples a second; expec")
    refused(lambda: _length(path), rf"a\.wav: its header says {rate} samples a second; expected 1000 to 384000 Hz")


def test_a_directory_in_place_of_a_text(tmp_path: Path) -> None:
    for name in ("train.en", "dev.en", "dev.de", "test.en", "test.de"):
        (tmp_path / name).write_text("a\n")
    (tmp_path / "train.de").mkdir()
    refused(lambda: Parallel().find(tmp_path, "train", "text"), r"train\.de: a directory; expected a file")
