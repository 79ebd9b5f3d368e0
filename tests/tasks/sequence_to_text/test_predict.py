"""Recordings as inputs of a trained model: files, parts that the rows of a file name, and arrays."""

import json
from pathlib import Path

import numpy as np
import pytest

from attnlab.data.corpus import AUDIO
from attnlab.data.inputs import InputKind, Inputs, items_of
from attnlab.errors import DataError
from attnlab.tasks.sequence_to_text.predict import check_audio, part, recording
from tests.data.layouts import RATE, audio, write

SPEECH = InputKind("audio file", AUDIO, ("audio", "path"), check_audio, part)


def test_rows_name_parts_of_recordings(tmp_path: Path) -> None:
    path = audio(tmp_path / "a  b.wav", 3)
    complete, rate = recording(str(path))
    rows = [{"audio": path.name}, {"audio": path.name, "offset": 1, "duration": 0.5, "speaker": 3}]
    write(tmp_path / "rows.jsonl", *map(json.dumps, rows))
    inputs = list(Inputs(tmp_path / "rows.jsonl", SPEECH))
    assert [item.fields for item in inputs] == rows
    read = [recording(item.value) for item in inputs]
    (item,) = items_of({"path": str(path), "start": 1, "end": 1.5}, SPEECH)
    for samples, expected in zip(
        [*(x for x, _ in read), recording(item.value)[0]],
        [complete, complete[rate : rate * 3 // 2], complete[rate : rate * 3 // 2]],
        strict=True,
    ):
        np.testing.assert_array_equal(samples, expected)
    write(tmp_path / "rows.jsonl", json.dumps({"audio": path.name, "offset_ms": 1000}))
    with pytest.raises(DataError, match="rows.jsonl line 1: the column 'offset_ms' looks like a time"):
        Inputs(tmp_path / "rows.jsonl", SPEECH)


def test_a_text_stays_as_it_is() -> None:
    (item,) = items_of({"text": "either//or  /", "duration": 3}, InputKind("text", (), ("text",)))
    assert item.value == "either//or  /"


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_samples_of_an_array_that_are_no_sound(value: float) -> None:
    with pytest.raises(DataError, match="a recording: damaged audio, samples of .*; expected numbers from -1 to 1"):
        recording((np.full(RATE, value), RATE))


def test_what_a_folder_holds_beside_recordings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.wav", "b.FLAC", "c.aiff", ".d.wav", ".Trash-1000/e.wav", "__MACOSX/._a.wav", "notes.txt", "f.m4a"):
        write(tmp_path / name, "") if name[-3:] in ("txt", "m4a") else audio(tmp_path / name)
    assert [Path(item.value).name for item in Inputs(tmp_path, SPEECH)] == ["a.wav", "b.FLAC", "c.aiff"]
    (line,) = caplog.messages
    assert "hidden file or folder: 3" in line and "no audio file (.m4a): 1" in line and "(.txt): 1" in line
