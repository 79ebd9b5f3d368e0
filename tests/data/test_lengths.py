"""Recordings whose length is not what their file says, and samples that are no sound."""

import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile

from attnlab.data import Table
from attnlab.data.corpus import OTHER_LENGTH
from attnlab.data.lengths import lengths
from attnlab.data.report import Report
from attnlab.data.sequence_to_text import SequenceToTextData
from attnlab.data.speech.features import read_waveform
from attnlab.errors import DataError
from tests.data.conftest import BANK
from tests.data.layouts import write

RATE, SECONDS = 16000, 3
FORMATS = {  # suffix: format and subtype
    "wav": ("WAV", "PCM_16"),
    "ulaw.wav": ("WAV", "ULAW"),
    "float.wav": ("WAV", "FLOAT"),
    "wavex.wav": ("WAVEX", "PCM_24"),
    "rf64": ("RF64", "PCM_16"),
    "aiff": ("AIFF", "PCM_16"),
    "au": ("AU", "PCM_16"),
    "w64": ("W64", "PCM_16"),
    "sph": ("NIST", "PCM_16"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "ogg": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "voc": ("VOC", "PCM_16"),
    "caf": ("CAF", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
}
HEADERLESS = ("ogg", "opus")  # files that do not say how long they are


def recorded(root: Path, name: str) -> Path:
    path = root / f"a.{name}"
    time = np.arange(SECONDS * RATE) / RATE
    noise = np.random.default_rng(1).normal(0, 0.05, len(time))
    form, subtype = FORMATS[name]
    soundfile.write(path, 0.3 * np.sin(2 * np.pi * 300 * time) + noise, RATE, subtype, format=form)
    return path


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "caf"])  # libsndfile refuses it
def test_a_file_that_is_cut_short(name: str, tmp_path: Path) -> None:
    path = recorded(tmp_path, name)
    assert lengths(path) == (RATE, SECONDS * RATE, "")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    rate, length, contradiction = lengths(path)
    assert rate == RATE and 0.2 < length / rate < 2
    promised = "and the file ends before its stream does" if name in HEADERLESS else "its header says 3.00 s"
    assert contradiction == f"{length / rate:.2f} s, {promised}"
    if name == "flac":
        with pytest.raises(DataError, match=r"a.flac: expected a recording that is complete"):
            read_waveform(path, 0, length)
        return
    assert len(read_waveform(path, 0, length)) == length  # all that is said to be there can be read


@pytest.mark.parametrize("name", ["mp3", "ogg", "opus"])
def test_a_file_with_more_than_its_header_says(name: str, tmp_path: Path) -> None:
    path = recorded(tmp_path, name)
    data = path.read_bytes()
    other = data if name == "mp3" else data.replace(data[14:18], b"abcd")  # another stream
    path.write_bytes(data + other)
    told = "about 6.00 s by its size" if name == "mp3" else "the first of several streams"
    assert lengths(path) == (RATE, SECONDS * RATE, f"3.00 s, {told}")


SIZES = {
    "wav": (b"data", 4, "<I", 0),
    "rf64": (b"ds64", 16, "<Q", 0),
    "aiff": (b"SSND", 4, ">I", 8),
    "au": (b".snd", 8, ">I", 0),
}
SIZES |= {"w64": (b"data\xf3", 16, "<Q", 24), "caf": (b"data", 4, ">Q", 4)}  # marker, place of the size, its form, more


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("content", ["sound", "zeros", "text"])
def test_a_file_with_a_smaller_size_in_its_header(name: str, content: str, tmp_path: Path) -> None:
    path = recorded(tmp_path, name)
    marker, place, form, more = SIZES[name]
    data = bytearray(path.read_bytes())
    at = data.index(marker) + place
    struct.pack_into(form, data, at, RATE + more)  # half a second
    if content != "sound":
        data[-5 * RATE :] = (b"\0" if content == "zeros" else b"a") * 5 * RATE
    path.write_bytes(data)
    _, length, contradiction = lengths(path)
    if name == "w64":  # it is read to the end of the file
        assert (length, contradiction) == (SECONDS * RATE, "3.00 s, its header says 0.50 s")
    elif name == "rf64":  # which also has the number of samples
        assert (length, contradiction) == (RATE / 2, "0.50 s, its header says 3.00 s")
    else:
        assert length == RATE / 2 and contradiction == "0.50 s, about 3.00 s by its size"


@pytest.mark.parametrize("name", ["w64", "voc", "wav", "rf64", "au", "aiff", "caf"])
def test_bytes_behind_the_sound(name: str, tmp_path: Path) -> None:
    path = recorded(tmp_path, name)
    path.write_bytes(path.read_bytes() + b"\1\2" * RATE)
    _, length, contradiction = lengths(path)
    read = name in ("w64", "voc")  # as sound
    told = "4.00 s, its header says 3.00 s" if read else "3.00 s, about 4.00 s by its size"
    assert (length, contradiction) == ((4 if read else SECONDS) * RATE, told)


def test_a_flac_stream_of_another_length_than_its_header_says(tmp_path: Path) -> None:
    path = recorded(tmp_path, "flac")
    data = bytearray(path.read_bytes())
    for seconds, told in ((1, "1.00 s, its stream has 3.00 s"), (4, "3.00 s, its header says 4.00 s")):
        data[22:26] = (seconds * RATE).to_bytes(4, "big")
        path.write_bytes(data)
        assert lengths(path)[2] == told


@pytest.mark.parametrize("tag", [b"TAG" + bytes(125), b"LIST" + (900).to_bytes(4, "little") + b"INFO" + bytes(896)])
def test_tags_behind_the_sound_are_no_contradiction(tag: bytes, tmp_path: Path) -> None:
    for name in ("wav", "flac", "aiff"):
        path = recorded(tmp_path, name)
        path.write_bytes(path.read_bytes() + tag)
        assert lengths(path) == (RATE, SECONDS * RATE, "")


@pytest.mark.parametrize("size", [0x7FFFF000, 0x80000000, 0xFFFFFFFF])
def test_the_sizes_of_files_that_were_written_to_a_pipe_promise_nothing(size: int, tmp_path: Path) -> None:
    path = recorded(tmp_path, "wav")
    data = path.read_bytes()
    path.write_bytes(data[:40] + size.to_bytes(4, "little") + data[44:])
    assert lengths(path) == (RATE, SECONDS * RATE, "")


def test_a_length_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path, "flac")
    data = bytearray(path.read_bytes())
    data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 0])
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a.flac: its header does not say how long it is"):
        lengths(path)


def test_a_short_recording_is_reported_and_refused_by_a_key(tmp_path: Path) -> None:
    for i in range(3):
        path = recorded(tmp_path, "wav").rename(tmp_path / f"{i}.wav")
        write(path.with_suffix(".txt"), "word")
    path.write_bytes(path.read_bytes()[:40000])
    with Report().of("train") as report:
        Table("text", "text", "audio", hold_out=3).read(tmp_path, "train", "audio", False)
    note = report.noted[OTHER_LENGTH]
    assert (note.count, note.example) == (1, f"{path}: 1.25 s, its header says 3.00 s")
    data = SequenceToTextData(
        str(tmp_path), str(tmp_path / "cache"), Table("text", "text", "audio", hold_out=3), BANK, strict=True
    )
    with pytest.raises(
        DataError, match=r"2.wav: 1.25 s, its header says 3.00 s \(1 of train\); task.data.strict=false"
    ):
        data.setup()


@pytest.mark.parametrize(
    "values", [[np.nan], [np.inf], [-np.inf], [1e30], [1e300], [[0, np.nan]], [[np.inf, -np.inf]], [[1e38] * 4]]
)
def test_samples_that_are_no_sound(values: list[float], tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    samples = np.zeros((100, np.size(values)))
    samples[50] = values[0]
    soundfile.write(path, samples, RATE, "DOUBLE")
    with pytest.raises(DataError, match=r"a.wav: damaged audio, samples of .*; expected numbers from -1 to 1"):
        read_waveform(path, 0, 100)


@pytest.mark.parametrize(
    "samples", [np.zeros(9000), np.ones(9000), np.full(3, 0.5), np.full(500, 1.5), np.zeros((9, 8))]
)
def test_unusual_sound(samples: np.ndarray, tmp_path: Path) -> None:
    """Silence, clipped and very short recordings are read."""
    soundfile.write(tmp_path / "a.wav", samples, RATE, "FLOAT")
    features = BANK(read_waveform(tmp_path / "a.wav", 0, len(samples)), RATE)
    assert len(features) and np.isfinite(features).all()
